"""OmniReduce (SIGCOMM '21): non-zero blocks of dense tensors over servers, found by look-ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import refusals
from ..base import Scheme, WireForm
from ..refusals import Combination

if TYPE_CHECKING:
    from zenps.errors import ConfigError

    from ..traffic import Cost, Links, Tensor


class OmniReduce(Scheme):
    """Streams of blocks go to contiguous ranges. Blocks carry their own positions."""

    name = "omnireduce"
    engine = "blocks"
    wire = WireForm(keys="none", partition="parallel", contiguous=True)
    spends = "it moves whole blocks of 256 elements, in contiguous ranges that are unevenly full"
    order = 5

    def refuse(self, settings: Combination) -> ConfigError | None:
        return refusals.values_unchanged(self.name, settings) or refusals.own_indices(self.name, settings)

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """f·(b + s·B)·M or less (§3).

        b is the share of one worker's blocks that are not all zero, B that of the union, and s the skew of
        the fullest range.
        """
        push, pull = (share * tensor.dense_bytes for share in tensor.block_shares)
        return links.served(push, pull, *tensor.block_skews, streams=True)


SCHEME: Final = OmniReduce()
