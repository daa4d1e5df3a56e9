"""Staging: tensors on a GPU are prepared there, and copied through pinned memory.

The contents of its pushes are known only once the device has finished, and the host must not wait for that.
So its preparation is an iterator of events, and continues when an event has happened.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from zenps.buffers import BufferPool
from zenps.errors import TensorError, ZenPSError
from zenps.kernels.gpu.scatter import gather_rows
from zenps.wire.tensors import tensor_bytes

from ..core.statistics import Progress, Report
from ..core.transfer import Answer, EncodedTensor, Sharding, Transfer
from .accelerator import Accelerator, Event
from .blocks import BlockTransfer
from .dense import GranuleTransfer, WholeTransfer, padded
from .quantizer import ValueCoder
from .streams import Plan


class Staged(Transfer):
    """A transfer whose preparation continues whenever an event of the device has happened."""

    is_staged = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._steps = self._prepare()
        self._event: Event | None = None
        self._advance(is_reached=True)

    def prepared(self) -> bool:
        self._advance()
        return self._event is None

    def _advance(self, *, is_reached: bool = False) -> None:
        """Prepares up to an event that has not happened yet.

        Args:
            is_reached: go on up to the next event without asking whether the present one has happened.

        Raises:
            TensorError: the device has failed, for example for lack of memory.
        """
        try:
            if is_reached:
                self._event = next(self._steps, None)
            else:
                while self._event is not None and self._event.query():
                    self._event = next(self._steps, None)
        except ZenPSError:
            raise
        except Exception as error:  # not retried: the iterator would look exhausted
            raise TensorError(f"a tensor on {self._accelerator.device}: {error}") from error

    @abstractmethod
    def _prepare(self) -> Iterator[Event]:
        """Prepares the first push; yields each event that the device must reach before it continues."""


class StagedStrided(Staged):
    """A strided tensor on a GPU. Once it is prepared, a transfer of the host, ``_inner``, does its rounds."""

    _inner: Transfer

    def begin(self) -> Sequence[EncodedTensor]:
        return self._inner.begin()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        return self._inner.on_answer(answer)

    def restart(self, encoded: EncodedTensor) -> None:
        self._inner.restart(encoded)

    def finish(self) -> Tensor:
        """Returns the sum: strided, contiguous, on the device."""
        gpu = self._accelerator
        with gpu.pulling.current():
            pulled = self._inner.finish()
            result = pulled.to(gpu.device, non_blocking=True)
        gpu.wait_for(gpu.pulling.mark())
        gpu.pulling.hand_over(result)
        return result

    def report(self, progress: Progress) -> Report:
        return self._inner.report(progress)


class StagedDense(StagedStrided):
    """A strided tensor on a GPU, whose values the host never copies.

    The device encodes the values. One copy takes them to pinned memory; frames are slices of that memory.
    Answers go from the receive buffer to the device, which decodes them.

    Args:
        tensor: of any shape; it must not change before the round has ended.
        sharding, contributes: as for ``WholeTransfer`` and ``DenseTransfer``.
        coder: of the values, on the device.
        pool: pinned memory for what is pushed.
    """

    def __init__(
        self,
        tensor: Tensor,
        sharding: Sharding,
        contributes: bool,
        coder: ValueCoder,
        accelerator: Accelerator,
        pool: BufferPool,
    ) -> None:
        self._sharding, self._contributes, self._coder = sharding, contributes, coder
        self._pool = pool
        self._empty = partial(empty_on, accelerator.device)
        self.rows_given = tensor.numel()
        self._tensor = tensor.detach()
        super().__init__(accelerator)

    def _prepare(self) -> Iterator[Event]:
        gpu, coder, values = self._accelerator, self._coder, None
        if self._contributes:
            gpu.pushing.follow(self._tensor)
            flags = None
            if coder.flags is not None:
                with gpu.pushing.current():
                    flags = gpu.to_host(self._tensor.reshape(-1)[coder.flags])
                yield gpu.pushing.mark()
            with gpu.pushing.current():
                values = gpu.to_host(self._encode(flags), self._pool)
            yield gpu.pushing.mark()
        like = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="meta")
        del self._tensor
        sharding = self._sharding
        if sharding.layout is None:
            encoded = None if values is None else tensor_bytes(values)
            self._inner = WholeTransfer(like, sharding, self._contributes, coder, encoded)
        else:
            self._inner = GranuleTransfer(like.shape, like.dtype, sharding, values, coder, self._empty)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        with self._accelerator.pulling.current():
            return super().on_answer(answer)

    def _encode(self, flags: Tensor | None) -> Tensor:
        """Returns the encoded values as they are pushed: uint8 on the device."""
        coder, layout = self._coder, self._sharding.layout
        size = layout.size if layout is not None else self.rows_given
        if coder.keeps_residual:  # overwrites what it encodes
            values = padded(self._tensor, size, self._empty)
        else:
            values = _flat(self._tensor, size)
        return coder.encode(values[:, None], flags)


class StagedBlocks(StagedStrided):
    """A strided tensor on a GPU whose blocks that are not zero are copied to pinned memory, and no others.

    The device says which blocks these are, so the preparation waits for two events.

    Args:
        tensor: of any shape; it must not change before the round has ended.
        plan: how the tensor is divided into streams.
        shardings: of each stream.
    """

    absorbs_on = BlockTransfer.absorbs_on

    def __init__(
        self, tensor: Tensor, plan: Plan, shardings: Sequence[Sharding], accelerator: Accelerator
    ) -> None:
        self._plan, self._shardings = plan, shardings
        self.rows_given = tensor.numel()
        self._tensor = tensor.detach()
        super().__init__(accelerator)

    def _prepare(self) -> Iterator[Event]:
        gpu, plan = self._accelerator, self._plan
        gpu.pushing.follow(self._tensor)
        with gpu.pushing.current():
            table = _flat(self._tensor, plan.blocks * plan.block).view(plan.blocks, plan.block)
            flags = gpu.to_host((table != 0).any(1))
        yield gpu.pushing.mark()
        held = np.flatnonzero(flags.numpy())
        pinned = gpu.pinned.empty((len(held),), torch.int64)
        pinned.numpy()[:] = held
        with gpu.pushing.current():
            order = pinned.to(gpu.device, non_blocking=True)
            values = gpu.to_host(gather_rows(gpu.launcher, table, order))
        yield gpu.pushing.mark()
        like = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="meta")
        del self._tensor
        self._inner = BlockTransfer(like, plan, self._shardings, gpu.pinned, (held, values))


def empty_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised contiguous tensor on a device."""
    return torch.empty(shape, dtype=dtype, device=device)


def _flat(tensor: Tensor, size: int) -> Tensor:
    """Returns the elements of a strided tensor, contiguous, padded with zeros: a view where it is one."""
    # An asynchronous copy would have the bytes of a negative view without its sign.
    flat = tensor.resolve_neg().reshape(-1).contiguous()
    return functional.pad(flat, (0, size - len(flat))) if size > len(flat) else flat
