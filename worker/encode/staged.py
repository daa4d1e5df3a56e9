"""Staging: tensors on a GPU are prepared there, and copied through pinned memory.

What such a transfer pushes is known only once the device has finished, and the host must not wait for that.
So the preparation of a transfer is an iterator of events, which continues when an event has happened.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from zenps.buffers import BufferPool
from zenps.errors import TensorError, ZenPSError
from zenps.kernels.gpu.scatter import gather_rows

from ..core.statistics import Progress, Report
from ..core.transfer import Answer, EncodedTensor, Sharding, Transfer
from .accelerator import Accelerator, Event
from .blocks import BlockTransfer
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
            TensorError: the device has failed, such as for want of memory.
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
        """Prepares the first push; yields an event whenever the device has to reach it first."""

    def _to_host(self, tensor: Tensor, pool: BufferPool | None = None) -> Tensor:
        """Returns a copy in pinned memory, by default the accelerator's; it is complete at the next event."""
        return self._accelerator.to_host(tensor, pool)


class StagedDense(Staged):
    """A strided tensor on a GPU: copied to pinned memory, then transferred like one on the CPU.

    Args:
        tensor: of any shape; it must not change before the round has ended.
        transfer: constructs the transfer of the copy, with results in pinned memory if they are large.
    """

    def __init__(
        self, tensor: Tensor, transfer: Callable[[Tensor], Transfer], accelerator: Accelerator
    ) -> None:
        self.rows_given = tensor.numel()
        self._tensor = tensor.detach()
        self._make = transfer
        super().__init__(accelerator)

    def _prepare(self) -> Iterator[Event]:
        gpu = self._accelerator
        gpu.pushing.follow(self._tensor)
        with gpu.pushing.current():
            # An asynchronous copy would have the bytes of a negative view without its sign.
            copy = self._to_host(self._tensor.resolve_neg())
        yield gpu.pushing.mark()
        del self._tensor
        self._inner = self._make(copy)

    def begin(self) -> Sequence[EncodedTensor]:
        return self._inner.begin()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        return self._inner.on_answer(answer)

    def restart(self, encoded: EncodedTensor) -> None:
        self._inner.restart(encoded)

    def finish(self) -> Tensor:
        """Returns the sum: strided, contiguous, on the device."""
        gpu = self._accelerator
        pulled = self._inner.finish()
        with gpu.pulling.current():
            result = pulled.to(gpu.device, non_blocking=True)
        gpu.wait_for(gpu.pulling.mark())
        gpu.pulling.hand_over(result)
        return result

    def report(self, progress: Progress) -> Report:
        return self._inner.report(progress)


class StagedBlocks(StagedDense):
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
        Staged.__init__(self, accelerator)

    def _prepare(self) -> Iterator[Event]:
        gpu, plan = self._accelerator, self._plan
        gpu.pushing.follow(self._tensor)
        with gpu.pushing.current():
            flat = self._tensor.resolve_neg().reshape(-1)
            padding = plan.blocks * plan.block - len(flat)
            table = (functional.pad(flat, (0, padding)) if padding else flat).view(plan.blocks, plan.block)
            flags = self._to_host((table != 0).any(1))
        yield gpu.pushing.mark()
        held = np.flatnonzero(flags.numpy())
        pinned = gpu.pinned.empty((len(held),), torch.int64)
        pinned.numpy()[:] = held
        with gpu.pushing.current():
            order = pinned.to(gpu.device, non_blocking=True)
            values = self._to_host(gather_rows(gpu.launcher, table, order))
        yield gpu.pushing.mark()
        like = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="meta")
        del self._tensor
        self._inner = BlockTransfer(like, plan, self._shardings, gpu.pinned, (held, values))
