"""Both codecs on the device, with the bytes of :mod:`zenps.codecs`: ``cuda/bitmap_codec.cu``.

What is decoded comes from the network and is checked on the device: an error is a flag there, which the
host reads when it needs the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import ProtocolError, TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of, scan_state
from .place import DeviceLayout
from .sources import position_name

BITMAP_TILE = 1 << 16
"""Positions that a block reads or writes as bits; ``cuda/bitmap.cuh`` has the same."""

BITMAP_ALIGNMENT = 16
"""Bitmaps are read sixteen bytes at once."""

INTEGERS = (torch.int32, torch.int64)


def encode_bitmap(
    launcher: Launcher, positions: Tensor, begin: int, end: int, start: int, span: int
) -> Tensor:
    """One bit for each position of a chunk.

    Args:
        positions: int32 or int64 ``[n]`` on the device; those from ``begin`` up to ``end``, the chunk's,
            ascend strictly within [``start``, ``start + span``). Not checked.
        begin, end: in [0, n].
        start, span: of the chunk.

    Returns:
        uint8 ``[⌈span / 8⌉]`` on the device, as :meth:`zenps.codecs.bitmap.Bitmap.encode` has them.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    words = -(-span // 32)
    bitmap = torch.empty(4 * words, dtype=torch.uint8, device=positions.device)
    expression = f"encode_bitmap<{position_name(positions.dtype)}>"
    args = (positions, begin, end, start, words, bitmap)
    launcher.launch("bitmap_codec", expression, _bitmap_tiles(span), BLOCK, args)
    return bitmap[: -(-span // 8)]


def decode_bitmap(
    launcher: Launcher, layout: DeviceLayout, data: Tensor, rows: int, start: int, span: int
) -> tuple[Tensor, Tensor]:
    """The table rows whose positions a bitmap holds, in order of position.

    Args:
        layout: of the tensor.
        data: uint8 ``[⌈span / 8⌉]`` on the device, at an address divisible by 16; not trusted.
        rows: how many the sender says there are.
        start, span: of the chunk, within the layout.

    Returns:
        table rows int64 ``[rows]``, and int64 ``[1]`` that is 1 where other than ``rows`` bits are set, one
        beyond ``span``, or one that stands for no row: then the rows mean nothing.

    Raises:
        TensorError: another dtype, shape or alignment.
        ProtocolError: as many bytes or rows cannot be.
    """
    check_on_device("bitmap", data, (torch.uint8,), 1)
    _check_address("bitmap", data, BITMAP_ALIGNMENT)
    if len(data) != -(-span // 8):
        raise ProtocolError("payload", f"bitmap: {len(data)} bytes for a span of {span}")
    table_rows, error = _decoded(layout, rows, start, span)
    tiles = _bitmap_tiles(span)
    state = scan_state(tiles, data.device)
    args = (state, layout.words, data, rows, start, span, table_rows, error)
    launcher.launch("bitmap_codec", "decode_bitmap", tiles, BLOCK, args)
    return table_rows, error


def encode_coo(
    launcher: Launcher, positions: Tensor, count: Tensor, starts: Tensor, dtype: torch.dtype
) -> Tensor:
    """How far each position lies behind the start of its chunk, for all chunks at once.

    Args:
        positions: int32 or int64 ``[capacity]`` on the device; the first ``count`` are valid.
        count: int64 ``[1]``.
        starts: int64 ``[chunks]``, ascending, the first not greater than any position.
        dtype: int32, or int64 for chunks of more than 2**31 positions.

    Returns:
        ``[capacity]`` of ``dtype``; the first ``count`` are valid.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    check_on_device("chunk starts", starts, (torch.int64,), 1)
    assert dtype in INTEGERS, dtype
    relative = torch.empty(len(positions), dtype=dtype, device=positions.device)
    expression = f"encode_coo<{position_name(positions.dtype)}, {position_name(dtype)}>"
    args = (positions, count, starts, len(starts), relative)
    launcher.launch("bitmap_codec", expression, grid_of(len(positions)), BLOCK, args)
    return relative


def decode_coo(
    launcher: Launcher, layout: DeviceLayout, relative: Tensor, start: int, span: int
) -> tuple[Tensor, Tensor]:
    """The table rows at positions of a chunk.

    Args:
        layout: of the tensor.
        relative: int32 or int64 ``[rows]`` on the device, aligned as its dtype; not trusted.
        start, span: of the chunk, within the layout.

    Returns:
        table rows int64 ``[rows]``, and int64 ``[1]`` that is 1 where the positions do not increase within
        [0, ``span``) or one stands for no row: then the rows mean nothing.

    Raises:
        TensorError: another dtype, shape or alignment.
        ProtocolError: as many rows cannot be.
    """
    check_on_device("relative positions", relative, INTEGERS, 1)
    _check_address("relative positions", relative, relative.itemsize)
    table_rows, error = _decoded(layout, len(relative), start, span)
    expression = f"decode_coo<{position_name(relative.dtype)}>"
    args = (layout.words, relative, len(relative), start, span, table_rows, error)
    launcher.launch("bitmap_codec", expression, grid_of(len(relative)), BLOCK, args)
    return table_rows, error


def _check_address(name: str, tensor: Tensor, alignment: int) -> None:
    if tensor.data_ptr() % alignment:
        address = f"{tensor.data_ptr():#x}"
        raise TensorError(f"{name} at address {address}: expected a multiple of {alignment}; copy them")


def _bitmap_tiles(span: int) -> int:
    return grid_of(-(-span // BITMAP_TILE) * BLOCK)


def _decoded(layout: DeviceLayout, rows: int, start: int, span: int) -> tuple[Tensor, Tensor]:
    """Memory for table rows and the flag. How many rows, the sender says: no more than the span may be."""
    assert 0 <= start <= start + span <= layout.size, (start, span, layout.size)
    if not 0 <= rows <= span:
        raise ProtocolError("payload", f"{rows} rows for a span of {span}")
    table_rows = torch.empty(rows, dtype=torch.int64, device=layout.words.device)
    return table_rows, torch.zeros(1, dtype=torch.int64, device=layout.words.device)
