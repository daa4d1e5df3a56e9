"""Broadcast from one rank to all: parameters, optimizer state, plain objects.

A broadcast is a round to which only the root contributes: every rank gets the root's bytes unchanged,
whatever their dtype.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from zenps.errors import MismatchError, PeerLostError, TensorError, UsageError, ZenPSError, listing

from ..core.pending import Pending
from ..core.request import Options, Request
from ..encode.dense import RootLostError
from ..process import PROCESS
from .allgather import allgather_int
from .loading import load_uncast
from .plain_data import as_tensor, check_size, pack_object, pack_reason, unpack_object
from .raw_bytes import DTYPES, as_bytes, check_strided, expanded_dimensions, from_bytes
from .stale_optimizers import StaleOptimizer, drain_owners, parameters_of, raise_any

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

T = TypeVar("T")

# A learning-rate scheduler may have its milestones in a Counter.
DICTS: Final[dict[str, type[dict[Any, Any]]]] = {"Counter": Counter, "OrderedDict": OrderedDict}


def broadcast_parameters(parameters: Named, root_rank: int = 0) -> None:
    """Overwrites every rank's tensors with the root's, in place and bit for bit.

    With ``sync.consistency = ssp``, :class:`DistributedOptimizer` first drains, if some are its parameters;
    averages that have failed are left out, with a warning.

    Args:
        parameters: a ``state_dict()`` or named tensors, the same names and shapes on all ranks; any
            dtype, strided, on any device.
        root_rank: the rank whose values all ranks get.

    Raises:
        TensorError: a value is not a strided tensor, such as a module's extra state, or cannot be written.
        UsageError: there is no such rank, two tensors have the same name, tensors have no names, or with
            ``ssp`` a rank calls it between backward and ``step()``.
        MismatchError: names, shapes or dtypes differ between ranks, or ranks name different roots.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    where = "broadcast_parameters"
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    named = by_name(named_pairs(items, where, "model.state_dict()"), where)
    check_alike(named, root_rank, drain_owners(named.values()))
    with naming_root("parameters", root_rank):
        _overwrite(named, root_rank)


def from_first_present(roots: Iterable[int], receive: Callable[[int], T]) -> T:
    """Returns what ``receive`` returns for the first root that is not lost meanwhile.

    Args:
        roots: the ranks to try in turn; the same on all ranks.
        receive: broadcasts from the root that it is given.

    Raises:
        PeerLostError: all roots were lost.
    """
    for root in roots:
        with contextlib.suppress(RootLostError):
            return receive(root)
    raise PeerLostError(
        "all workers that could be the root of a broadcast were lost; start the job again, from a checkpoint"
    )


@contextlib.contextmanager
def naming_root(name: str, root_rank: int) -> Iterator[None]:
    """Context of a broadcast in which the error for a root that is gone names it, and the present ranks."""
    try:
        yield
    except RootLostError:
        # The view that this rank has may be from before the loss.
        present = listing(rank for rank in PROCESS.world.ranks if rank != root_rank)
        raise RootLostError(
            f"broadcast of {name!r}: root {root_rank} is not in the job; present: {present}; "
            "pass one of these as root_rank"
        ) from None


def named_pairs(items: object, where: str, such_as: str) -> list[tuple[Any, Any]]:
    """Returns named tensors as a list. Callers need not be type-checked.

    Args:
        where: the function to which they were given, for errors.
        such_as: an example of named tensors, for errors.

    Raises:
        UsageError: they are not pairs of a name and a tensor, as those of ``model.parameters()``.
    """
    listed: list[Any] = list(items) if isinstance(items, Iterable) else [items]
    for each in listed:
        # Without this check, a tensor of two rows would be unpacked as a pair.
        if not (isinstance(each, tuple | list) and len(each) == 2):
            raise UsageError(
                f"{where}: expected pairs of a name and a tensor, such as {such_as}, got "
                f"{type(each).__name__} instead of a pair"
            )
    return listed


def by_name(pairs: Iterable[tuple[str, Tensor]], where: str) -> dict[str, Tensor]:
    """Returns named tensors as a dict. A tensor may come twice under the same name.

    Raises:
        UsageError: two tensors have the same name.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if named.setdefault(name, tensor) is not tensor:
            raise UsageError(
                f"{where}: two tensors have the name {name!r}; give each its own, such as by a prefix"
            )
    return named


def check_alike(named: Mapping[str, Tensor], root_rank: int, refused: ZenPSError | None = None) -> None:
    """Checks that all ranks have tensors of the same names, shapes and dtypes, which can be written.

    Why this rank cannot take part, ``refused``, is raised once the other ranks know.

    Raises:
        MismatchError, TensorError, UsageError, PeerLostError: as :func:`broadcast_parameters`.
    """
    own = {}
    for name, tensor in named.items():
        try:
            _check(tensor, f"broadcast/{name}")
            own[name] = _describe(tensor)
        except TensorError as error:
            own[name], refused = "not a tensor that can be broadcast", refused or error
    roots: dict[str, str] = broadcast_object(own, root_rank, "parameters")
    differing = [name for name in own.keys() | roots.keys() if own.get(name) != roots.get(name)]
    others = allgather_int(len(differing) + (refused is not None), "broadcast/parameters/differing")
    raise_any(refused)
    if others:
        name = min(differing, default="")
        here = f"; {name!r} is {roots.get(name, 'missing')} there and {own.get(name, 'missing')} here"
        unlike = [rank for rank in others if rank != root_rank] or [root_rank]  # it alone may be refused
        found = f"rank(s) {listing(unlike)} have other parameters than rank {root_rank}"
        advice = "see errors there, or give all ranks the same names, shapes and dtypes"
        raise MismatchError(f"{found}{here if differing else ''}; {advice}")


def _describe(tensor: Tensor) -> str:
    """Returns the description that must be equal on all ranks."""
    expanded = expanded_dimensions(tensor)
    memory = f" expanded in dimension(s) {listing(expanded)}" if expanded else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{memory}"


def _overwrite(named: Mapping[str, Tensor], root_rank: int) -> None:
    pending = []
    for name, tensor in named.items():
        for dim in expanded_dimensions(tensor):
            tensor = tensor.select(dim, 0).unsqueeze(dim)  # the memory itself, which can be written
        pending.append((tensor, _begin(tensor, f"broadcast/{name}", root_rank)))
    lost: RootLostError | None = None
    with torch.no_grad():
        for tensor, handle in pending:
            try:
                result = handle.wait()
            except RootLostError as error:  # wait for the others too: nothing may stay in flight
                lost = error
                continue
            tensor.copy_(from_bytes(result, tensor.dtype, tensor.shape))
    if lost is not None:
        raise lost


def broadcast_object(value: Any, root_rank: int = 0, name: str = "object") -> Any:
    """Returns the root's ``value`` on every rank.

    Args:
        value: plain data: None, bool, int of 64 bits, float, str, bytes, and lists and dicts of them, whose
            keys are not tuples. Tuples arrive as lists. Only the root's value is read.
        root_rank: the rank whose value all ranks get.
        name: the same on all ranks, and in flight once at a time. If two broadcasts run at the same time,
            give each its own.

    Raises:
        UsageError: there is no such rank, or the root's value is not plain data (nothing is pickled), or it
            takes more than 2 GiB.
        MismatchError: ranks name different roots.
        ProtocolError: the received bytes are not a packed object.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    return broadcast_made(lambda: value, root_rank, name)


def broadcast_made(make: Callable[[], Any], root_rank: int, name: str) -> Any:
    """Returns on every rank what ``make`` returns on the root. If it raises there, all ranks raise.

    Other arguments and errors are those of :func:`broadcast_object`.
    """
    data, failed = b"", None
    if PROCESS.world.rank == root_rank:
        try:
            data = pack_object(make())
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            failed, data = error, pack_reason(error)
    with naming_root(name, root_rank):
        size = _agree(root_rank, -len(data) if failed else len(data), name)
        check_size(abs(size))
        packed = as_tensor(data) if data else torch.zeros(abs(size), dtype=torch.uint8, device="cpu")
        received = _begin(packed, f"broadcast/{name}/data", root_rank).wait().numpy().tobytes()
    if size < 0:
        raise failed or UsageError(
            f"rank {root_rank} had nothing to broadcast: {received.decode(errors='replace')}"
        )
    return unpack_object(received)


def _agree(root_rank: int, size: int, name: str) -> int:
    """Returns the root's ``size``, once all ranks have named the same root.

    Raises:
        MismatchError: they have not.
        UsageError: there is no such rank.
        RootLostError: the root was lost.
    """
    world = PROCESS.world
    is_root = bool(world.rank == root_rank)  # NumPy's integers compare to its own bool
    # A lost root is reported by the round, because ranks may learn of the loss at different times.
    named = int(root_rank) if root_rank in range(world.full_size) else -1
    said = torch.tensor([1, is_root, named, named**2, size if is_root else 0], device="cpu")
    summed = world.begin(Request(said, f"broadcast/{name}/root", Options(purpose="control"))).wait()
    ranks, roots, sum_named, sum_squares, size = summed.tolist()
    if ranks * sum_squares != sum_named**2:  # only equal numbers have no variance
        raise MismatchError(
            f"broadcast of {name!r}: ranks name different roots, expected the same root_rank on all; "
            f"it is {root_rank} on rank {world.rank}"
        )
    if named < 0:
        raise UsageError(f"root_rank {root_rank!r:.60}: expected 0 to {world.full_size - 1}")
    if not roots:
        raise RootLostError
    return int(size)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Makes every rank's optimizer equal to the root's: hyperparameters and state, bit for bit.

    All ranks, the root too, load the state by ``optimizer.load_state_dict``, whose hooks run on all. On the
    root, tensors stay the same unless they are expanded. Dtypes are kept, although torch would cast them to
    those of the parameters. Strides are also kept, because fused optimizers expect those of the parameters.

    A :class:`DistributedOptimizer` first drains, as in :func:`broadcast_parameters`. After one rank alone has
    thrown a step away, it counts steps alike again.

    Args:
        optimizer: over the same parameters on all ranks. Its state may be empty on any of them.
        root_rank: the rank whose state all ranks get.

    Raises:
        UsageError: there is no such rank, the root's state holds a value that is neither a tensor nor plain
            data, or with ``ssp`` a rank calls it between backward and ``step()``.
        MismatchError: ranks name different roots.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    refused = drain_owners(parameters_of(optimizer))

    def state() -> dict[str, Any]:
        raise_any(refused)
        return optimizer.state_dict()

    made = broadcast_state(state, root_rank, "optimizer")
    raise_any(refused)
    load_uncast(
        optimizer, made
    )  # also on the root: an optimizer or its hooks may change a state that they load
    if isinstance(optimizer, StaleOptimizer):
        optimizer.reset_counts()


def broadcast_state(make: Callable[[], Any], root_rank: int, name: str) -> Any:
    """Returns on every rank what ``make`` returns on the root: plain data, tuples, Counters, OrderedDicts and
    tensors.

    Args:
        make: called on the root only.
        root_rank: the rank whose state all ranks get.
        name: distinguishes broadcasts that run at the same time.

    Raises:
        UsageError, MismatchError: as :func:`broadcast_optimizer_state`.
    """
    tensors: list[Tensor] = []

    def take_apart() -> Any:
        skeleton = _take_apart(make(), tensors)
        for tensor in tensors:
            if str(tensor.dtype) not in DTYPES:
                raise UsageError(f"{name} state: got {tensor.dtype}, expected one of {', '.join(DTYPES)}")
        # Not expanded, as the other ranks will have them.
        tensors[:] = [_without_gaps(tensor) for tensor in tensors]
        described = [[str(tensor.dtype), list(tensor.shape), list(tensor.stride())] for tensor in tensors]
        return [skeleton, described]

    skeleton, described = broadcast_made(take_apart, root_rank, name)
    if PROCESS.world.rank != root_rank:
        tensors = [
            torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device="cpu")
            for dtype, shape, strides in described
        ]
    with naming_root(name, root_rank):
        _overwrite({f"{name}/{i}": tensor for i, tensor in enumerate(tensors)}, root_rank)
    return _put_together(skeleton, tensors)


def _without_gaps(tensor: Tensor) -> Tensor:
    """Returns the tensor with its elements in the same order, not overlapping and without gaps."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return tensor if tensor.stride() == strides else tensor.clone(memory_format=torch.preserve_format)


def _begin(tensor: Tensor, name: str, root_rank: int) -> Pending:
    world = PROCESS.world
    options = Options(contributes=world.rank == root_rank, purpose="broadcast")
    return world.begin(Request(as_bytes(tensor), name, options))


def _check(tensor: object, name: str) -> None:
    check_strided(tensor, name)
    assert isinstance(tensor, Tensor)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise TensorError(f"{name}: made under torch.inference_mode(), so it cannot be written; clone it")


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Returns ``value`` as plain data and moves its tensors into ``tensors``.

    Raises:
        UsageError: a value would arrive as another class: a namedtuple, or a dict that is none of ``DICTS``.
    """
    match value:
        case Tensor() if value.is_sparse:
            tensors += value._indices(), value._values()
            return {"__sparse__": [len(tensors) - 2, list(value.shape), value.is_coalesced()]}
        case Tensor():
            tensors.append(value)
            return {"__tensor__": len(tensors) - 1}
        case dict():
            kind = type(value)
            items = {key: _take_apart(item, tensors) for key, item in value.items()}
            if kind is dict:
                return items
            if DICTS.get(kind.__name__) is not kind:
                raise UsageError(f"state {value!r:.60}: would arrive as a dict; pass a dict of it")
            return {"__dict__": [kind.__name__, items]}
        case tuple() if hasattr(value, "_fields"):
            raise UsageError(
                f"state {value!r:.60}: would arrive as a tuple; pass its _asdict(), or a tuple of it"
            )
        case tuple():
            return {"__tuple__": [_take_apart(item, tensors) for item in value]}
        case list():
            return [_take_apart(item, tensors) for item in value]
        case _:
            return value


def _put_together(value: Any, tensors: list[Tensor]) -> Any:
    match value:
        case {"__tensor__": int(index)}:
            return tensors[index]
        case {"__sparse__": [int(index), list(shape), bool(is_coalesced)]}:
            indices, values = tensors[index : index + 2]
            return torch.sparse_coo_tensor(
                indices,
                values,
                shape,
                device=values.device,
                is_coalesced=is_coalesced,
                check_invariants=False,
            )
        case {"__dict__": [str(kind), dict(items)]} if kind in DICTS:
            return DICTS[kind](_put_together(items, tensors))
        case {"__tuple__": list(items)}:
            return tuple(_put_together(item, tensors) for item in items)
        case dict():
            return {key: _put_together(item, tensors) for key, item in value.items()}
        case list():
            return [_put_together(item, tensors) for item in value]
        case _:
            return value
