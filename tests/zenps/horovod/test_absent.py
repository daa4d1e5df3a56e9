"""Names of Horovod without a counterpart: their errors send users only to what there is."""

from __future__ import annotations

import re

import pytest

import zenps
import zenps.horovod as hvd
from zenps.config.settings import FIELDS


@pytest.mark.parametrize("name", [name for names in hvd._ABSENT.values() for name in names.split()])
def test_what_is_advised_exists(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no {name}") as raised:
        getattr(hvd, name)
    advice = str(raised.value).partition(": ")[2]
    assert set(re.findall(r"\b(?:cluster|sync)\.\w+", advice)) <= set(FIELDS)
    for used in re.findall(r"\bzenps\.(\w+)", advice):
        assert hasattr(zenps, used), used
