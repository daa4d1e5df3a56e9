"""Automatic choice: each sparse tensor takes the scheme that is predicted to be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from ..base import Scheme
from ..refusals import Combination
from . import agsparse, zenps

if TYPE_CHECKING:
    from zenps.errors import ConfigError

    from ..traffic import Cost, Links, Tensor


class Auto(Scheme):
    """ZenPS over servers, or AGsparse among workers.

    Both sum in rank order and keep every touched row, so the result has the same bits whichever scheme a
    tensor takes. Dense tensors go over servers.
    """

    name = "auto"
    engine = "auto"
    candidates = (zenps.SCHEME, agsparse.SCHEME)
    wire = structs.replace(zenps.SCHEME.wire, peer_algorithm=agsparse.SCHEME.wire.peer_algorithm)
    order = 10

    def fallback(self, settings: Combination) -> tuple[Scheme, ConfigError] | None:
        """ZenPS for all tensors, if a setting keeps workers from exchanging among themselves."""
        refused = agsparse.SCHEME.refuse(settings)
        return (zenps.SCHEME, refused) if refused else None

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """The cost of the candidate that takes less time."""
        return min((scheme.cost(tensor, links) for scheme in self.candidates), key=lambda cost: cost.seconds)


SCHEME: Final = Auto()
