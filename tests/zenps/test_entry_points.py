from __future__ import annotations

from importlib import metadata

import pytest

import zenps
from zenps import worker


def test_the_package_hands_on_all_public_names_of_the_worker() -> None:
    assert sorted(zenps.__all__) == sorted(worker.__all__)
    assert all(getattr(zenps, name) is getattr(worker, name) for name in zenps.__all__)
    assert set(zenps.__all__) <= set(dir(zenps))


def test_the_package_has_its_version() -> None:
    assert zenps.__version__ == metadata.version("zenps")


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"'push_pul'; it has: .*push_pull"):
        zenps.push_pul  # type: ignore[attr-defined]  # noqa: B018  # the access is what is tested
