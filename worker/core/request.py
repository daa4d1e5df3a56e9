"""Requests to synchronise a tensor, and their options."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from msgspec import Struct, structs
from torch import Tensor

from zenps.errors import TensorError, UsageError, ZenPSError
from zenps.kernels.base import ACCUMULATE
from zenps.partition.keyspace import MAX_SIZE
from zenps.sparsifiers.base import Momentum
from zenps.wire.fields import MAX_COLUMNS, MAX_DIMENSIONS, MAX_NAME

from .residuals import Residuals, Rounding

NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8)
"""Integers that travel, and are summed, as int64; uint8 itself is for broadcasts on the wire."""

_SUPPORTED = (*(dtype for dtype in ACCUMULATE if dtype not in NARROW), *NARROW)

# The turn in a name of :func:`name_in_turn`.
_TURN = re.compile(r"^([^/]*)\.(\d+)/")

# A lone surrogate: a Python str may contain one, but UTF-8 cannot encode it.
_SURROGATE = re.compile("[\ud800-\udfff]")

Purpose = Literal["gradient", "value", "broadcast", "control"]
"""The use of a tensor. A *gradient* may be quantized; a *value* arrives exactly; a *broadcast* is
pushed by one rank and pulled by all; *control* tensors are messages of ZenPS between ranks."""


class Parts(NamedTuple):
    """The gradients that a dense one consists of.

    Attributes:
        ranges: of elements, one for each gradient.
        flags: one element for each gradient; 0 means that there is no such gradient.
    """

    ranges: Sequence[tuple[int, int]]
    flags: slice


class Options(Struct, frozen=True):
    """How a tensor is synchronised. Rounds keep the options, but not the tensor."""

    average: bool = False
    """Divide the sum by the number of ranks."""
    contributes: bool = True
    """True if this rank's values are part of the sum. If False, it pulls the sum of the others."""
    stands_for: tuple[int, ...] = ()
    """Hierarchical reduction: the other ranks of this host whose contributions this rank's values contain."""
    priority: int = 0
    """Pushes of the highest priority are sent first if the scheme has priorities, else in order."""
    purpose: Purpose = "value"
    residuals: Residuals | None = None
    """Error feedback of the gradients of one optimizer. Without it, a gradient is not quantized."""
    rounding: Rounding | None = None
    """Takes the rounding errors, which ``residuals`` then do not take."""
    is_dropped: bool = False
    """True for a gradient that is pushed only because other ranks wait for it: residuals stay as they are."""
    parts: Parts | None = None
    """The gradients in this tensor, if there are several. Without a sparsifier, the residual of a part that
    has no gradient stays as it is."""
    given: str = ""
    """The description that must be equal on all ranks: that of the caller's tensor (:func:`describe`) if a
    transform has replaced it, and whatever the caller adds. If empty, ranks compare the pushed tensor."""

    is_sparsifiable: bool = False
    """True for a gradient that ``sync.sparsifier`` may thin out. It needs ``residuals``."""
    exact: tuple[tuple[int, int], ...] = ()
    """Ranges of elements that are pushed in any case."""
    momentum: Momentum | None = None
    """The optimizer's, for a sparsifier that takes it."""
    pusher: tuple[int, int] | None = None
    """This rank's number among those that push, and how many these are; None: rank and world size."""

    @property
    def is_reduction(self) -> bool:
        """True for tensors of the training itself: every backend may reduce them in its own way.

        Broadcasts and control always go over servers.
        """
        return self.purpose in ("gradient", "value")

    def of_round(self, is_summed: bool) -> Options:
        """Returns the options of one round: a sum, if ``is_summed``, even if the tensor is averaged.

        A round may be kept for longer than the optimizer whose residuals these are, so it has none.
        """
        if self.residuals is None and not is_summed:
            return self
        return structs.replace(self, average=self.average and not is_summed, residuals=None)


class Request(NamedTuple):
    """A tensor to synchronise.

    Attributes:
        tensor: on the CPU or a CUDA device, strided or sparse COO.
        name: the same on all ranks.
    """

    tensor: Tensor
    name: str
    options: Options = Options()


def check_request(request: Request) -> None:
    """Checks a request before anything is sent.

    Raises:
        UsageError: the name is not a string of 1 to 1024 characters that UTF-8 can encode, ``average`` is not
            a bool, the priority is not an integer, or a CUDA graph is being captured.
        TensorError: the tensor has an unsupported device, layout or dtype, or too many dimensions.
    """
    tensor, name, options = request
    _check_name(name)
    check_outside_capture(name)
    check_average(options.average, f"tensor {name!r}")
    if options.is_reduction:
        _check_tensor(tensor, options.average)
    try:
        operator.index(options.priority)  # also NumPy's integers
    except TypeError:
        got = f"priority {options.priority!r:.60}"
        raise UsageError(f"tensor {name!r}: {got}: expected an integer") from None


def check_outside_capture(name: str) -> None:
    """Checks that no CUDA graph is being captured: it would not contain the tensor's push.

    Raises:
        UsageError: one is.
    """
    # Without an initialised CUDA, the second function raises.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"tensor {name!r:.60}: expected no CUDA graph to be captured, because its replays would run no "
            "hook and push nothing; push outside of the capture, and capture forward and backward by "
            "torch.cuda.make_graphed_callables"
        )


def wire_name(name: str) -> str:
    """Returns the name of a caller's tensor on the wire, with each ``@`` and ``#`` doubled.

    A single one begins what ZenPS adds: ``@hosts`` for a host's sum, ``#`` and a number for a stream. So no
    caller's name can be one of these.

    Raises:
        UsageError: the name becomes too long.
    """
    if "@" not in name and "#" not in name:
        return name
    doubled = name.replace("@", "@@").replace("#", "##")
    if len(doubled) > MAX_NAME:
        reason = f"expected at most {MAX_NAME} characters, of which each @ and # counts twice"
        raise UsageError(f"tensor name {name!r:.60}: {reason}")
    return doubled


def name_in_turn(prefix: str, turn: int, name: str) -> str:
    """Returns the name of one of several rounds of a gradient that may be in flight at once.

    Args:
        prefix: of the names of one optimizer.
        turn: the number of the round, modulo the number of rounds that may be in flight at once.
        name: of the gradient.
    """
    return f"{prefix}.{turn}/{name}"


def turn_of(name: str) -> int:
    """Returns the turn in a name; 0 if it has none, because only one round is in flight at once."""
    found = _TURN.match(name)
    return int(found[2]) if found else 0


def without_turn(name: str) -> str:
    """Returns the name that a gradient would have if only one of its rounds were in flight at once."""
    return _TURN.sub(r"\1/", name)


# These parameters are annotated as object because callers need not be type-checked.


def check_average(average: object, where: str) -> None:
    """Checks that ``average`` is a bool: servers take no other type, such as 1 or NumPy's bool.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(average, bool):
        raise UsageError(f"{where}: average = {average!r:.60}: expected a bool, True or False")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or _SURROGATE.search(name):
        raise UsageError(
            f"tensor name {name!r:.60}: expected a string of 1 to 1024 characters that UTF-8 can encode"
        )


def _check_tensor(tensor: object, average: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise TensorError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    check_plain(tensor)
    check_dimensions(tensor)
    if not (tensor.is_cpu or tensor.is_cuda):
        remedy = "give its module memory with .to_empty()" if tensor.is_meta else "move it with .cpu()"
        raise TensorError(f"device {tensor.device}: expected cpu or cuda; {remedy}")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise TensorError(f"layout {tensor.layout}: expected strided or sparse COO; use .to_sparse_coo()")
    if tensor.is_sparse and table_shape(tensor)[0] >= MAX_SIZE:
        rows = table_shape(tensor)[0]
        raise TensorError(f"a table of {rows} rows: expected less than {MAX_SIZE}; divide the table")
    if tensor.is_sparse and table_shape(tensor)[1] > MAX_COLUMNS:
        columns = table_shape(tensor)[1]
        raise TensorError(f"rows of {columns} elements: expected at most {MAX_COLUMNS}; divide the rows")
    check_reducible(tensor.dtype, average)


def check_reducible(dtype: torch.dtype, average: bool) -> None:
    """Checks that tensors of a dtype can be summed, or averaged.

    Raises:
        TensorError: they cannot.
    """
    if dtype not in _SUPPORTED and not (average and dtype == torch.bool):
        names = ", ".join(str(each).removeprefix("torch.") for each in _SUPPORTED)
        raise TensorError(f"dtype {dtype}: expected one of {names}{_advice(dtype)}")


def _advice(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "; .int() counts, allreduce(op='max') is a logical or"
    if dtype.is_complex:
        return "; pass torch.view_as_real(tensor), or make the parameter one of real numbers likewise"
    return ""


def check_plain(tensor: Tensor) -> None:
    """Checks that a tensor has its elements in its own memory.

    Raises:
        TensorError: it wraps other tensors that have them, as a DTensor does.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        raise TensorError(
            f"a {kind}: expected a tensor with elements of its own, such as .to_local() of a DTensor"
        )


def check_dimensions(tensor: Tensor) -> None:
    """Checks that servers take a tensor of so many dimensions.

    Raises:
        TensorError: they do not.
    """
    if tensor.dim() > MAX_DIMENSIONS:
        raise TensorError(f"{tensor.dim()} dimensions: expected at most {MAX_DIMENSIONS}; flatten the tensor")


def check_outside_graph(tensor: object, name: str) -> None:
    """Checks that autograd is not expected to follow a tensor to other ranks.

    Parameters are accepted, and all tensors under ``torch.no_grad()``.

    Raises:
        TensorError: the tensor was computed from others that require a gradient.
    """
    if isinstance(tensor, Tensor) and tensor.grad_fn is not None and torch.is_grad_enabled():
        raise TensorError(
            f"tensor {name!r} is part of an autograd graph, but no gradient comes back from other ranks; "
            "pass tensor.detach()"
        )


def describe(tensor: Tensor) -> str:
    """Returns the kind, dtype and shape of a tensor, in words. Ranks that agree have the same."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_sparse:
        return f"sparse {dtype} {shape} by {tensor.sparse_dim()} dimension(s)"
    return f"dense {dtype} {shape}"


def table_shape(tensor: Tensor) -> tuple[int, int]:
    """Returns a sparse tensor's shape as a table: (product of sparse dimensions, product of dense ones)."""
    sparse_dim = tensor.sparse_dim()
    return math.prod(tensor.shape[:sparse_dim]), math.prod(tensor.shape[sparse_dim:])


def device_error(what: str, error: Exception) -> ZenPSError:
    """Returns the error of work on a device that has failed, for example for lack of memory.

    Args:
        what: the tensor for which the work was done.
        error: of Python or torch; an error of ZenPS is returned as it is.
    """
    if isinstance(error, ZenPSError):
        return error
    failed = TensorError(f"{what}: {str(error) or repr(error)}")
    failed.__cause__ = error
    return failed
