"""Position codecs on the device: wraps ``cuda/bitmap_codec.cu``, bitmap and COO as in :mod:`zenps.codecs`.

Encoded bytes come from the network. The device checks them and sets a flag there on an error; the host reads
the flag when it needs the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zenps.errors import ProtocolError, TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of, to_device
from .place import INTEGERS, DeviceLayout
from .sources import position_name

BITMAP_TILE = 1 << 16
"""Positions that a block reads or writes as bits; ``cuda/bitmap.cuh`` has the same."""

ALIGNMENT = 16
"""Bitmaps are read sixteen bytes at once."""


class BitmapChunk(NamedTuple):
    """The positions from ``begin`` up to ``end`` of a tensor's, all within [``start``, ``start + span``)."""

    begin: int
    end: int
    start: int
    span: int


def place_bitmaps(chunks: Sequence[BitmapChunk]) -> tuple[list[slice], int]:
    """Where each chunk's bitmap, of ``⌈span / 8⌉`` bytes, lies among those of all, and the bytes of all."""
    *firsts, size = accumulate((4 * _words(chunk) for chunk in chunks), initial=0)
    places = [slice(first, first - (-chunk.span // 8)) for first, chunk in zip(firsts, chunks, strict=True)]
    return places, size


def encode_bitmaps(
    launcher: Launcher, positions: Tensor, chunks: Sequence[BitmapChunk], bitmaps: Tensor
) -> Tensor:
    """Encodes the positions of all chunks as bitmaps, by one launch; returns ``bitmaps``.

    Args:
        positions: int32 or int64 ``[n]`` on the device; those of a chunk ascend strictly. Not checked.
        chunks: in [0, n], not checked.
        bitmaps: uint8 on the device, at an address divisible by 4, as large as :func:`place_bitmaps` says.
            Each bitmap becomes that of :meth:`zenps.codecs.bitmap.Bitmap.encode`.

    Raises:
        TensorError: another dtype or shape, or too many positions for one launch.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    words = [_words(chunk) for chunk in chunks]
    tiles = [_bitmap_tiles(chunk.span) for chunk in chunks]
    first_tiles, first_words = ([0, *accumulate(each)] for each in (tiles, words))
    if not first_tiles[-1]:
        return bitmaps
    begins, ends, starts, _ = zip(*chunks, strict=True)
    columns = (first_tiles[:-1], begins, ends, starts, first_words[:-1], words)
    table = to_device([number for column in columns for number in column], positions.device)
    expression = f"encode_bitmaps<{position_name(positions.dtype)}>"
    blocks = grid_of(first_tiles[-1] * BLOCK)
    launcher.launch("bitmap_codec", expression, blocks, BLOCK, (positions, table, len(chunks), bitmaps))
    return bitmaps


def decode_bitmap(
    launcher: Launcher, layout: DeviceLayout, data: Tensor, rows: int, start: int, span: int
) -> tuple[Tensor, Tensor]:
    """Decodes a bitmap to the table rows at its positions, in order of position.

    Args:
        layout: of the tensor.
        data: uint8 ``[⌈span / 8⌉]`` on the device, at an address divisible by 16; not trusted.
        rows: their number, as the sender states it.
        start, span: of the chunk, within the layout.

    Returns:
        table rows int64 ``[rows]``, and a flag, int64 ``[1]``. It is 1 if the number of set bits is not
        ``rows``, or if a bit is beyond ``span`` or is no row's position: then the rows mean nothing.

    Raises:
        TensorError: another dtype, shape or alignment.
        ProtocolError: the number of bytes or rows does not fit ``span``.
    """
    check_on_device("bitmap", data, (torch.uint8,), 1)
    _check_address("bitmap", data, ALIGNMENT)
    if len(data) != -(-span // 8):
        raise ProtocolError("payload", f"bitmap: {len(data)} bytes for a span of {span}")
    tiles = _bitmap_tiles(span)
    table_rows, error, state = _decoded(layout, rows, start, span, data.device, 1 + tiles)
    args = (state, layout.placement, data, rows, start, span, table_rows, error)
    launcher.launch("bitmap_codec", "decode_bitmap", tiles, BLOCK, args)
    return table_rows, error


def encode_coo(launcher: Launcher, positions: Tensor, starts: Tensor, relative: Tensor) -> Tensor:
    """Encodes the positions of all chunks at once, each relative to its chunk's start; returns ``relative``.

    Args:
        positions: int32 or int64 ``[n]`` on the device.
        starts: int64 ``[chunks]``, ascending, the first not greater than any position.
        relative: ``[n]``, becomes the result: int32, or int64 for chunks of more than 2**31 positions.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    check_on_device("chunk starts", starts, (torch.int64,), 1)
    check_on_device("relative positions", relative, INTEGERS, 1)
    assert len(relative) == len(positions), (relative.shape, positions.shape)
    expression = f"encode_coo<{position_name(positions.dtype)}, {position_name(relative.dtype)}>"
    args = (positions, len(positions), starts, len(starts), relative)
    launcher.launch("bitmap_codec", expression, grid_of(len(positions)), BLOCK, args)
    return relative


def decode_coo(
    launcher: Launcher, layout: DeviceLayout, relative: Tensor, start: int, span: int
) -> tuple[Tensor, Tensor]:
    """Decodes the relative positions of one chunk to table rows.

    Args:
        layout: of the tensor.
        relative: int32 or int64 ``[rows]`` on the device, aligned as its dtype; not trusted.
        start, span: of the chunk, within the layout.

    Returns:
        table rows int64 ``[rows]``, and a flag, int64 ``[1]``. It is 1 if the positions do not increase
        within [0, ``span``) or one of them is no row's: then the rows mean nothing.

    Raises:
        TensorError: another dtype, shape or alignment.
        ProtocolError: the number of rows does not fit ``span``.
    """
    check_on_device("relative positions", relative, INTEGERS, 1)
    _check_address("relative positions", relative, relative.itemsize)
    table_rows, error, _ = _decoded(layout, len(relative), start, span, relative.device)
    expression = f"decode_coo<{position_name(relative.dtype)}>"
    args = (layout.placement, relative, len(relative), start, span, table_rows, error)
    launcher.launch("bitmap_codec", expression, grid_of(len(relative)), BLOCK, args)
    return table_rows, error


def _check_address(name: str, tensor: Tensor, alignment: int) -> None:
    if tensor.data_ptr() % alignment:
        address = f"{tensor.data_ptr():#x}"
        raise TensorError(f"{name} at address {address}: expected a multiple of {alignment}; copy them")


def _words(chunk: BitmapChunk) -> int:
    return -(-chunk.span // 32)


def _bitmap_tiles(span: int) -> int:
    return grid_of(-(-span // BITMAP_TILE) * BLOCK)


def _decoded(
    layout: DeviceLayout, rows: int, start: int, span: int, device: torch.device, state_words: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates table rows, the flag, and the state of a look-back.

    Raises:
        ProtocolError: ``rows``, which the sender states, exceeds ``span``.
    """
    assert 0 <= start <= start + span <= layout.size, (start, span, layout.size)
    if not 0 <= rows <= span:
        raise ProtocolError("payload", f"{rows} rows for a span of {span}")
    table_rows = torch.empty(rows, dtype=torch.int64, device=device)
    cleared = torch.zeros(1 + state_words, dtype=torch.int64, device=device)
    return table_rows, cleared[:1], cleared[1:]
