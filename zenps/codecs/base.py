"""What a codec is: how a sorted set of positions becomes bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:  # the names of codecs are part of every message, and NumPy takes longer than zenps health
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Codec", "CodecName", "Positions"]

CodecName = Literal["coo", "bitmap", "delta"]
"""Every codec that may appear on the wire."""

Positions: TypeAlias = "NDArray[np.int64]"
"""``[n]`` int64, strictly increasing."""


class Codec(ABC):
    """Positions inside one chunk ⇄ bytes. Values travel beside them, in the same order."""

    name: ClassVar[CodecName]
    """The name on the wire and in ``sync.codec``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def most_bytes(self, rows: int, span: int) -> int:
        """The most that ``rows`` of a chunk's ``span`` positions take; with coo and bitmap, exactly."""

    @abstractmethod
    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        """``positions``, strictly increasing in ``[0, span)``, as ``most_bytes`` bytes or fewer."""

    @abstractmethod
    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        """The inverse of :meth:`encode`.

        Raises:
            ProtocolError: ``data`` is not ``rows`` strictly increasing positions below ``span``.
                ``data`` comes from the network: it is checked whole before it is used.
        """
