"""Zen (OSDI '25, §3): balanced parallelism by element over servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base import Scheme, WireForm

if TYPE_CHECKING:
    from ..traffic import Cost, Links, Tensor


class Zen(Scheme):
    """Zen as published: elements are pushed as COO and pulled as a hash bitmap (§3.3)."""

    name = "zen"
    wire = WireForm(
        keys="elements", partition="balanced", push_codec="coo", pull_codec="bitmap", chunked=False
    )
    spends = "every element has an index of its own, and a bit of the bitmap"
    order = 2

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """f·E·(d·(v + 4) + D·v + 1/8), for E elements of v bytes."""
        elements = tensor.by_element
        push = elements.coo_bytes(tensor.density)
        pull = elements.rows * (tensor.union * tensor.item_bytes + 1 / 8)
        return links.served(push, pull, elements.imbalance, elements.union_imbalance, streams=False)


SCHEME: Final = Zen()
