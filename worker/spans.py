"""What this worker does, as spans of a timeline and of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch

from zenps.trace import OFF, Nothing, Span, Trace

__all__ = ["Spans"]


class Spans:
    """Marks work for whoever looks on: ``sync.trace``, ``torch.profiler``, both, or nobody.

    Under ``torch.autograd.profiler.emit_nvtx`` these are NVTX ranges, as all of torch's.

    Args:
        trace: this worker's.
    """

    def __init__(self, trace: Trace = OFF) -> None:
        self.trace = trace

    def __call__(
        self, kind: str, tensor: str = "", step: int = -1, **args: object
    ) -> Span | Nothing | _Profiled:
        """What this thread does in the ``with`` block: to ``tensor``, in its round ``step``."""
        about = {"tensor": tensor, "step": step, **args} if tensor else args
        span = self.trace.span(kind, **about)
        # torch's own marks cost a microsecond even if nobody profiles; to ask costs a tenth.
        if not torch.autograd._profiler_enabled():
            return span
        return _Profiled(f"zenps::{kind}({tensor})", span)


class _Profiled(AbstractContextManager["Span | Nothing"]):
    """A span that torch's profiler shows, too."""

    def __init__(self, name: str, span: Span | Nothing) -> None:
        self._range, self._span = torch.profiler.record_function(name), span

    def __enter__(self) -> Span | Nothing:
        self._range.__enter__()
        return self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, traceback)
        self._range.__exit__(kind, error, traceback)
