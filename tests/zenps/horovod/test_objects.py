"""Objects as plain data and back, and what is refused on the way."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zenps.errors import ProtocolError, UsageError
from zenps.horovod.objects import from_plain, to_plain

keys = st.integers(-100, 100) | st.text(max_size=3) | st.tuples(st.integers(0, 9), st.text(max_size=2))
sizes = st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
leaves = sizes | st.none() | st.booleans() | st.floats(allow_nan=False) | st.binary(max_size=4) | keys
objects = st.recursive(
    leaves | st.sets(keys | st.frozensets(keys, max_size=2), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys | st.just("zenps.horovod"), inner, max_size=3).flatmap(
            lambda items: st.sampled_from([items, OrderedDict(items), Counter(items)])
        )
    ),
    max_leaves=12,
)


def sent(value: Any) -> Any:
    return from_plain(msgpack.unpackb(msgpack.packb(to_plain(value)), strict_map_key=False))


@given(objects)
def test_objects_arrive_as_they_were(value: Any) -> None:
    received = sent(value)
    assert received == value
    assert type(received) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, float("inf")]], requires_grad=True),
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.int16),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16),
        torch.tensor(1 + 2j),
    ],
)
def test_tensors_keep_their_bits(tensor: torch.Tensor) -> None:
    (received,) = sent([tensor])
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert received.reshape(-1).view(torch.uint8).equal(tensor.detach().reshape(-1).view(torch.uint8))


def test_numpy_scalars_become_numbers() -> None:
    assert sent([np.float32(1.5), np.int64(3), np.bool_(True)]) == [1.5, 3, True]


@pytest.mark.parametrize("value", [object(), 1j, torch.eye(2).to_sparse(), np.zeros(2)])
def test_what_has_no_plain_form_is_left_to_be_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        msgpack.packb(to_plain([value]))


class Pair(NamedTuple):
    first: int
    second: tuple[int]


class Names(list[str]):
    """A list with methods."""


@pytest.mark.parametrize(
    ("value", "base"), [(Pair(1, (2,)), "tuple"), (defaultdict(int, a=1), "dict"), (Names("ab"), "list")]
)
def test_a_collection_of_a_class_that_other_ranks_may_lack_is_refused(value: Any, base: str) -> None:
    """It arrived without what its class adds, on the root, too."""
    message = rf"{type(value).__name__}: it would arrive as a {base}; pass {base}\(…\) of it"
    with pytest.raises(UsageError, match=message):
        to_plain([value])
    plain = {"tuple": tuple, "dict": dict, "list": list}[base](value)
    assert sent([plain]) == [plain]


def test_the_state_of_a_scheduler_arrives_as_it_was() -> None:
    """Its milestones arrived as a dict, in which torch finds no elements()."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])
    scheduler.load_state_dict(sent(scheduler.state_dict()))
    assert sorted(scheduler.milestones.elements()) == [2, 5, 5]


def test_what_cannot_be_made_plain_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value, reason in ((torch.empty(2, device="meta"), "Tensor: .*meta"), (endless, "list: .*recursion")):
        with pytest.raises(UsageError, match=f"cannot send {reason}.*; expected plain data"):
            to_plain(value)


@pytest.mark.parametrize(
    "content",
    [
        ["module", "os"],
        ["tensor", "torch.float32", [2], b"short"],
        ["tensor", "torch.float32", [-1, 0], b""],
        ["tensor", "os.system", [1], b"\0"],
        ["tensor", "torch.float32", "shape", b"\0\0\0\0"],
        ["tensor", 7],
        ["tuple", 3],
        ["set", [[1]]],
        ["frozenset", [[1]]],
        ["dict", [[1]]],
        ["dict", 1, 2, 3, 4],
        ["Counter", [[[1], 1]]],
        ["Size", ["os"]],
    ],
)
def test_hostile_objects_are_refused(content: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="no object of Horovod's interface"):
        from_plain([{"zenps.horovod": content}])
