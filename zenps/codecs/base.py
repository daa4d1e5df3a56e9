"""What codecs are: how a sorted set of positions becomes bytes, and how values do that travel narrower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:  # the names of codecs are part of every message, and NumPy takes longer than zenps health
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Codec", "CodecName", "Positions", "ValueCodec", "ValueForm"]

CodecName = Literal["coo", "bitmap", "delta", "blocks", "dense"]
"""Every codec that may appear on the wire."""

ValueForm = Literal["same", "float16", "bfloat16", "int8"]
"""In which form float32 values travel; ``same``: as they are, as all other dtypes always do."""

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
        """The most that ``rows`` of a chunk's ``span`` positions take; but for delta and blocks, exactly."""

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


class ValueCodec(ABC):
    """float32 values ⇄ fewer bytes. A row is coded by itself; of one column, runs of rows are."""

    form: ClassVar[ValueForm]
    """The name on the wire and in ``sync.values``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def size_bytes(self, rows: int, columns: int) -> int:
        """What ``rows`` of ``columns`` values take."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, step: int | None = None) -> None:
        """Rounds to the nearest; what is no number, or out of range, stays visible as NaN or infinity.

        Args:
            values: float32 ``[rows, columns]`` on the CPU, contiguous.
            out: uint8 ``[size_bytes]``, written whole.
            step: where nobody keeps the rounding error, so that the mean over many steps has to be right:
                their number. The same values in the same step give the same bytes, wherever they lie.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: Tensor) -> None:
        """The inverse of :meth:`encode`, but for what was rounded; exact, so that it is the same everywhere.

        Args:
            data: from the network.
            out: float32 ``[rows, columns]`` on the CPU, contiguous; written whole.

        Raises:
            ProtocolError: ``data`` has another size than ``out`` needs; any bytes of that size are values.
        """
