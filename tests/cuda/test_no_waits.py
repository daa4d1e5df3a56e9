"""No wrapper waits for the device: none uses an operation that returns a number or a size to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.host.launcher import HostLauncher
from zenps.kernels.gpu import bitmap_codec, place, scatter
from zenps.kernels.gpu.bitmap_compact import bitmap_compact
from zenps.kernels.gpu.place import DeviceLayout
from zenps.kernels.gpu.sort_compact import sort_compact
from zenps.kernels.gpu.threshold_compact import greatest, sample, threshold_compact
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import LayoutCache
from zenps.partition.ring import rebalance
from zenps.partition.strategies import strategy

WAITING = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "_unique", "_unique2", "unique_consecutive",
    "unique_dim", "masked_select", "equal", "is_nonzero", "_assert_async", "repeat_interleave",
}  # fmt: skip
"""ATen operations that copy a number or a size from the device. Copies to the host are found by device."""


class NoWaiting(TorchDispatchMode):
    """Refuses them; the launcher's own reading of tensors is not an operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITING or masked:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def device_layout_of(rows: int) -> DeviceLayout:
    cache = LayoutCache(7, rebalance(None, [0, 1]), [0, 1], 0)
    return device_layout_on(cache.get(strategy("balanced"), "weight", rows, 1), torch.device("cpu"))


LAYOUT = device_layout_of(1000)
ROWS = torch.randint(0, 1000, (300,), generator=torch.Generator().manual_seed(1))
POSITIONS = ROWS.int()
VALUES = torch.ones(300, 4)
DENSE = torch.where(torch.arange(1000) % 7 == 0, 1.0, 0.0)
COUNT = torch.tensor([300])
BOUNDS = torch.tensor([0, 500, 1000])
BITMAPS = torch.empty(128, dtype=torch.uint8)

WRAPPERS: dict[str, Callable[[HostLauncher], object]] = {
    "place_rows": lambda launcher: place.place_rows(launcher, LAYOUT, ROWS),
    "sort_compact": lambda launcher: sort_compact(launcher, POSITIONS, VALUES, 1000).summed(),
    "bitmap_compact": lambda launcher: bitmap_compact(launcher, POSITIONS, VALUES, 1000).summed(),
    "threshold_compact": lambda launcher: threshold_compact(
        launcher, DENSE.clone(), DENSE, sample(DENSE, 9), (0, 1000), 300
    ),
    "greatest": lambda launcher: greatest(DENSE, 9),
    "encode_bitmaps": lambda launcher: bitmap_codec.encode_bitmaps(
        launcher, torch.arange(300), [bitmap_codec.BitmapChunk(0, 300, 0, 1000)], BITMAPS
    ),
    "decode_bitmap": lambda launcher: bitmap_codec.decode_bitmap(
        launcher, LAYOUT, torch.full((125,), 255, dtype=torch.uint8), 1000, 0, 1000
    ),
    "encode_coo": lambda launcher: bitmap_codec.encode_coo(
        launcher, POSITIONS, BOUNDS[:2], torch.empty(300, dtype=torch.int32)
    ),
    "decode_coo": lambda launcher: bitmap_codec.decode_coo(
        launcher, LAYOUT, torch.arange(300, dtype=torch.int32), 0, 1000
    ),
    "gather_rows": lambda launcher: scatter.gather_rows(launcher, VALUES, torch.arange(300)),
    "merge": lambda launcher: scatter.merge(launcher, torch.arange(300), VALUES, 1000),
}


@pytest.mark.parametrize("run", WRAPPERS.values(), ids=WRAPPERS)
def test_no_wrapper_waits(launcher: HostLauncher, run: Callable[[HostLauncher], object]) -> None:
    with NoWaiting():
        run(launcher)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: int(COUNT), lambda: POSITIONS.unique(), lambda: DENSE.nonzero(), lambda: DENSE[DENSE > 0],
        lambda: bool(COUNT == 1),
    ],
)  # fmt: skip
def test_a_wait_is_noticed(wait: Callable[[], object]) -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        wait()
