"""ZenPS: sparse rows over servers, in the form that the settings give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base import Scheme

if TYPE_CHECKING:
    from ..traffic import Cost, Links, Tensor


class ZenPS(Scheme):
    """Zen's balanced parallelism (OSDI '25, §3.1, eq. 1) by row, in chunks of ``sync.chunk_bytes``."""

    name = "zenps"
    spends = "every row goes to its owner and back"
    order = 1

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """f·(rows of d + rows of D), each with positions by the codec that ``sync.codec = "auto"`` takes."""
        push, pull = tensor.best_bytes(tensor.density), tensor.best_bytes(tensor.union)
        return links.served(push, pull, tensor.imbalance, tensor.union_imbalance, streams=True)


SCHEME: Final = ZenPS()
