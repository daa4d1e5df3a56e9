"""Who may import whom: docs/architecture.md, "Floors"."""

from __future__ import annotations

import ast
import configparser
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROLES = ("worker", "server", "scheduler")
DOORS = ("__init__",)

# From the ground up; a part imports from its own floor and those below.
FLOORS = (
    {"buffers", "errors", "transitions", "codecs", "kernels"},
    {"config", "keys", "observe", "partition", "schemes"},
    {"wire"},
    {*ROLES, "cli"},
    {*DOORS},
)
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}

# Third-party packages that a role does without.
FORBIDDEN = {"server": {"cupy"}, "scheduler": {"cupy", "torch"}}


def module_name(root: Path, path: Path) -> str:
    """The name under which a file is imported: ``worker/api.py`` is ``zenps.worker.api``."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "zenps" else ("zenps", *parts)
    return ".".join(parts)


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                package = module.rsplit(".", level)[0] if level else ""
                prefix = ".".join(filter(None, (package, base)))
                yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def part_of(name: str) -> str:
    """The part of the house that a full name lies in; what lies directly in ``zenps`` is the door."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else "__init__"


def violation(importer: str, name: str) -> str | None:
    """Why the part ``importer`` may not import ``name``; None where it may."""
    package = name.partition(".")[0]
    if package in ROLES:
        return f"imports {name}: a second copy of zenps.{package}; write zenps.{name}"
    if package in FORBIDDEN.get(importer, ()):
        return f"imports {name}: the {importer} does without {package}"
    if package != "zenps":
        return None
    part = part_of(name)
    if part in ROLES and part != importer:
        if importer in ROLES:
            return f"imports {name}: roles meet only through zenps.wire"
        if importer not in DOORS:
            return f"imports {name}: only zenps/__init__.py and zenps/cli/commands.py name a role"
    if FLOOR_OF[part] > FLOOR_OF[importer]:
        return f"imports {name}: {part} is on a floor above {importer}"
    return None


def violations(root: Path) -> list[str]:
    """Every breach of the rules in the tree at ``root``, as ``path:line: reason``."""
    found = []
    for path in sorted(path for top in ("zenps", *ROLES) for path in (root / top).rglob("*.py")):
        where, module = path.relative_to(root), module_name(root, path)
        importer = module.split(".")[1]
        if importer not in FLOOR_OF:
            found.append(f"{where}:1: {importer} has no floor: give it one in FLOORS")
            continue
        for line, name in imports(path, module):
            reason = violation(importer, name)
            if reason is not None:
                found.append(f"{where}:{line}: {reason}")
    for path in sorted(
        path for top in ("tests", "benchmarks", "examples") for path in (root / top).rglob("*.py")
    ):
        for line, name in imports(path, ""):
            if name.partition(".")[0] in ROLES:
                found.append(f"{path.relative_to(root)}:{line}: {violation('cli', name)}")
    if (root / "cuda/__init__.py").exists():
        found.append("cuda/__init__.py:1: hides NVIDIA's own package cuda, which CuPy imports")
    return found


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


def test_the_house_is_in_order() -> None:
    assert violations(ROOT) == []


def test_the_walk_sees_every_part() -> None:
    seen = {
        module_name(ROOT, path).split(".")[1]
        for top in ("zenps", *ROLES)
        for path in (ROOT / top).rglob("*.py")
    }
    assert seen >= {*ROLES, "__init__", "errors", "wire", "strategies"}


def test_every_package_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = {
        module_name(ROOT, init.parent)
        for part in ("zenps", *ROLES)
        for init in (ROOT / part).rglob("__init__.py")
    }
    assert set(setup["options"]["packages"].split()) == {*found, "zenps.cuda"}


def test_scheduler_loads_neither_torch_nor_cupy() -> None:
    modules = [
        module_name(ROOT, path).removesuffix(".__init__") for path in (ROOT / "scheduler").rglob("*.py")
    ]
    assert loaded_after_importing(modules, ["torch", "cupy"], ROOT) == []


def test_import_zenps_and_its_settings_load_no_torch() -> None:
    assert (
        loaded_after_importing(
            ["zenps", "zenps.config.sources", "zenps.observe.log"], ["torch", "cupy"], ROOT
        )
        == []
    )


def test_indirectly_loaded_package_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "between.py").write_text("import torch\n")
    (tmp_path / "innocent.py").write_text("import between\n")
    assert loaded_after_importing(["innocent"], ["torch", "cupy"], tmp_path) == ["torch"]


BREACHES = {
    "role imports a role": ("worker/a.py", "from zenps.server import rounds", "roles meet only"),
    "role imports a role, by name": ("server/a.py", "from zenps import scheduler", "roles meet only"),
    "role imports a role, relatively": ("scheduler/a.py", "from ..worker import ddp", "roles meet only"),
    "role imports a role, inside a function": (
        "worker/a.py",
        "def f():\n    import zenps.server.rounds.tracker",
        "roles meet only",
    ),
    "role imports a role, dynamically": (
        "worker/a.py",
        "import importlib\nimportlib.import_module('zenps.server')",
        "roles meet only",
    ),
    "a shared part names a role": ("zenps/cli/launch.py", "import zenps.worker", "name a role"),
    "ground imports the first floor": (
        "zenps/codecs/a.py",
        "from zenps.partition.strategies import base",
        "floor above",
    ),
    "first floor imports the second": (
        "zenps/config/sources.py",
        "from .wire import messages",
        "floor above",
    ),
    "second floor imports the door": (
        "zenps/partition/layout.py",
        "from zenps import __version__",
        "floor above",
    ),
    "role imports the door": ("worker/a.py", "import zenps", "floor above"),
    "no floor": ("zenps/attic.py", "", "has no floor"),
    "cuda is a package": ("cuda/__init__.py", "", "hides NVIDIA"),
    "cupy in server": ("server/a.py", "import cupy as cp", "does without cupy"),
    "cupy in scheduler": ("scheduler/a.py", "from cupy import cuda", "does without cupy"),
    "torch in scheduler": ("scheduler/a.py", "import torch.nn", "does without torch"),
    "second copy of a role": ("zenps/cli/commands.py", "import worker", "second copy"),
    "second copy of a role, from": ("worker/a.py", "from worker.ddp import hook", "second copy"),
    "second copy of a role, in a test": ("tests/worker/test_a.py", "import worker", "second copy"),
}


@pytest.mark.parametrize(("file", "source", "reason"), BREACHES.values(), ids=BREACHES)
def test_breach_is_reported(tmp_path: Path, file: str, source: str, reason: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (breach,) = violations(tmp_path)
    assert breach.startswith(f"{file}:{len(source.splitlines()) or 1}: ")
    assert reason in breach


ALLOWED = {
    "role imports itself": ("worker/a.py", "from .ddp import hook\nfrom zenps.worker import exchange"),
    "role imports the wire": ("server/a.py", "import torch\nfrom zenps.wire import frames"),
    "doors name roles": ("zenps/cli/commands.py", "def run():\n    from zenps.server import service"),
    "a worker may use a GPU": ("worker/a.py", "import cupy"),
    "subpackage imports a sibling": ("zenps/wire/a.py", "from .messages import Push\nfrom . import frames"),
    "tests import roles": ("tests/server/test_a.py", "from zenps.server import rounds"),
}


@pytest.mark.parametrize(("file", "source"), ALLOWED.values(), ids=ALLOWED)
def test_allowed_import_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == []
