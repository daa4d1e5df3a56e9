"""ZenPS: a parameter server for PyTorch that synchronises sparse gradients.

``import zenps as zps`` gives the worker's public names. They are fetched on first use (PEP 562), so
that scheduler and command line, which need no torch, do not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zenps.worker import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'zenps' has no attribute {name!r}")
    worker = import_module("zenps.worker")
    if name == "__all__" or name in worker.__all__:
        return getattr(worker, name)
    raise AttributeError(f"module 'zenps' has no attribute {name!r}; it has: {', '.join(worker.__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *import_module("zenps.worker").__all__])
