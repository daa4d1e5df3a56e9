"""BytePS (OSDI '20): dense tensors over servers, by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import refusals
from ..base import Scheme, WireForm
from ..refusals import Combination

if TYPE_CHECKING:
    from zenps.errors import ConfigError

    from ..traffic import Cost, Links, Tensor


class BytePS(Scheme):
    """Every tensor travels dense. The gradients of the first layers are sent first."""

    name = "byteps"
    wire = WireForm(keys="none", partition="parallel", prioritized=True)
    spends = "it moves every row of every table, touched or not"
    order = 4

    def refuse(self, settings: Combination) -> ConfigError | None:
        return refusals.all_elements(self.name, settings)

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """2·f·M, as for a dense tensor."""
        return self.dense_cost(tensor, links)


SCHEME: Final = BytePS()
