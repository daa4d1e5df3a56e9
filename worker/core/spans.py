"""Tracing spans of a worker's work, for its timeline and for torch's profiler."""

from __future__ import annotations

from types import TracebackType

import torch
from torch.autograd import profiler

from zenps.observe.trace import NOTHING, OFF, Block, Span, Trace


class Spans:
    """Marks work for ``sync.trace``, for ``torch.profiler``, for both or for neither.

    Under ``torch.autograd.profiler.emit_nvtx`` spans are NVTX ranges, like all of torch's.

    Args:
        trace: this worker's.
    """

    def __init__(self, trace: Trace = OFF) -> None:
        self.trace = trace

    def __call__(self, kind: str, tensor: str = "", step: int = -1) -> Block:
        """Marks what this thread does to ``tensor`` in a ``with`` block, in its round ``step``."""
        # record_function takes microseconds even if nobody profiles. torch's optimizers check this flag, too.
        is_profiled = profiler._is_profiler_enabled
        if not (is_profiled or self.trace.is_on):
            return NOTHING
        span = self.trace.span(kind, tensor=tensor, step=step) if tensor else self.trace.span(kind)
        return _Profiled(f"zenps::{kind}({tensor})", span) if is_profiled else span


class _Profiled:
    """A span that torch's profiler shows as well."""

    def __init__(self, name: str, span: Block) -> None:
        self._range, self._span = torch.profiler.record_function(name), span

    def __enter__(self) -> Span | None:
        self._range.__enter__()  # type: ignore[no-untyped-call]
        return self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, traceback)
        self._range.__exit__(kind, error, traceback)
