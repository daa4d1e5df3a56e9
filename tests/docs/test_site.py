"""The documentation site: what its hooks make of pages that are written for GitHub."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zenps as zps

# What the hooks and mkdocstrings read.
PARTS = (
    *("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "zenps", "worker", "server"),
    *("scheduler", "cuda", "examples", "benchmarks", "docker", "SECURITY.md"),
)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A copy of what the site is made of, with links to what a test does not change."""
    for part in PARTS:
        if part in ("docs", "README.md"):
            continue
        (tmp_path / part).symlink_to(root / part)
    shutil.copytree(root / "docs", tmp_path / "docs")
    shutil.copy(root / "README.md", tmp_path)
    return tmp_path


def build(checkout: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs", reason="make docs runs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(checkout / "site")]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def test_links_lead_to_pages_of_the_site(checkout: Path) -> None:
    (checkout / "docs/new.md").write_text("# New\n\nA page that no other knows yet.\n")
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    site = checkout / "site"
    home = (site / "index.html").read_text()
    assert 'href="operations.html#elastic-workers"' in home
    assert 'href="decisions/index.html"' in home
    assert 'href="../source/zenps/wire/connections.py.html"' in "".join(
        path.read_text() for path in (site / "decisions").glob("*.html")
    )
    assert (site / "new.html").exists()
    assert (site / "source/benchmarks/results/net-time.png").read_bytes().startswith(b"\x89PNG")
    assert "class DeepFM" in re.sub("<[^>]+>", "", (site / "source/examples/deepfm.py.html").read_text())
    # Nothing is loaded from elsewhere.
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?https?:[^>]+>', home) == []
    api = (site / "api.html").read_text()
    own = [f"zenps.{'errors.' * name.endswith('Error')}{name}" for name in zps.__all__]
    assert [name for name in own if f'id="{name}"' not in api] == []
    assert not re.search(r":\w+:<code>", api), "a reference is shown as Sphinx's markup"


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[a](operations.md#no-such)", "does not contain an anchor '#no-such'"),
        ("[a](nowhere.md)", "docs/usage.md: the link nowhere.md leads to no file"),
        ("[a](../examples/nothing.py)", "the link ../examples/nothing.py leads to no file"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(checkout: Path, link: str, message: str) -> None:
    with (checkout / "docs/usage.md").open("a") as page:
        page.write(f"\n{link}\n")
    done = build(checkout)
    assert done.returncode == 1
    assert message in done.stderr
