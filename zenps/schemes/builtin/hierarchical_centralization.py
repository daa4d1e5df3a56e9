"""Hierarchical centralization (Zen, OSDI '25, §2.3): recursive doubling of sparse rows among workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base import PeerScheme, WireForm

if TYPE_CHECKING:
    from ..traffic import Cost, Links, Tensor


class HierarchicalCentralization(PeerScheme):
    """Pairs of ranks merge their rows, then pairs of pairs, and so on. Rows stay sparse."""

    name = "hierarchical-centralization"
    wire = WireForm(peer_algorithm="recursive doubling")
    spends = "sums travel again at every stage"
    order = 9

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """Σ COO of the union of 1, 2, 4, … n/2 workers, none more than M (Zen §2.4, eq. 2)."""
        densities = (tensor.density, *tensor.unions)
        return links.doubling([min(tensor.coo_bytes(x), tensor.dense_bytes) for x in densities])


SCHEME: Final = HierarchicalCentralization()
