"""What can be broadcast: what a rank could not read is refused before anything is sent."""

from __future__ import annotations

import pytest

from zenps.errors import UsageError
from zenps.worker.collectives.plain_data import pack_object, unpack_object


@pytest.mark.parametrize("value", [{(1, 2): 3}, {(): 3}, [{"a": ({"b": {("c",): 1}},)}]])
def test_a_tuple_as_a_key_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"a dict has the key \(.*, and a key must be a scalar"):
        pack_object(value)


def test_scalars_are_keys() -> None:
    value = {"a": 1, 2: [{3.5: None}], None: {True: {b"b": []}}}
    assert unpack_object(pack_object(value)) == value
