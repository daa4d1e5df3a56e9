"""Build of kernels for the CPU: g++ compiles a source of ``cuda/``, unchanged, to a library for ctypes."""

from __future__ import annotations

import enum
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from zenps.kernels.gpu.sources import folder

HERE = Path(__file__).parent
SAMPLES = HERE / "samples"
"""Kernels that test the runtime and the headers."""

BUILD = HERE.parents[2] / "build" / "host"
"""Where libraries are kept; each is named by a hash of everything that went into it."""

COMMON = ("-std=c++17", "-O2", "-g1", "-shared", "-fPIC", "-Wall", "-Wextra")
KERNEL = (
    "-include",
    str(HERE / "cuda_host.h"),
    f"-I{HERE}",
    "-fno-strict-aliasing",  # kernels read packs of numbers as one word
    "-ffp-contract=off",  # or sums would differ between CPUs
    "-ftrivial-auto-var-init=pattern",  # what was never written reads as garbage, each time the same
    "-Wno-unknown-pragmas",  # unroll
)
TIMEOUT_SECONDS = 300


class Sanitizer(enum.StrEnum):
    """The sanitizer under which kernels run."""

    NONE = "none"
    THREAD = "thread"
    """ThreadSanitizer, which finds races."""
    ADDRESS = "address"
    """Finds accesses outside tensors and shared arrays, and undefined behaviour such as misaligned loads."""

    @property
    def kernel_flags(self) -> tuple[str, ...]:
        match self:
            case Sanitizer.NONE:
                return ()
            case Sanitizer.THREAD:
                return ("-fsanitize=thread",)
            case Sanitizer.ADDRESS:
                return ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

    @property
    def runtime_flags(self) -> tuple[str, ...]:
        return () if self is Sanitizer.NONE else (f"-DZENPS_{self.name}_SANITIZER",)


def source_folder() -> Path:
    """The folder of the sources: ``cuda/``, or that of a rerun (:mod:`.rerun`)."""
    return Path(os.environ.get("ZENPS_HOST_SOURCES", folder()))


def build(source: Path, expressions: Sequence[str], sanitizer: Sanitizer) -> Path:
    """The library of the kernels ``expressions`` of ``source``, compiled unless it is there already.

    Raises:
        RuntimeError: g++ refused the source; the message is g++'s.
    """
    stub = _stub(source, expressions)
    # A plant may leave variables unused.
    strict = ("-Werror",) if source_folder() == folder() else ()
    flags = (*COMMON, *KERNEL, *strict, f"-I{source_folder()}", *sanitizer.kernel_flags)
    inputs = [source, *source_folder().glob("*.cuh"), HERE / "cuda_host.h", HERE / "table.h"]
    name = f"{source.stem}-{digest_of(stub, (*_compiler(), *flags), inputs)}"

    def compile_kernels(out: Path) -> None:
        written = out.with_suffix(".cpp")
        written.write_text(stub, encoding="utf-8")
        _gxx(*flags, str(written), "-o", str(out))
        written.unlink()

    return once(BUILD / f"{name}.so", compile_kernels)


def build_runtime(sanitizer: Sanitizer) -> Path:
    """The library that all kernels call; not itself under ThreadSanitizer, which would see its switches."""
    sources = [str(path) for path in sorted(HERE.glob("*.cpp"))]
    flags = (*COMMON, "-Werror", *sanitizer.runtime_flags)
    digest = digest_of("", (*_compiler(), *flags), [*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    return once(BUILD / f"runtime-{digest}.so", lambda out: _gxx(*flags, *sources, "-o", str(out)))


def _stub(source: Path, expressions: Sequence[str]) -> str:
    kernels = "".join(f"    kernel_of<{expression}>(),\n" for expression in expressions)
    return (
        f'#include "{source}"\n#include "table.h"\n'
        f'extern "C" {{\nextern const HostKernel zenps_kernels[];\n'
        f"const HostKernel zenps_kernels[] = {{\n{kernels}}};\n}}\n"
    )


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """Makes ``target`` unless it exists; of several processes that want it, one makes it."""
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with (BUILD / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                unfinished = target.with_name(f"{os.getpid()}-{target.name}")
                make(unfinished)
                unfinished.rename(target)
    return target


def _gxx(*arguments: str) -> None:
    done = subprocess.run(
        [_compiler()[0], *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(arguments)}\n{done.stderr}")


@functools.cache
def _compiler() -> tuple[str, str]:
    """Path and version of g++."""
    path = shutil.which("g++")
    if path is None:
        raise RuntimeError("g++ is missing: the kernels' tests run them on the CPU; install g++ 12 or later")
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=60, check=True)
    return path, done.stdout.strip()


def digest_of(text: str, flags: Sequence[str], files: Sequence[Path]) -> str:
    """A hash of everything that a compiler's output depends on: files, flags, and a text for the rest."""
    hashed = hashlib.sha256("\0".join((text, *flags)).encode())
    for path in sorted(files):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]
