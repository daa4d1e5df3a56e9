"""The tree is what is imported: links, packaging and public names. docs/decisions/0001-folders.md."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.tree import ROLES, ROOT, base, modules, outside, parsed

# What applications import, and what a strategy, codec or kernel backend of one's own subclasses.
PUBLIC = {
    *("zenps", "zenps.worker", "zenps.errors", "zenps.horovod", "zenps.byteps"),
    *("zenps.lightning", "zenps.ray", "zenps.transformers"),
    *("zenps.partition.strategies", "zenps.partition.strategies.base"),
    *("zenps.codecs.base", "zenps.kernels.base"),
    *("zenps.sparsifiers", "zenps.sparsifiers.base"),
}


def test_links_lead_to_the_folders_beside_the_package() -> None:
    links = {path.name: path for path in (ROOT / "zenps").iterdir() if path.is_symlink()}
    assert set(links) == {*ROLES, "cuda"}
    for name, link in links.items():
        assert os.readlink(link) == f"../{name}", "git made no link of it? git config core.symlinks true"
        assert link.is_dir()


def test_git_has_no_other_link() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    links = {line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")}
    assert links == {f"zenps/{name}" for name in (*ROLES, "cuda")}


def test_every_folder_with_modules_is_a_package() -> None:
    found = modules(ROOT)
    assert {path.parent for path in found.values() if not (path.parent / "__init__.py").exists()} == set()


def test_setup_finds_the_package_and_nothing_else() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    # The sources in cuda/ are no package that `find:` would see: it has no __init__.py, and must have none.
    assert setup["options"]["packages"] == "find_namespace:"
    assert setup["options.packages.find"]["include"].split() == ["zenps", "zenps.*"]
    assert "package_dir" not in setup["options"]


def test_a_version_has_one_name() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert headings[1] == f"[{setup['metadata']['version']}] - {cited['date-released']}"
    assert cited["version"] == setup["metadata"]["version"]


def test_every_other_file_of_the_package_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = {
        f"{package.replace('.', '/')}/{pattern}"
        for package, names in setup["options.package_data"].items()
        for pattern in names.replace(",", " ").split()
    }
    files = {
        Path(folder, name).relative_to(ROOT)
        for folder, _, names in os.walk(ROOT / "zenps", followlinks=True)
        for name in names
        # An editable installation leaves compiled libraries in the tree.
        if not name.endswith((".py", ".pyc", ".so")) and name != "README.md"
    }
    installed = {file for file in files if any(fnmatch(str(file), pattern) for pattern in patterns)}
    assert files == installed
    assert {
        pattern for pattern in patterns if not any(fnmatch(str(file), pattern) for file in files)
    } == set()


@pytest.mark.parametrize("target", ["chaos", "fuzz", "simulate", "soak"])
def test_ci_writes_no_report_over_a_committed_one(target: str) -> None:
    exported = re.findall(r"^export (RESULTS)=(.+)$", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE)
    done = subprocess.run(
        ["make", "--dry-run", target],
        cwd=ROOT,
        env=os.environ | dict(exported),
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"--json (\w+)/", done.stdout) == ["build"]
    assert "build/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def has_all(path: Path) -> bool:
    """True if the module says ``__all__ = …`` or adds to it."""
    return any(
        isinstance(node, ast.Name) and node.id == "__all__" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(parsed(path))
    )


def test_only_public_modules_have_all() -> None:
    found = {module.removesuffix(".__init__") for module, path in modules(ROOT).items() if has_all(path)}
    assert found == PUBLIC


@cache
def defined_in(path: Path) -> set[str]:
    """The names that a module makes, rather than imports."""
    return {
        name
        for node in ast.walk(parsed(path))
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            else [node.id]
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            else []
        )
    }


def handed_on(root: Path) -> Iterator[str]:
    """Imports of names from modules that have imported them, too, as ``path:line: name``.

    Names of a public package are its own, for all that is not below it.
    """
    found = modules(root)
    importers = found | {str(path): path for path in outside(root)}
    for module, path in importers.items():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ImportFrom):
                continue
            source = base(node, module)
            target = found.get(source) or found.get(f"{source}.__init__")
            public = source in PUBLIC and (module not in found or module == "zenps.__init__")
            if target is None or public:
                continue
            for name in (alias.name for alias in node.names):
                submodule = f"{source}.{name}" in found or f"{source}.{name}.__init__" in found
                if not submodule and name not in defined_in(target):
                    yield f"{path.relative_to(root)}:{node.lineno}: {source}.{name}"


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    assert list(handed_on(ROOT)) == []


HANDED_ON = {
    "from a module": (
        "zenps/server/a.py",
        "from zenps.wire.arena import Pool",
        ["a.py:1: zenps.wire.arena.Pool"],
    ),
    "from a module, in a test": (
        "tests/test_a.py",
        "\nfrom zenps.wire.arena import Pool",
        ["test_a.py:2: zenps.wire.arena.Pool"],
    ),
    "relatively": ("zenps/wire/b.py", "from .arena import Pool", ["b.py:1: zenps.wire.arena.Pool"]),
    "from a public package, inside": (
        "zenps/partition/layout.py",
        "from .strategies import KeySpace",
        ["layout.py:1: zenps.partition.strategies.KeySpace"],
    ),
    "from a public package, outside": (
        "examples/a.py",
        "from zenps.partition.strategies import KeySpace",
        [],
    ),
    "from where it is defined": (
        "zenps/server/a.py",
        "from zenps.buffers import Pool\nfrom zenps.wire import arena",
        [],
    ),
}


@pytest.mark.parametrize(("file", "source", "expected"), HANDED_ON.values(), ids=HANDED_ON)
def test_import_of_what_is_handed_on_is_reported(
    tmp_path: Path, file: str, source: str, expected: list[str]
) -> None:
    for name, text in {
        "zenps/buffers.py": "class Pool: ...",
        "zenps/wire/__init__.py": "",
        "zenps/wire/arena.py": "from zenps.buffers import Pool",
        "zenps/partition/strategies/base.py": "KeySpace = int",
        "zenps/partition/strategies/__init__.py": "from .base import KeySpace",
        file: source,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [one for one in handed_on(tmp_path) if "strategies/__init__" not in one]
    assert [Path(one).name for one in found] == expected
