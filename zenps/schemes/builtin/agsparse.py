"""AGsparse: allgather of sparse rows among workers, as torch.distributed does it for sparse tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base import PeerScheme, WireForm

if TYPE_CHECKING:
    from ..traffic import Cost, Links, Tensor


class AGsparse(PeerScheme):
    """Every worker receives every worker's rows, and sums them in rank order (Zen, OSDI '25, §2.3)."""

    name = "agsparse"
    wire = WireForm(peer_algorithm="allgather")
    spends = "every worker receives every worker's rows, common ones once from each"
    order = 7

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """(n - 1) times COO of d, around a ring. With one column of float32, 2·(n - 1)·d·M."""
        others = links.workers - 1
        gathered = others * tensor.coo_bytes(tensor.density)
        return links.cost(push=gathered, pull=0.0, serial=gathered, rounds=others)


SCHEME: Final = AGsparse()
