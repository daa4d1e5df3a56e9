"""Change detection of gradients: finds edits between backward and ``step()``, by a hash of the elements.

PyTorch's version counter does not suffice: it does not notice edits through ``.data`` or NumPy, and all views
of one tensor share it, such as the gradients of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from xxhash import xxh3_64_intdigest

from zenps.wire.tensors import flat, tensor_bytes

_Hash = int | Tensor
"""On a device the hash stays there, as a tensor, so that the host need not wait for it."""

# The hash on a device: the sums of this many columns of words. An edit that leaves one sum unchanged hardly
# leaves all of them unchanged. It is a prime, so that columns do not coincide with the rows of a layer.
_COLUMNS = 1021

# Sums are int64, and words narrower: with words of 64 bits, an even number of flipped signs would add up to
# 0.
_WORDS = {1: torch.int8, 2: torch.int16}


class Snapshot:
    """A gradient as backward has computed it. The host does not wait for a device here.

    Args:
        gradient: of any layout; only strided and COO ones in memory are hashed, because others are refused
            anyway.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._hashes = _hashes(gradient)

    def is_of(self, gradient: Tensor | None) -> bool:
        """Returns whether ``gradient`` is the same tensor."""
        return gradient is self._gradient

    def pairs(self) -> Iterable[tuple[_Hash, _Hash]]:
        """Returns the hashes of the gradient, each with that of what its memory has now."""
        return zip(self._hashes, _hashes(self._gradient), strict=True)


def first_changed(snapshots: Mapping[Parameter, Snapshot]) -> Parameter | None:
    """Returns a parameter whose gradient has changed since its snapshot; None if there is none."""
    for parameter, snapshot in snapshots.items():
        if not snapshot.is_of(parameter.grad):
            return parameter
    if _are_unchanged(snapshots.values()):
        return None
    return next(parameter for parameter, snapshot in snapshots.items() if not _are_unchanged([snapshot]))


def _are_unchanged(snapshots: Iterable[Snapshot]) -> bool:
    """Compares all hashes of a device at once, because each comparison waits for the device."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for snapshot in snapshots:
        for then, now in snapshot.pairs():
            if isinstance(then, Tensor) and isinstance(now, Tensor):
                thens, nows = by_device.setdefault(then.device, ([], []))
                thens.append(then)
                nows.append(now)
            elif then != now:
                return False
    return all(torch.equal(torch.cat(thens), torch.cat(nows)) for thens, nows in by_device.values())


def _hashes(gradient: Tensor) -> Sequence[_Hash]:
    """Returns the hash of each tensor that ``gradient`` consists of."""
    if type(gradient).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return ()
    gradient = gradient.detach()
    if gradient.is_sparse:
        return _hash(gradient._indices()), _hash(gradient._values())
    return (_hash(gradient),) if gradient.layout == torch.strided and not gradient.is_meta else ()


def _hash(tensor: Tensor) -> _Hash:
    tensor = tensor.resolve_neg().contiguous()
    if not tensor.is_cpu:
        return _device_hash(tensor)
    # Backward adds rows in place to an empty gradient, which torch refuses once NumPy has seen its memory.
    return xxh3_64_intdigest(tensor_bytes(tensor)) if tensor.numel() else 0


def _device_hash(tensor: Tensor) -> Tensor:
    """Returns the sums of the columns of a table of all words, and the words of its incomplete last row."""
    words = flat(tensor).view(_WORDS.get(tensor.element_size(), torch.int32))
    whole = words.numel() // _COLUMNS * _COLUMNS
    sums = words[:whole].view(-1, _COLUMNS).sum(0)
    return torch.cat([sums, words[whole:].long()])


def is_cleared(gradient: Tensor | None, *, unless_zeros: bool = False) -> bool:
    """Returns whether a gradient is None or zeros, as ``zero_grad()`` leaves it.

    Args:
        unless_zeros: the gradient was zeros before, which then say nothing.
    """
    if gradient is None or unless_zeros:
        return gradient is None
    return not (gradient._values() if gradient.is_sparse else gradient).any()
