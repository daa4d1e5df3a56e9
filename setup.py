"""Setuptools build of the compiled CPU kernels, a shared library in C. All else is declared in setup.cfg."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("zenps/kernels/native")

setup(
    ext_modules=[
        Extension(
            "zenps.kernels.native._library",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            # Contracted products and sums would differ between CPUs. What may trap is not vectorised.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-pthread"],
            extra_link_args=["-pthread"],
            # It uses nothing of Python: one build serves all versions.
            py_limited_api=True,
            # Without a compiler the kernels of NumPy and torch serve.
            optional=True,
        )
    ]
)
