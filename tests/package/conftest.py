"""Source distribution, wheel, and an environment with the wheel. ``make test-package`` runs what is here."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They build and install, which takes a minute, and fetch dependencies."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if not os.environ.get("TEST_PACKAGE"):
                item.add_marker(pytest.mark.skip(reason="make test-package runs it"))


def call(command: Sequence[str | Path], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as a user of the package does: nothing leads to the checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("ZENPS_")}
    environment |= {"PIP_CONSTRAINT": str(CONSTRAINTS), **variables}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has, without what earlier builds have left: setuptools would add some of that."""
    folder = tmp_path_factory.mktemp("fresh")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def dist(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = call([sys.executable, "-m", "build", "--outdir", folder, fresh], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def bin_of_installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment, in which the wheel and what it depends on are installed."""
    return _install(tmp_path_factory.mktemp("installed"), CONSTRAINTS, wheel)


@pytest.fixture(scope="session")
def bin_of_oldest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the oldest dependencies that the package allows, and pytest."""
    folder = tmp_path_factory.mktemp("oldest")
    constraints = folder / "oldest.txt"
    constraints.write_text(oldest_constraints())
    return _install(folder, constraints, wheel, "pytest", "pytest-timeout", "hypothesis")


def oldest_constraints() -> str:
    """Returns the constraints with the oldest versions that setup.cfg allows.

    Except torch's: the index has its oldest one only for CUDA, gigabytes of it.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest = dict(line.split(">=") for line in setup["options"]["install_requires"].split())
    del oldest["torch"]
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    others = [line for line in lines if line.partition("==")[0].lower().replace("_", "-") not in oldest]
    return "\n".join([*others, *(f"{name}=={version}" for name, version in oldest.items())])


def _install(folder: Path, constraints: Path, *packages: str | Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    command = [folder / "bin/python", "-m", "pip", "install", *packages]
    done = call(command, folder, PIP_CONSTRAINT=str(constraints))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"
