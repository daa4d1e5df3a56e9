"""Which layer each part is on, and the rules that imports keep: docs/architecture.md, "Layers"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from tests.tree import ROLES, Import, imports, modules, outside

# From the bottom up. A part imports from lower layers only, not from its own. `*` stands for the modules that
# are not named, which may import each other. A package's `__init__` is above all that is in it.
LAYERS: dict[str, tuple[str, ...]] = {
    "zenps": (
        "errors finalizers termination transitions",
        "buffers",
        "plugins",
        "kernels",
        "codecs",
        "partition",
        "schemes",
        "config",
        "sparsifiers",
        "keys observe",
        "wire",
        "worker server scheduler",
        "horovod",
        "byteps",
        "cli lightning ray transformers",
    ),
    "zenps.kernels": ("base", "cpu gpu", "native", "*"),
    "zenps.schemes": ("*", "builtin", "registry", "costs"),
    "zenps.partition": ("keyspace ring", "placing ranges strategies", "layout", "device_layout"),
    "zenps.wire": ("*", "shared_memory"),
    "zenps.worker": (
        "core",
        "encode rounds",
        "sparsify",
        "transport",
        "backends",
        "recorder",
        "world",
        "bootstrap",
        "process",
        "step_hook",
        "collectives",
        "api training",
    ),
    "zenps.worker.training": ("hazards", "gradients", "*"),
    "zenps.worker.backends": ("*", "peers", "hierarchical auto"),
    "zenps.server": ("reducers", "rounds", "*", "service"),
    "zenps.scheduler": ("observe", "membership", "*", "page", "service"),
    "zenps.cli": ("*", "doctor health launch", "printing", "plan", "commands", "__main__"),
}

# These, and what lies in them, alone name a role.
ENTRY_POINTS = (
    *("zenps.__init__", "zenps.cli.commands"),
    *("zenps.horovod", "zenps.byteps", "zenps.lightning", "zenps.ray", "zenps.transformers"),
)

# Third-party packages that a role does without.
FORBIDDEN = {"server": {"cupy"}, "scheduler": {"cupy", "torch"}}

# The protocol's modules, events in and actions out, have no socket, clock or thread.
PURE = ("zenps.worker.rounds", "zenps.server.rounds", "zenps.server.reducers", "zenps.scheduler")
NOT_PURE = ("zenps.scheduler.service", "zenps.scheduler.ends", "zenps.scheduler.page.endpoint")
SOCKETS_CLOCKS_THREADS = {
    *("zmq", "socket", "socketserver", "selectors", "time", "threading"),
    "zenps.observe.http_server",
    *("zenps.wire.sockets", "zenps.wire.connections", "zenps.wire.scheduler_link", "zenps.wire.admin_client"),
}
ONLY = {
    "zenps.worker.rounds": (
        *("zenps.worker", "zenps.errors", "zenps.transitions"),
        *("zenps.wire.fields", "zenps.wire.messages", "zenps.wire.scheduler_messages"),
    ),
}
"""All of zenps that a pure part imports; its layer says what of its role."""


def named_in(package: str) -> list[str]:
    """The parts of ``package`` that LAYERS names."""
    return " ".join(LAYERS.get(package, ())).replace("*", "").split()


def lies_in(name: str, packages: Iterable[str]) -> bool:
    """True if ``name`` is one of the packages, or in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


class Tree:
    """The package at ``root``, and all of its imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = modules(root)
        self.children: dict[str, set[str]] = {package: set() for package in LAYERS}
        for module in self.modules:
            parts = module.split(".")
            for depth in range(1, len(parts)):
                self.children.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
        self.imports = {module: list(imports(path, module)) for module, path in self.modules.items()}

    @property
    def packages(self) -> list[str]:
        """All that have modules."""
        return sorted(package for package, children in self.children.items() if children)

    def part(self, package: str, name: str) -> str | None:
        """The part of ``package`` that a full name lies in; None if it lies elsewhere."""
        if not lies_in(name, (package,)):
            return None
        part = name[len(package) + 1 :].partition(".")[0]
        known = part in self.children.get(package, ()) or part in named_in(package)
        return part if known else "__init__"

    def first_file(self, package: str) -> Path:
        """The first file of a package or module, from the root."""
        found = (path for module, path in self.modules.items() if lies_in(module, (package,)))
        return next(found).relative_to(self.root)

    def edges(self, package: str) -> Iterator[tuple[str, str, Import]]:
        """Part, imported part and the import itself, where a part of ``package`` imports another one."""
        for module, found in self.imports.items():
            importer = self.part(package, module)
            for one in found if importer else ():
                imported = self.part(package, one.name)
                if importer and imported and imported != importer:
                    yield importer, imported, one


def report(tree: Tree, one: Import, reason: str) -> str:
    """``path:line: reason``."""
    return f"{one.where.relative_to(tree.root)}:{one.line}: imports {one.name}: {reason}"


def layer_of(package: str, part: str) -> int | None:
    """The number of the layer that ``part`` is on; None if it has none."""
    layers = LAYERS[package]
    if part == "__init__":
        return len(layers)
    named = [number for number, layer in enumerate(layers) if part in layer.split()]
    unnamed = [number for number, layer in enumerate(layers) if layer == "*"]
    found = named or unnamed
    return found[0] if found else None


def breaches_of_layers(tree: Tree, package: str) -> Iterator[str]:
    """Parts of ``package`` without a layer, and imports among them that do not lead downwards."""
    for part in sorted(tree.children[package] - set(named_in(package)) - {"__init__"}):
        if "*" not in LAYERS[package] or f"{package}.{part}" in tree.children:
            where = tree.first_file(f"{package}.{part}")
            yield f"{where}:1: {part} has no layer: give it one in LAYERS[{package!r}]"
    for importer, imported, one in tree.edges(package):
        own, other = layer_of(package, importer), layer_of(package, imported)
        if own is None or other is None or {importer, imported} <= set(ROLES):
            continue
        if other > own:
            yield report(tree, one, f"{imported} is on a layer above {importer}")
        elif other == own and LAYERS[package][own] != "*":
            yield report(tree, one, f"{imported} is on the layer of {importer}")


def circles(tree: Tree, package: str) -> Iterator[str]:
    """Circles among the parts of ``package``: as many as imports have to go until there is none."""
    edges: dict[tuple[str, str], Import] = {}
    for importer, imported, one in tree.edges(package):
        edges.setdefault((importer, imported), one)
    while True:
        graph: dict[str, list[str]] = {}
        for importer, imported in edges:
            graph.setdefault(importer, []).append(imported)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            # There, each is imported by the next.
            circle = error.args[1][::-1]
            pairs = list(pairwise(circle))
            where = ", ".join(
                f"{edges[pair].where.relative_to(tree.root)}:{edges[pair].line}" for pair in pairs
            )
            yield f"{where}: a circle in {package}: {' imports '.join(circle)}"
            del edges[pairs[0]]
        else:
            return


def breach_of_roles(tree: Tree, module: str, name: str) -> str | None:
    """Why ``module`` may not import ``name``, whatever its layer; None where it may."""
    importer = tree.part("zenps", module)
    package = name.partition(".")[0]
    if package in ROLES:
        return f"a second copy of zenps.{package}; write zenps.{name}"
    if package in FORBIDDEN.get(importer or "", ()):
        return f"the {importer} does without {package}"
    imported = tree.part("zenps", name)
    if imported in ROLES and imported != importer:
        if importer in ROLES:
            return "roles meet only through zenps.wire"
        if importer and not lies_in(module, ENTRY_POINTS):
            return f"only {', '.join(ENTRY_POINTS)} name a role"
    return None


def breaches_of_roles(tree: Tree) -> Iterator[str]:
    """Imports that are allowed on no layer."""
    found = dict(tree.imports)
    found |= {str(path): list(imports(path, "")) for path in outside(tree.root)}
    for module, ones in found.items():
        for one in ones:
            reason = breach_of_roles(tree, module, one.name)
            if reason is not None:
                yield report(tree, one, reason)
    if (tree.root / "cuda/__init__.py").exists():
        yield "cuda/__init__.py:1: hides NVIDIA's own package cuda, which CuPy imports"


def breaches_of_purity(tree: Tree, package: str) -> Iterator[str]:
    """Imports by which a part of the protocol would be more than events in and actions out."""
    only = ONLY.get(package, ("zenps",))
    for module in (m for m in tree.imports if lies_in(m, (package,)) and not lies_in(m, NOT_PURE)):
        for one in tree.imports[module]:
            if lies_in(one.name, SOCKETS_CLOCKS_THREADS):
                yield report(tree, one, "the protocol's modules have no socket, clock or thread")
            elif lies_in(one.name, ("zenps",)) and not lies_in(one.name, only):
                yield report(tree, one, f"{package} imports of zenps only {', '.join(only)}")


def violations(root: Path) -> list[str]:
    """Every breach of the rules in the tree at ``root``, as ``path:line: reason``."""
    tree = Tree(root)
    found = list(breaches_of_roles(tree))
    for package in PURE:
        found += breaches_of_purity(tree, package)
    for package in tree.packages:
        if package in LAYERS:
            found += breaches_of_layers(tree, package)
        elif any(f"{package}.{part}" in tree.children for part in tree.children[package]):
            where = tree.first_file(package)
            found.append(f"{where}:1: {package} holds packages: give it an entry in LAYERS")
        found += circles(tree, package)
    return found
