"""Sparse parameter server, such as Parallax: contiguous ranges of rows over servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base import Scheme, WireForm

if TYPE_CHECKING:
    from ..traffic import Cost, Links, Tensor


class SparsePS(Scheme):
    """Rows as COO, in contiguous ranges: the owner of the hot rows is the bottleneck (Zen §2.4)."""

    name = "sparse-ps"
    wire = WireForm(partition="parallel", contiguous=True, push_codec="coo", pull_codec="coo", chunked=False)
    spends = (
        "the fullest of its contiguous ranges has more than its share, and rows are not summed while "
        "others still travel"
    )
    order = 3

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """f·s·(COO of d + COO of D), if the fullest range has s times its share.

        With s = 1 and one column of float32 this is Zen's eq. 1, 2·f·(d + D)·M.
        """
        push, pull = tensor.coo_bytes(tensor.density), tensor.coo_bytes(tensor.union)
        return links.served(push, pull, *tensor.row_skews, streams=False)


SCHEME: Final = SparsePS()
