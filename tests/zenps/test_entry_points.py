from __future__ import annotations

from importlib import metadata

import pytest

import zenps
from zenps import errors, worker


def test_the_package_hands_on_all_public_names_of_the_worker() -> None:
    assert all(getattr(zenps, name) is getattr(worker, name) for name in worker.__all__)
    assert set(zenps.__all__) <= set(dir(zenps))


def test_the_package_has_every_error_that_a_script_may_catch() -> None:
    kinds = [name for name in errors.__all__ if name.endswith("Error")]
    assert all(getattr(zenps, name, None) is getattr(errors, name) for name in kinds)
    assert sorted(zenps.__all__) == sorted([*worker.__all__, *kinds])


def test_the_package_has_its_version() -> None:
    assert zenps.__version__ == metadata.version("zenps")


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"'push_pul'; it has: .*push_pull"):
        zenps.push_pul  # type: ignore[attr-defined]  # noqa: B018  # the access is what is tested
