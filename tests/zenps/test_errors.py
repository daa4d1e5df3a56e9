from __future__ import annotations

import inspect
import pickle
import re

import pytest

from zenps import errors
from zenps.errors import ConfigError, MismatchError, ProtocolError, UnknownKeyError, UsageError, ZenPSError

TREE = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_the_drawn_tree_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"(?:├──|└──|│   └──) (\w+)", errors.__doc__)) | {"ZenPSError"}
    assert drawn == TREE.keys()


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("metrics.port", 99999, "a port"),
        UnknownKeyError("sync.partitoin", "did you mean sync.partition?"),
        ProtocolError("version", "expected 1, got 2"),
        UsageError("not initialised; call zenps.init() first"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_to_another_process(error: ZenPSError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_one_line_says_field_value_and_what_is_allowed() -> None:
    assert str(ConfigError("metrics.port", 99999, "a port")) == "metrics.port = 99999: expected a port"
    assert str(UnknownKeyError("sync.x", "sync has: y")) == "sync.x: unknown key; sync has: y"


@pytest.mark.parametrize("kind", [UsageError, MismatchError])
def test_wrong_calls_and_ranks_that_disagree_are_what_torch_raises(kind: type[ZenPSError]) -> None:
    for caught in (ValueError, RuntimeError, ZenPSError):
        with pytest.raises(caught, match="why"):
            raise kind("why")
