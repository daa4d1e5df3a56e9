"""What the Markdown files say can be done, and where they point."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

import zenps as zps
from zenps import worker
from zenps.cli.arguments import make_parser
from zenps.config.settings import FIELDS
from zenps.config.sources import load

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cuda/*.md")])

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def code(page: Path) -> str:
    """All that the page shows as code, in blocks or in a line."""
    text = page.read_text("utf-8")
    return "\n".join([*re.findall(r"```.*?```", text, re.DOTALL), *re.findall(r"`[^`\n]+`", text)])


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text("utf-8"), flags=re.DOTALL)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@every_page
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    used = set(re.findall(r"(?:^|`)make ([\w.-]+)", code(page), re.MULTILINE))
    assert used <= set(targets)


def test_readme_shows_the_demo_and_the_tests() -> None:
    assert {"demo", "test"} <= set(re.findall(r"^make (\w+)", code(ROOT / "README.md"), re.MULTILINE))


@every_page
def test_subcommands_and_settings_exist(page: Path) -> None:
    (subparsers,) = (
        action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    assert set(re.findall(r"(?:^|`)zenps ([a-z]+)", code(page), re.MULTILINE)) <= set(subparsers.choices)
    sections = "|".join({name.partition(".")[0] for name in FIELDS})
    named = set(re.findall(rf"(?:`|--set )((?:{sections})\.[a-z_]+)", code(page)))
    assert {name for name in named if not name.endswith((".py", ".md"))} <= FIELDS.keys()


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"https?://", link):
            continue
        path, _, fragment = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, link


@every_page
def test_paths_shown_as_code_exist(page: Path) -> None:
    made = {"build"}  # by tests and tools
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    tops = "|".join(folders - made)
    shown = set(re.findall(rf"`((?:{tops})/[\w/.-]*)`", page.read_text("utf-8")))
    planned = {path for path in shown if re.search(r"\bx\b|_x\b", path)}  # x stands for a name
    assert {path for path in shown - planned if not (ROOT / path).exists()} == set()


def test_every_public_name_is_in_the_usage_page() -> None:
    page = (ROOT / "docs/usage.md").read_text("utf-8")
    table = page.partition("\n## Public names\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(worker.__all__)


def test_statistics_are_in_the_usage_page() -> None:
    shown = code(ROOT / "docs/usage.md")
    assert [name for name in zps.Stats.__struct_fields__ if f"`{name}`" not in shown] == []


@every_page
def test_python_blocks_name_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
        assert set(re.findall(r"\bzps\.(\w+)", block)) <= set(zps.__all__)


def test_toml_blocks_are_settings() -> None:
    for block in blocks(ROOT / "README.md", "toml"):
        settings = [
            f"{section}.{field}={value}"
            for section, fields in tomllib.loads(block).items()
            for field, value in fields.items()
        ]
        assert load(sets=settings, environ={}).config.cluster.scheduler


def test_readme_s_first_example_runs_alone(tmp_path: Path) -> None:
    example = blocks(ROOT / "README.md", "python")[0]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 of 1: Stats(")


def test_every_module_is_in_the_architecture() -> None:
    """In a row of its own: several modules have one name."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    modules = Counter(
        path.name
        for top in ("zenps", "worker", "server", "scheduler")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py"
    )
    assert [name for name, count in modules.items() if text.count(f"| `{name}` |") != count] == []


def test_every_folder_is_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    tops = [top for top in ("zenps", "worker", "server", "scheduler") if f"| `{top}/` |" not in text]
    assert tops == []


def test_decisions_are_numbered_without_gaps() -> None:
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
        assert headings[0].startswith(f"{int(page.name[:4])}. ")
        assert headings[1:] == ["Context", "Decision", "Consequences"]


def test_jobs_of_frameworks_have_the_lines_of_their_page() -> None:
    jobs = (ROOT / "tests/frameworks/jobs").glob("*.py")
    have = {line.strip() for path in jobs for line in path.read_text("utf-8").splitlines()}
    shown = [
        line.strip() for block in blocks(ROOT / "docs/frameworks.md", "python") for line in block.splitlines()
    ]
    assert len(shown) > 10
    assert [line for line in shown if line and not line.startswith("#") and line not in have] == []
