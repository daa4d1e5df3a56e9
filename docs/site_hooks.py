"""MkDocs hooks: navigation from README.md, and links to files outside of docs/.

The Markdown files are written for GitHub, where a link may lead to any file of the repository. MkDocs knows
only those in docs/. So each file outside of docs/ that a page links to becomes part of the site, in source/:
Markdown as a page, other text as a page that shows it, and images and data as they are.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

LINK = re.compile(r"```.*?```|`[^`\n]+`|(?<=\]\()(?!https?:|mailto:|#)(?P<path>[^)\s#]+)", re.DOTALL)
"""Code, which stays as it is, or the target of a link to a file."""

ROLE = re.compile(r":\w+:<code>~?\.*([\w.]+)</code>")
"""A reference in a docstring, such as ``:class:`~zenps.errors.ConfigError```."""

AS_THEY_ARE = {".png", ".json"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".cu": "cuda", ".c": "c"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes the navigation of the list under "Documents" in README.md."""
    documents = (ROOT / "README.md").read_text("utf-8").partition("\n## Documents\n")[2]
    nav: list[dict[str, object]] = [{"Home": "index.md"}]
    for group, links in re.findall(r"^- (\w+): ((?:.+\n)(?:  .+\n)*)", documents, re.MULTILINE):
        pages = re.findall(r"\[([\w ]+)\]\((\S+)\)", links)
        nav.append({group: [{title.capitalize(): _site_path(path)} for title, path in pages]})
    nav.append({"API": "api.md"})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README.md, the API reference, and every file that pages link to."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text("utf-8")))
    files.append(File.generated(config, "api.md", content=_api()))
    inside = [f"docs/{file.src_uri}" for file in files if (ROOT / "docs" / file.src_uri).exists()]
    unread = ["README.md", *inside]
    while unread:
        page = unread.pop()
        for path in _linked(page) if page.endswith(".md") else ():
            if files.get_file_from_path(_site_path(path)) is None:
                files.append(_file(path, config))
                unread.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links lead to the files of the site."""
    if page.file.src_uri in ("index.md", "api.md"):
        page.meta["hide"] = ["navigation"]  # they are alone in their groups
    source, here = _repository_path(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        if match["path"] is None:
            return match[0]
        target = _site_path(_resolved(source, match["path"]))
        return posixpath.relpath(target, here or ".")

    return LINK.sub(moved, markdown) if source else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows references of docstrings, which are Sphinx's, as code."""
    return ROLE.sub(r"<code>\1</code>", html)


def _linked(page: str) -> Iterator[str]:
    """The files and folders of the repository that a page of it links to."""
    for match in LINK.finditer((ROOT / page).read_text("utf-8")):
        if match["path"] is not None:
            path = _resolved(page, match["path"])
            if not (ROOT / path).exists():
                raise PluginError(f"{page}: the link {match['path']} leads to no file; correct it")
            yield path


def _resolved(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _site_path(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    # MkDocs leaves out names that begin with a dot.
    inside = path.removeprefix("docs/") if path.startswith("docs/") else "source/" + path.replace("/.", "/")
    if (ROOT / path).is_dir():
        return f"{inside}/index.md"
    is_kept = path.startswith("docs/") or path.endswith(".md") or Path(path).suffix in AS_THEY_ARE
    return inside if is_kept else f"{inside}.md"


def _repository_path(src_uri: str) -> str | None:
    """The file of the repository that a page shows; None if the page is made here."""
    path = {"index.md": "README.md"}.get(src_uri) or re.sub("^(?!source/)", "docs/", src_uri)
    path = path.removeprefix("source/")
    return path if (ROOT / path).is_file() else None


def _file(path: str, config: MkDocsConfig) -> File:
    """The file of the site for a file or folder of the repository."""
    source, name = ROOT / path, _site_path(path)
    if source.is_dir():
        return File.generated(config, name, content=_listing(path))
    if name.endswith(".md") and not path.endswith(".md"):
        language = LANGUAGES.get(source.suffix, "text")
        text = f"# {path}\n\n````{language}\n{source.read_text('utf-8')}````\n"
        return File.generated(config, name, content=text)
    return File.generated(config, name, abs_src_path=str(source))


def _listing(folder: str) -> str:
    """A page with the files of a folder: Markdown by its title, others by their names."""
    lines = [f"# {folder}", ""]
    for path in sorted((ROOT / folder).iterdir()):
        if path.suffix == ".md":
            title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title.replace('. ', ': ', 1)}]({path.name})")
        else:
            lines.append(f"- `{path.name}`")
    return "\n".join(lines) + "\n"


def _api() -> str:
    """The API reference, which mkdocstrings makes of docstrings."""
    tree = ast.parse((ROOT / "zenps/__init__.py").read_text("utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    members = "".join(f"        - {name}\n" for name in names if not name.endswith("Error"))
    return (
        "# API\n\n[Usage](usage.md) shows how these work together.\n\n"
        f"::: zenps\n    options:\n      members:\n{members}\n"
        "## Errors\n\n::: zenps.errors\n    options:\n      heading_level: 3\n      filters: ['Error$']\n"
    )
