"""Codec interfaces: position codecs encode a sorted set of positions; value codecs quantize float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:  # messages need only the names of codecs; importing NumPy takes longer than zenps health
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Codec", "CodecName", "Positions", "ValueCodec", "ValueForm"]

CodecName = Literal["coo", "bitmap", "delta", "blocks", "dense"]
"""Every position codec that may appear on the wire."""

ValueForm = Literal["same", "float16", "bfloat16", "int8"]
"""The form in which float32 values travel; ``same`` is unchanged, as all other dtypes always are."""

Positions: TypeAlias = "NDArray[np.int64]"
"""``[n]`` int64, strictly increasing."""


class Codec(ABC):
    """Positions inside one chunk ⇄ bytes. Values travel beside them, in the same order."""

    name: ClassVar[CodecName]
    """The name on the wire and in ``sync.codec``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def max_bytes(self, rows: int, span: int) -> int:
        """Most bytes that ``rows`` of a chunk's ``span`` positions take; exact but for delta and blocks."""

    @abstractmethod
    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        """Encodes ``positions``, strictly increasing in ``[0, span)``, in at most ``max_bytes`` bytes."""

    @abstractmethod
    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        """The inverse of :meth:`encode`.

        Raises:
            ProtocolError: ``data`` is not ``rows`` strictly increasing positions below ``span``.
                ``data`` comes from the network, so all of it is checked before it is used.
        """


class ValueCodec(ABC):
    """Quantizes float32 values. Each row is encoded by itself; in a table of one column, each run of rows."""

    form: ClassVar[ValueForm]
    """The name on the wire and in ``sync.values``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def size_bytes(self, rows: int, columns: int) -> int:
        """The bytes that ``rows`` of ``columns`` values take."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, step: int | None = None) -> None:
        """Quantizes, rounding to the nearest. NaN and infinite values decode to NaN or infinity; values out
        of range become infinite.

        Args:
            values: float32 ``[rows, columns]`` on any device, contiguous.
            out: uint8 ``[size_bytes]`` on that device, written whole.
            step: None with error feedback. Without it, the number of the step: then rounding is dithered, so
                that its mean over many steps is right. The same values in the same step give the same bytes,
                wherever they lie.
        """

    @abstractmethod
    def dequantize(self, coded: Tensor, out: Tensor) -> None:
        """Dequantizes, without any rounding, so that the values have the same bits on every machine.

        Args:
            coded: uint8 ``[size_bytes]`` on the device of ``out``; any bytes are values.
            out: float32 ``[rows, columns]`` on any device, contiguous; written whole.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: Tensor) -> None:
        """Dequantizes what was received, as :meth:`dequantize` does; ``data`` is read before it returns.

        Raises:
            ProtocolError: ``data`` has another size than ``out`` needs.
        """
