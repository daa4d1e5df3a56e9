"""Arguments of the Ray cluster that are refused before Ray starts anything."""

from __future__ import annotations

from typing import Any

import pytest

from zenps.errors import ConfigError


@pytest.mark.parametrize("settings", ["sync.density=0.1", {"sync.density": 0.1}], ids=repr)
def test_settings_that_are_no_list_of_strings_are_refused(settings: Any) -> None:
    """A string was taken to pieces: it was told that 's' is no setting."""
    pytest.importorskip("ray")
    from zenps.ray import Cluster

    with pytest.raises(ConfigError, match=r"sets = .*: expected a list of strings, such as"):
        Cluster(workers=2, settings=settings)
