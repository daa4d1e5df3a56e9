"""Dense allreduce among workers, as torch.distributed does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import refusals
from ..base import PeerScheme, WireForm
from ..refusals import Combination

if TYPE_CHECKING:
    from zenps.errors import ConfigError

    from ..traffic import Cost, Links, Tensor


class Allreduce(PeerScheme):
    """Every tensor travels dense, by gloo's allreduce."""

    name = "allreduce"
    wire = WireForm(keys="none")
    spends = "it moves every row of every table, touched or not"
    order = 6

    def refuse(self, settings: Combination) -> ConfigError | None:
        return super().refuse(settings) or refusals.all_elements(self.name, settings)

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """2·f·M, as for a dense tensor."""
        return self.dense_cost(tensor, links)


SCHEME: Final = Allreduce()
