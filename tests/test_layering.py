"""Imports lead downwards, in no circle: docs/architecture.md, "Layers"."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.layers import (
    LAYERS,
    PURE,
    Tree,
    breaches_of_layers,
    breaches_of_purity,
    breaches_of_roles,
    circles,
    lies_in,
    named_in,
    violations,
)
from tests.tree import ROLES, ROOT, modules


def loaded_after_importing(modules: list[str], packages: list[str], cwd: Path) -> list[str]:
    """Those of ``packages`` that a fresh interpreter has loaded once it has imported ``modules``."""
    script = (
        "import importlib, json, sys\n"
        "modules, packages = json.loads(sys.argv[1])\n"
        "for module in modules: importlib.import_module(module)\n"
        "print(json.dumps([package for package in packages if package in sys.modules]))\n"
    )
    command = [sys.executable, "-c", script, json.dumps([modules, packages])]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def importable(package: str) -> list[str]:
    """The modules of a package, but for those that run when they are imported."""
    names = [module.removesuffix(".__init__") for module in modules(ROOT) if lies_in(module, (package,))]
    return [name for name in names if not name.endswith(".__main__")]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


def test_roles_meet_only_through_the_wire(tree: Tree) -> None:
    assert list(breaches_of_roles(tree)) == []


@pytest.mark.parametrize("package", LAYERS)
def test_imports_lead_downwards(tree: Tree, package: str) -> None:
    assert list(breaches_of_layers(tree, package)) == []
    assert list(circles(tree, package)) == []
    assert [part for part in named_in(package) if part not in tree.children[package]] == []


@pytest.mark.parametrize("package", PURE)
def test_protocol_has_no_socket_clock_or_thread(tree: Tree, package: str) -> None:
    assert list(breaches_of_purity(tree, package)) == []


def test_the_other_packages_have_no_circle(tree: Tree) -> None:
    others = [package for package in tree.packages if package not in LAYERS]
    assert [circle for package in others for circle in circles(tree, package)] == []


def test_every_package_has_an_entry(tree: Tree) -> None:
    holding = {package.rpartition(".")[0] for package in tree.packages} - {""}
    assert holding == set(LAYERS)


def test_the_walk_sees_every_part(tree: Tree) -> None:
    assert tree.children["zenps"] >= {*ROLES, "__init__", "errors", "wire"}
    assert "strategies" in tree.children["zenps.partition"]
    assert sum(map(len, tree.imports.values())) > 1000


def test_scheduler_loads_neither_torch_nor_cupy() -> None:
    assert loaded_after_importing(importable("zenps.scheduler"), ["torch", "cupy"], ROOT) == []


def test_the_command_line_loads_neither_torch_nor_cupy() -> None:
    assert loaded_after_importing(importable("zenps.cli"), ["torch", "cupy"], ROOT) == []


def test_import_zenps_and_its_settings_load_no_torch() -> None:
    modules = ["zenps", *importable("zenps.config"), "zenps.observe.log"]
    assert loaded_after_importing(modules, ["torch", "cupy"], ROOT) == []


def test_indirectly_loaded_package_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "between.py").write_text("import torch\n")
    (tmp_path / "innocent.py").write_text("import between\n")
    assert loaded_after_importing(["innocent"], ["torch", "cupy"], tmp_path) == ["torch"]


def write(root: Path, files: Mapping[str, str]) -> None:
    """Makes files of these names and texts."""
    for file, source in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(source)


BREACHES = {
    "role imports a role": ("zenps/worker/api.py", "from zenps.server import rounds", "roles meet only"),
    "role imports a role, by name": ("zenps/server/a.py", "from zenps import scheduler", "roles meet only"),
    "role imports a role, relatively": (
        "zenps/scheduler/a.py",
        "from ..worker import api",
        "roles meet only",
    ),
    "role imports a role, inside a function": (
        "zenps/worker/api.py",
        "def f():\n    import zenps.server.rounds.tracker",
        "roles meet only",
    ),
    "role imports a role, dynamically": (
        "zenps/worker/api.py",
        "import importlib\nimportlib.import_module('zenps.server')",
        "roles meet only",
    ),
    "role imports the command line": ("zenps/scheduler/a.py", "from zenps.cli import guard", "layer above"),
    "a shared part names a role": ("zenps/cli/launch.py", "import zenps.worker", "name a role"),
    "codecs import partition": (
        "zenps/codecs/a.py",
        "from zenps.partition.strategies import base",
        "layer above",
    ),
    "config imports the wire": (
        "zenps/config/sources.py",
        "from ..wire import messages",
        "layer above",
    ),
    "partition imports the package": (
        "zenps/partition/layout.py",
        "from zenps import __version__",
        "layer above",
    ),
    "role imports the package": ("zenps/worker/api.py", "import zenps", "layer above"),
    "a part imports another of its layer": (
        "zenps/keys.py",
        "from zenps.observe import log",
        "on the layer of",
    ),
    "a part without a layer": ("zenps/attic.py", "", "has no layer"),
    "a package without a layer": ("zenps/server/attic/a.py", "", "has no layer"),
    "a package that holds packages": ("zenps/codecs/attic/a.py", "", "give it an entry"),
    "core imports encode": ("zenps/worker/core/a.py", "from ..encode import sparse", "layer above"),
    "encode imports transport": ("zenps/worker/encode/a.py", "from ..transport import memory", "layer above"),
    "encode imports rounds": ("zenps/worker/encode/a.py", "from ..rounds import states", "on the layer of"),
    "transport imports a backend, in a function": (
        "zenps/worker/transport/a.py",
        "def f():\n    from zenps.worker.backends.peers import group",
        "layer above",
    ),
    "world imports training": ("zenps/worker/world.py", "from .training import ddp", "layer above"),
    "api imports training": ("zenps/worker/api.py", "from .training import ddp", "on the layer of api"),
    "training imports the role's names": ("zenps/worker/training/a.py", "from .. import push", "layer above"),
    "rounds import the service": ("zenps/server/rounds/a.py", "from ..service import serve", "layer above"),
    "the job imports the page": (
        "zenps/scheduler/membership/job.py",
        "from ..page import endpoint",
        "layer above",
    ),
    "a socket in a pure module": ("zenps/server/rounds/a.py", "import zmq", "no socket, clock or thread"),
    "a thread in a pure module": ("zenps/worker/rounds/a.py", "from threading import Lock", "no socket"),
    "the worker's rounds log": ("zenps/worker/rounds/a.py", "from zenps.observe import log", "only"),
    "the scheduler's socket elsewhere": (
        "zenps/scheduler/membership/job.py",
        "from zenps.wire.sockets import bind_router",
        "no socket",
    ),
    "cuda is a package": ("cuda/__init__.py", "", "hides NVIDIA"),
    "cupy in server": ("zenps/server/a.py", "import cupy as cp", "does without cupy"),
    "cupy in scheduler": ("zenps/scheduler/a.py", "from cupy import cuda", "does without cupy"),
    "torch in scheduler": ("zenps/scheduler/a.py", "import torch.nn", "does without torch"),
    "second copy of a role": ("zenps/cli/commands.py", "import worker", "second copy"),
    "second copy of a role, from": ("zenps/worker/api.py", "from worker.ddp import hook", "second copy"),
    "second copy of a role, in a test": ("tests/worker/test_a.py", "import worker", "second copy"),
}


@pytest.mark.parametrize(("file", "source", "reason"), BREACHES.values(), ids=BREACHES)
def test_breach_is_reported(tmp_path: Path, file: str, source: str, reason: str) -> None:
    write(tmp_path, {file: source})
    (breach,) = violations(tmp_path)
    assert breach.startswith(f"{file}:{len(source.splitlines()) or 1}: ")
    assert reason in breach


CIRCLES = {
    "of modules": {"zenps/wire/a.py": "from .b import x", "zenps/wire/b.py": "from . import a"},
    "of modules that a layer does not name": {
        "zenps/scheduler/a.py": "from .b import x",
        "zenps/scheduler/b.py": "def f():\n    from .c import x",
        "zenps/scheduler/c.py": "import zenps.scheduler.a",
    },
    "of a module and its package": {
        "zenps/codecs/__init__.py": "from .a import x",
        "zenps/codecs/a.py": "from . import x",
    },
}


@pytest.mark.parametrize("files", CIRCLES.values(), ids=CIRCLES)
def test_circle_is_reported(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    (breach,) = violations(tmp_path)
    assert "a circle in zenps" in breach
    assert all(f"{file}:{len(source.splitlines())}" in breach for file, source in files.items())


def test_circle_of_packages_is_reported(tmp_path: Path) -> None:
    codecs, schemes = "from zenps.schemes import b", "from zenps.codecs import b"
    write(tmp_path, {"zenps/codecs/a.py": codecs, "zenps/schemes/a.py": schemes})
    upwards, circle = violations(tmp_path)
    assert "layer above" in upwards
    assert "a circle in zenps: " in circle
    assert all(f"zenps/{name}/a.py:1" in circle for name in ("codecs", "schemes"))


def test_every_circle_is_reported(tmp_path: Path) -> None:
    files = {"zenps/wire/a.py": "from . import b, c", "zenps/wire/b.py": "from . import a"}
    write(tmp_path, {**files, "zenps/wire/c.py": "from . import a"})
    assert sum("a circle in zenps.wire: " in breach for breach in violations(tmp_path)) == 2


def test_modules_that_no_layer_names_import_each_other(tmp_path: Path) -> None:
    write(tmp_path, {"zenps/scheduler/a.py": "from .b import x", "zenps/scheduler/b.py": "x = 1"})
    assert violations(tmp_path) == []


ALLOWED = {
    "role imports itself": (
        "zenps/worker/api.py",
        "from .core import pending\nfrom zenps.worker import process",
    ),
    "role imports the wire": ("zenps/server/a.py", "import torch\nfrom zenps.wire import frames"),
    "an entry point names a role": (
        "zenps/cli/commands.py",
        "def run():\n    from zenps.server import service",
    ),
    "the package names a role": ("zenps/__init__.py", "from zenps.worker import api"),
    "a worker may use a GPU": ("zenps/worker/api.py", "import cupy"),
    "the service has sockets": ("zenps/scheduler/service.py", "import zmq\nfrom zenps.wire import sockets"),
    "subpackage imports a sibling": (
        "zenps/observe/a.py",
        "from .messages import Push\nfrom . import frames",
    ),
    "tests import roles": ("tests/server/test_a.py", "from zenps.server import rounds"),
}


@pytest.mark.parametrize(("file", "source"), ALLOWED.values(), ids=ALLOWED)
def test_allowed_import_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    write(tmp_path, {file: source})
    assert violations(tmp_path) == []
