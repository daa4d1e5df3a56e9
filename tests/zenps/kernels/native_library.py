"""Builds of the native kernels for tests: sanitized, of the least instruction set, with eager threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.cuda.host.build import BUILD, Sanitizer, digest_of, once
from tests.tree import ROOT

SANITIZER = Sanitizer(os.environ.get("ZENPS_HOST_SANITIZER", "none"))
"""That of this process: :mod:`tests.cuda.host.rerun`."""

SOURCES = ROOT / "zenps/kernels/native"
STRICT = ("-std=c11", "-O2", "-g1", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-trapping-math")
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
EAGER = ("-DMIN_THREAD_BYTES=1", "-DMIN_ROW_BYTES=0", "-DMIN_STREAMED_BYTES=0", "-DBLOCK_BYTES=256")
"""Several threads and blocks of sums, and rows that are placed past the caches, for small tensors too."""

TIMEOUT_SECONDS = 120


def has_sanitizer(sanitizer: Sanitizer) -> bool:
    """Whether the C compiler can link a library with it."""
    flags = (*sanitizer.kernel_flags, "-shared", "-fPIC", "-x", "c", os.devnull, "-o", os.devnull)
    done = subprocess.run([c_compiler(), *flags], capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    return done.returncode == 0


def build_native(*flags: str, sanitizer: Sanitizer = SANITIZER) -> Path:
    """The library, compiled without a warning unless it is there already.

    Raises:
        RuntimeError: there is no C compiler, or it refused the sources; the message is the compiler's.
    """
    compiler = c_compiler()
    every = (*STRICT, *WARNINGS, *sanitizer.kernel_flags, *flags)
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]

    def compile_library(out: Path) -> None:
        command = [compiler, *every, *sources, "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")

    digest = digest_of("", (compiler, *every), [*SOURCES.glob("*.[ch]")])
    return once(BUILD / f"native-{digest}.so", compile_library)


def c_compiler() -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("gcc is missing: expected a C compiler, which these tests need")
    return compiler
