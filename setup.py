"""Setuptools build of the compiled CPU kernels, a shared library in C. All else is declared in setup.cfg."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("zenps/kernels/native")
# The library uses nothing of Python, so one build serves all versions but those without the GIL: they have no
# stable ABI.
IS_FOR_ALL = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "zenps.kernels.native._library",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            # Contracted products and sums would differ between CPUs. What may trap is not vectorised.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=IS_FOR_ALL,
            # Without a compiler the kernels of NumPy and torch serve.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_FOR_ALL else {},
)
