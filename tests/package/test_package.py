"""The package as a user gets it: what is in it, and that it runs from an empty folder."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.package.conftest import ROOT, call
from tests.tree import modules

TYPED = """
import torch
import zenps as zps

zps.init(sets=["sync.partition=balanced"])
handle: zps.Pending = zps.push_pull_async(torch.ones(3), "a")
result: torch.Tensor = zps.synchronize(handle)
optimizer = zps.DistributedOptimizer(torch.optim.SGD([torch.ones(3, requires_grad=True)]))
zps.rank() + "a"  # type: ignore[operator]
zps.push_pul  # type: ignore[attr-defined]
"""
"""The last two lines must be errors: with --strict, mypy refuses a comment that ignores none."""


def sources() -> set[str]:
    """Every file of the package, as a path in the package."""
    found = {str(path.relative_to(ROOT)) for path in modules(ROOT).values()}
    for pattern in ("zenps/cuda/*.cu*", "zenps/kernels/native/*.[ch]", "zenps/scheduler/page/page.*"):
        found |= {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
    return found | {"zenps/py.typed"}


def test_source_distribution_has_all_that_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not any(member.issym() or member.islnk() for member in archive.getmembers())
    assert sources() <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.py", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith(("tests/", "docs/")) or name.endswith(".so")] == []


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert sources() <= names
    assert {name.partition("/")[0] for name in names} == {"zenps", metadata.partition("/")[0]}
    assert metadata.replace("METADATA", "licenses/LICENSE") in names
    assert "License-Expression: Apache-2.0\n" in text
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert f"Version: {setup['metadata']['version']}\n" in text


def test_tag_of_the_wheel_is_that_of_its_library(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    assert libraries == ["zenps/kernels/native/_library.abi3.so"]
    assert re.search(r"-cp311-abi3-linux_\w+\.whl$", wheel.name)


def test_indexes_would_accept_both(dist: Path, wheel: Path) -> None:
    twine: list[str | Path] = ["twine", "check", "--strict", *dist.iterdir()]
    for command in (twine, ["check_wheel_contents", wheel]):
        done = call([sys.executable, "-m", *command], dist)
        assert done.returncode == 0, done.stdout + done.stderr


def test_source_distribution_installs_without_a_compiler(sdist: Path, tmp_path: Path) -> None:
    command: list[str | Path]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist]
    done = call(command, tmp_path, CC="/bin/false")
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    assert sources() <= names
    assert [name for name in names if name.endswith(".so")] == []


def test_installed_package_is_complete(bin_of_installed: Path, tmp_path: Path) -> None:
    assert call([bin_of_installed / "pip", "check"], tmp_path).returncode == 0
    where = call([bin_of_installed / "python", "-c", "import zenps; print(zenps.__file__)"], tmp_path)
    assert Path(where.stdout).is_relative_to(bin_of_installed.parent)
    doctor = call([bin_of_installed / "zenps", "doctor"], tmp_path, TMPDIR=str(tmp_path))
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert re.search(r"kernels +native, ", doctor.stdout)


@pytest.mark.parametrize("programs", ["bin_of_installed", "bin_of_oldest"])
def test_readme_s_example_runs_on_a_cluster(
    programs: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(programs)
    example = (ROOT / "README.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "train.py").write_text(example)
    launch: list[str | Path] = [folder / "zenps", "launch", "--workers", "2", "--servers", "2", "--"]
    done = call([*launch, folder / "python", "train.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"worker {rank}  | rank {rank} of 2: Stats(" in done.stdout


def test_example_of_the_source_distribution_runs(bin_of_installed: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (example,) = tmp_path.glob("*/examples/deepfm.py")
    launch: list[str | Path] = [
        bin_of_installed / "zenps",
        "launch",
        "--workers",
        "2",
        "--servers",
        "1",
        "--",
    ]
    command = [*launch, bin_of_installed / "python", example, "--steps", "3"]
    done = call(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_are_installed(bin_of_installed: Path, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    command: list[str | Path]
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", bin_of_installed / "python"]
    # Without a configuration file, as a user of the package has none of ours.
    done = call([*command, "--config-file=", "typed.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_command_says_its_version(bin_of_installed: Path, wheel: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bin_of_installed / "zenps", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"zenps {wheel.name.split('-')[1]}\n"


def test_oldest_dependencies_do(bin_of_oldest: Path) -> None:
    """The tests of what calls them, from the checkout: they are not in the package."""
    tests = [f"tests/zenps/{folder}" for folder in ("codecs", "config", "observe", "wire")]
    done = call([bin_of_oldest / "pytest", "-q", *tests], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
