"""Collectives of one tensor, for metrics and evaluation: allgather, broadcast and allreduce."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from zenps.errors import MismatchError, TensorError, UsageError, ZenPSError, listing

from ..core.pending import Pending
from ..core.request import Options, Purpose, Request, check_outside_graph, describe
from ..process import PROCESS
from .allgather import allgather_bytes, allgather_int
from .broadcast import naming_root
from .plain_data import as_tensor, check_size, pack_object, pack_reason, unpack_object
from .raw_bytes import as_bytes, check_dtype, check_strided, from_bytes

Op = Literal["average", "sum", "min", "max", "product"]

_COMBINED: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
"""The operations that servers do not know, by name: ranks gather, and combine two tensors at a time."""


def allgather(tensor: Tensor, name: str) -> Tensor:
    """Returns the tensors of all ranks, concatenated along dimension 0 in order of rank, bit for bit.

    Args:
        tensor: strided, on the CPU or a CUDA device: bool, uint8, int8, int16, int32, int64, float16,
            bfloat16, float32, float64, complex64 or complex128. Dimension 0 may differ between ranks, and may
            be 0; the others and the dtype may not. A tensor of no dimensions counts as one row.
        name: the same on all ranks, and in flight once at a time.

    Returns:
        A new tensor on the device of ``tensor``, which does not require a gradient. In an elastic job it
        lacks ranks that were lost meanwhile, on all ranks alike.

    Raises:
        TensorError: the tensor cannot be gathered; a sparse one, for example.
        MismatchError: ranks have other dtypes or shapes, or one of them cannot gather its tensor.
        DeadlineError, PeerLostError, UsageError: as :func:`zenps.push_pull`.
    """
    given, refused = "", None
    try:
        _check(tensor, name)
        tensor = tensor.detach()
        tensor = tensor if tensor.dim() else tensor.unsqueeze(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        given = f"rows of {dtype} {tuple(tensor.shape[1:])}, gathered"
    except TensorError as error:  # raised below, once the other ranks know
        refused = error
    prefix = f"allgather/{name}"
    parts = _gather(tensor, f"{prefix}/rows", prefix, given, refused)
    return torch.cat(parts).to(tensor.device)


def allgather_object(value: Any, name: str = "object") -> list[Any]:
    """Returns the values of all ranks, in order of rank.

    Args:
        value: plain data, as for :func:`zenps.broadcast_object`. Tuples arrive as lists.
        name: the same on all ranks, and in flight once at a time. If two calls run at the same time, on two
            threads, give each its own.

    Raises:
        UsageError: the value of a rank is not plain data, or takes more than 2 GiB: all ranks raise this. Or
            ``name`` is in flight, or not a name.
        ProtocolError: the received bytes are not a packed object.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    return allgather_made(lambda: value, name)


def allgather_made(make: Callable[[], Any], name: str) -> list[Any]:
    """Returns what ``make`` returns on each rank. If it raises on one, all ranks raise.

    Other arguments and errors are those of :func:`allgather_object`.
    """
    failed: Exception | None = None
    try:
        data = pack_object(make())
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failed, data = error, pack_reason(error)
    prefix = f"allgather_object/{name}"
    said = allgather_int(-len(data) if failed else len(data), f"{prefix}/bytes", Options(purpose="control"))
    sizes = {rank: abs(size) for rank, size in said.items()}
    check_size(max(sizes.values()))
    gathered = allgather_bytes(as_tensor(data), sizes, prefix)
    if failed is not None:
        raise failed
    parts = {rank: part.numpy().tobytes() for rank, part in gathered.items()}
    if without := [rank for rank in parts if said[rank] < 0]:
        reason = parts[without[0]].decode(errors="replace")
        raise UsageError(f"rank(s) {listing(without)} had nothing to gather: {reason}")
    return [unpack_object(part) for part in parts.values()]


def broadcast(tensor: Tensor, root_rank: int = 0, name: str = "tensor") -> Tensor:
    """Returns the root's tensor on every rank, bit for bit.

    :func:`zenps.broadcast_parameters` writes in place. Arguments and errors are those of
    :func:`broadcast_async`.

    Returns:
        A new tensor on the device of ``tensor``, which does not require a gradient.
    """
    with naming_root(name, root_rank):
        return broadcast_async(tensor, root_rank, name).wait()


def broadcast_async(tensor: Tensor, root_rank: int = 0, name: str = "tensor") -> Pending:
    """Begins to broadcast a tensor; the result comes from :func:`zenps.synchronize`.

    Args:
        tensor: strided, on the CPU or a CUDA device, of a dtype that :func:`allgather` takes; the same dtype
            and shape on all ranks. Only the root's values are read. It may be changed once this returns.
        root_rank: the rank whose values all ranks get.
        name: the same on all ranks, and in flight once at a time. If two broadcasts run at the same time,
            give each its own.

    Raises:
        TensorError: the tensor cannot be broadcast; a sparse one, for example.
        UsageError: there is no such rank, or ``name`` is in flight.
        MismatchError: ranks name different roots, or have other dtypes or shapes. Here and below:
            :func:`zenps.synchronize` raises it.
        DeadlineError: a rank or server did not answer in time.
        PeerLostError: the root was lost.
    """
    world, own = PROCESS.world, f"broadcast/{name}/tensor"
    try:
        _check(tensor, name)
        if root_rank not in range(world.full_size):
            raise UsageError(
                f"broadcast of {name!r}: root_rank {root_rank!r:.60}: expected 0 to {world.full_size - 1}"
            )
    except (TensorError, UsageError) as error:
        _push_refusal(own, error)
        raise
    dtype, shape, device = tensor.dtype, tensor.shape, tensor.device
    given = f"{describe(tensor)} from rank {root_rank}"
    options = Options(contributes=world.rank == root_rank, purpose="broadcast", given=given)
    pending = world.begin(Request(as_bytes(tensor), own, options))
    # A copy, because bytes that have just arrived need not be aligned for wider elements.
    pending.convert_result(lambda received: from_bytes(received.clone(), dtype, shape).to(device))
    return pending


def allreduce(tensor: Tensor, name: str, op: Op = "average") -> Tensor:
    """Returns the average, sum, minimum, maximum or product of a tensor over all ranks.

    Average and sum are :func:`zenps.push_pull`, which also takes sparse tensors. For the other operations,
    which are meant for metrics, each rank gets the tensors of all n ranks, n times the bytes, and combines
    them in order of rank.

    Args:
        tensor: as :func:`zenps.push_pull` takes it. For minimum, maximum and product as :func:`allgather`
            takes it, the same shape on all ranks; complex numbers have a product only.
        name: the same on all ranks, and in flight once at a time.
        op: ``average``, ``sum``, ``min``, ``max`` or ``product``. A NaN of any rank makes the result NaN, as
            in ``torch.minimum``. Of bool, ``max`` is a logical or, ``min`` and ``product`` a logical and.

    Returns:
        A new tensor on the same device, which does not require a gradient: of the same dtype, but float64 if
        integers or bool are averaged.

    Raises:
        TensorError: the tensor cannot be reduced.
        UsageError: there is no such ``op``, or ``name`` is in flight, or not a name.
        MismatchError: ranks have other dtypes or shapes, or name different operations, or one of them names
            an unknown operation or cannot reduce its tensor.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    if op not in ("average", "sum", *_COMBINED):
        error = UsageError(f"op {op!r:.60}: expected average, sum, min, max or product")
        _push_refusal(name, error, "value")
        raise error
    if op in ("average", "sum"):
        try:
            check_outside_graph(tensor, name)
            pending = PROCESS.world.begin(Request(tensor, name, Options(average=op == "average")))
        except TensorError as error:
            _push_refusal(name, error, "value")
            raise
        return pending.wait()
    given, refused = "", None
    try:
        _check(tensor, name)
        if tensor.is_complex() and op != "product":
            raise TensorError(f"tensor {name!r}: complex numbers have no {op}; reduce .real and .imag")
        given = f"{describe(tensor)} for its {op}"
    except TensorError as error:  # raised below, once the other ranks know
        refused = error
    row = tensor.detach().unsqueeze(0) if refused is None else tensor
    # Ranks that sum the tensor push it under its own name, and as the scheme pushes values: there the
    # difference is found. OmniReduce sends control in one piece, but values in streams of other names.
    parts = _gather(row, name, f"allreduce/{name}", given, refused, "value")
    return functools.reduce(_COMBINED[op], [part[0] for part in parts]).clone().to(tensor.device)


def _gather(
    tensor: Tensor,
    agreement: str,
    data: str,
    given: str,
    refused: TensorError | None,
    purpose: Purpose = "control",
) -> list[Tensor]:
    """Returns the tensors of all ranks on the CPU, which may differ in dimension 0.

    Args:
        agreement: the name of the round in which ranks compare what they have.
        data: the name of the round of the tensors themselves.
        given: a description of the tensor, about which ranks must agree.
        refused: why this rank's tensor cannot be gathered; None if it can.
        purpose: of the agreement.

    Raises:
        TensorError: ``refused``, once the other ranks know.
        MismatchError: ranks disagree.
    """
    counts: dict[int, int] = {}
    options = Options(purpose=purpose, given=given or "no tensor that can be gathered")
    try:
        counts = allgather_int(1 if refused else 1 + len(tensor), agreement, options)
    except MismatchError:
        if refused is None:
            raise
    if refused is not None:
        raise refused
    row, dtype = tensor.shape[1:], tensor.dtype
    row_bytes = row.numel() * dtype.itemsize
    sizes = {rank: (count - 1) * row_bytes for rank, count in counts.items()}
    parts = allgather_bytes(as_bytes(tensor), sizes, data)
    return [from_bytes(part, dtype, (counts[rank] - 1, *row)) for rank, part in parts.items()]


def _push_refusal(name: str, error: ZenPSError, purpose: Purpose = "broadcast") -> None:
    """Takes part in a round for which this rank has no tensor, so that the others learn it at once."""
    # With a full stop, because servers add to the description of a tensor whether it is summed or averaged.
    given = f"nothing: {error}"[:1024] + "."
    options = Options(contributes=False, purpose=purpose, given=given)
    with contextlib.suppress(MismatchError):
        PROCESS.world.begin(Request(torch.empty(0, dtype=torch.uint8, device="cpu"), name, options)).wait()


def _check(tensor: object, name: str) -> None:
    check_strided(tensor, f"tensor {name!r}")
    assert isinstance(tensor, Tensor)
    check_dtype(tensor, f"tensor {name!r}")
    check_outside_graph(tensor, name)
