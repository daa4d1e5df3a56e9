"""Agreement of all ranks on an optimizer's parameters: their names, sparse gradients and fused buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn import Parameter

from zenps.errors import MismatchError, UsageError, listing

from ...collectives.allgather import allgather_int
from ...collectives.broadcast import broadcast_object, from_first_present, named_pairs
from ...core.interrupts import MASK
from ...core.pending import Pending
from ...core.request import Request
from ...core.residuals import Residuals
from ...process import PROCESS, Prefix
from .buckets import Bucket, fuse

_ADVICE: Final = (
    "give all ranks parameters of the same names, and unfreeze the same ones before the same step"
)


class ParameterAgreement:
    """The parameters of one optimizer. All ranks construct it and call its methods at the same points.

    Args:
        prefix: of the rounds' names.
        own: this rank's parameters by name. All ranks take the order of the lowest rank. A joining worker
            does not ask the others: it calls :meth:`adopt` later.

    Attributes:
        names: the name of each parameter, in an order that is the same on all ranks.
        priorities: of each gradient. Forward needs the first layers first, so theirs are the highest.
        sparse: the parameters whose gradient is sparse, with the number of its sparse dimensions.
        bucket_of: the bucket of each parameter that is known to have a dense gradient.
        residuals: of the gradients. That of a bucket outlives a world while the bucket of its name has the
            same parameters.

    Raises:
        MismatchError: the ranks' parameters differ.
    """

    def __init__(self, prefix: Prefix, own: dict[str, Parameter]) -> None:
        self._prefix = prefix
        self._own = own
        names = list(own) if PROCESS.world.is_joining else self._agree_on_names(own)
        self._set_order(names)
        self.sparse: dict[Parameter, int] = {}
        self.bucket_of: dict[Parameter, Bucket] = {}
        self.residuals = Residuals()
        self._fused: dict[str, list[str]] = {}
        """The parameters' names of each bucket so far, in this world and earlier ones."""
        self._unknown = list(self.names)
        self._asked: Pending | None = None
        """A round about kinds whose wait Ctrl-C has interrupted. Other ranks have begun this one, and no
        other, so it is waited for again."""

    def add(self, parameters: dict[str, Parameter], step: int) -> None:
        """Adds parameters by name, after all others. All ranks add the same before the same ``step``.

        Raises:
            MismatchError: the ranks' parameters differ, or their steps.
        """
        names = self._agree_on_names(parameters, step)
        self._own = self._own | parameters
        self._set_order([*self.names.values(), *names])
        self._unknown += [parameters[name] for name in names]

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in an order that is the same on all ranks."""
        return list(dict.fromkeys(self.bucket_of.values()))

    @property
    def is_known(self) -> bool:
        """True if ranks have agreed on the kind of any gradient."""
        return bool(self.sparse or self.bucket_of)

    def agree_on_kinds(self, has_run_backward: bool) -> None:
        """Finds out which gradients of unknown kind are sparse on any rank; fuses the dense ones.

        A step of zeros without backward, which makes an optimizer's state, does not tell a gradient's kind.

        Raises:
            MismatchError: a gradient is dense on one rank and sparse on another, or sparse by another number
                of dimensions.
        """
        if not self._unknown:
            return
        counts = self._count_kinds(has_run_backward)
        asked, added = self._unknown[: len(counts)], self._unknown[len(counts) :]
        unknown, dense = [], []
        for parameter, (*ranks_by_kind, ranks_of_zeros) in zip(asked, counts, strict=True):
            match [kind for kind, ranks in enumerate(ranks_by_kind) if ranks]:
                case []:
                    unknown.append(parameter)
                    if ranks_of_zeros and parameter.grad is None:  # the average of zeros
                        parameter.grad = torch.zeros_like(parameter)
                case [0]:
                    dense.append(parameter)
                case [sparse_dim]:
                    self.sparse[parameter] = sparse_dim
                case kinds:
                    found = [f"{name_of(kind)} on {ranks_by_kind[kind]} rank(s)" for kind in kinds]
                    raise MismatchError(
                        f"gradient of {self.names[parameter]!r}: {listing(found)}; "
                        "use the same sparse=… on all ranks, and sparse=False for a table that is tied to a "
                        "dense layer"
                    )
        self._unknown = unknown + added
        # Backward computes the last layers' gradients first, so buckets are filled from the end.
        prefix, world = f"bucket{len(self.bucket_of)}", PROCESS.world
        run, sparsifies = world.quantized_run, world.sparsification is not None
        for bucket in fuse(prefix, reversed(dense), world.bucket_bytes, run, sparsifies):
            self._add_bucket(bucket)
        if added:  # since Ctrl-C has interrupted the round
            self.agree_on_kinds(has_run_backward)

    def _count_kinds(self, has_run_backward: bool) -> list[list[int]]:
        """Returns on how many ranks each gradient of unknown kind is of each kind; of a round that Ctrl-C has
        interrupted, those that it asked about.
        """
        if self._asked is None:
            # Column 0 counts ranks where a gradient is dense, column n those where n dimensions are sparse,
            # the last one those where it is zeros of no backward.
            columns = 2 + max(1, *(parameter.dim() for parameter in self.names))
            seen = torch.zeros((len(self._unknown), columns), dtype=torch.int64, device="cpu")
            for index, parameter in enumerate(self._unknown):
                if (gradient := parameter.grad) is not None:
                    tells = has_run_backward or gradient.layout != torch.strided or bool(gradient.any())
                    seen[index, (gradient.sparse_dim() if gradient.is_sparse else 0) if tells else -1] = 1
            with MASK:
                self._asked = PROCESS.world.begin(Request(seen, f"{self._prefix}:kinds"))
        try:
            counts: list[list[int]] = self._asked.wait().tolist()
        except Exception:
            self._asked = None
            raise
        self._asked = None
        return counts

    def reset(self) -> None:
        """Forgets kinds, in a new world: ranks may have left the last one while they agreed."""
        self._asked = None
        self.sparse, self.bucket_of, self._unknown = {}, {}, list(self.names)

    def adopt(
        self, root_rank: int, passes: int, uncounted: Iterable[Parameter]
    ) -> tuple[int, list[Parameter]]:
        """Replaces this agreement by the root's, between two steps.

        Args:
            passes: the most backward passes that any parameter had in a step on this rank.
            uncounted: the parameters whose passes this rank has not counted yet.

        Returns:
            the root's passes, and its uncounted parameters.

        Raises:
            MismatchError: the root's parameters differ from this rank's.
            PeerLostError: the root was lost.
        """
        agreed: dict[str, Any] = {
            "names": list(self.names.values()),
            "unknown": [self.names[parameter] for parameter in self._unknown],
            "sparse": {self.names[parameter]: sparse_dim for parameter, sparse_dim in self.sparse.items()},
            "buckets": [
                [bucket.name, [self.names[parameter] for parameter in bucket.parameters]]
                for bucket in self.buckets
            ],
            "passes": passes,
            "uncounted": [self.names[parameter] for parameter in uncounted],
        }
        agreed = broadcast_object(agreed, root_rank, f"{self._prefix}/agreed")
        own = self._own
        if differing := set(agreed["names"]) ^ own.keys():
            names = listing(sorted(differing))
            raise MismatchError(f"rank {root_rank} and this one differ in {names}; {_ADVICE}")
        self._set_order(agreed["names"])
        self._asked = None
        self._unknown = [own[name] for name in agreed["unknown"]]
        self.sparse = {own[name]: sparse_dim for name, sparse_dim in agreed["sparse"].items()}
        self.bucket_of, world = {}, PROCESS.world
        for bucket_name, names in agreed["buckets"]:
            parameters = [own[name] for name in names]
            self._add_bucket(
                Bucket(bucket_name, parameters, world.quantized_run, world.sparsification is not None)
            )
        return agreed["passes"], [own[name] for name in agreed["uncounted"]]

    def _add_bucket(self, bucket: Bucket) -> None:
        self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)
        names = [self.names[parameter] for parameter in bucket.parameters]
        if self._fused.get(bucket.name, names) != names:  # a residual has only the name of its bucket
            self.residuals.forget(bucket.name)
        self._fused[bucket.name] = names

    def _set_order(self, names: Sequence[str]) -> None:
        self.names = {self._own[name]: name for name in names}
        self.priorities = {parameter: -index for index, parameter in enumerate(self.names)}

    def _agree_on_names(self, own: dict[str, Parameter], step: int | None = None) -> list[str]:
        world = PROCESS.world
        # In an elastic job, ranks may know of different workers.
        roots = allgather_int(1, f"{self._prefix}:roots") if world.is_elastic else sorted(world.ranks)
        return from_first_present(roots, lambda root: self._compare_names(own, step, root))

    def _compare_names(self, own: dict[str, Parameter], step: int | None, root: int) -> list[str]:
        what = "parameters" if step is None else "new parameters"
        names: list[str]
        names, its_step = broadcast_object([list(own), step], root, name=f"{self._prefix}/{what}")
        differing = set(names) ^ own.keys()
        if others := allgather_int(bool(differing) or step != its_step, f"{self._prefix}:differing"):
            found = f"rank(s) {listing(others)} have other {what} than rank {root}"
            if differing:
                found += f"; rank {root} and this one differ in {listing(sorted(differing))}"
            if step != its_step:
                found += f"; rank {root} has them before its step {its_step}, this one before step {step}"
            raise MismatchError(f"{found}; {_ADVICE}")
        return names


def name_of(sparse_dim: int) -> str:
    """Returns the name of a kind of gradients; one that is dense has no sparse dimension."""
    return f"sparse by {sparse_dim} dimension(s)" if sparse_dim else "dense"


class ParameterNames:
    """The names of an optimizer's parameters, frozen ones and those that are added later included.

    Args:
        optimizer: whose parameters they are.
        named: the names. Without them, names are those that torch's optimizer was given, or positions.

    Raises:
        UsageError: ``named`` has no pairs, a parameter has no name, or two have the same name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None
    ) -> None:
        self._optimizer = optimizer
        self._named: dict[Parameter, str] = {}
        if named is not None:
            listed = named_pairs(named, "named_parameters", "model.named_parameters()")
            self._named = {parameter: name for name, parameter in listed}
            missing = sum(parameter not in self._named for parameter in self._trained())
            if missing:
                raise UsageError(
                    f"{missing} parameter(s) of the optimizer are not in named_parameters; pass "
                    "model.named_parameters() of the whole model"
                )

    def has_others(self, known: Container[Parameter]) -> bool:
        """Returns whether any parameter outside ``known`` needs gradients."""
        return any(
            parameter.requires_grad and parameter not in known
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        )

    def trained(self) -> dict[str, Parameter]:
        """Returns the parameters that need gradients at present, by name."""
        names = self._trained()
        if repeated := [name for name, times in Counter(names.values()).items() if times > 1]:
            raise UsageError(
                f"two parameters have the name {min(repeated)!r} in named_parameters; give each its own"
            )
        order = {parameter: index for index, parameter in enumerate(self._named)}
        return {
            names[parameter]: parameter
            for parameter in sorted(names, key=lambda parameter: order.get(parameter, len(order)))
        }

    def _trained(self) -> dict[Parameter, str]:
        return {
            parameter: self._named.get(parameter, name)
            for parameter, name in self._positions()
            if parameter.requires_grad
        }

    def _positions(self) -> Iterator[tuple[Parameter, str]]:
        """Returns all parameters with the names that they have in the optimizer's groups, or their
        positions.
        """
        position = 0
        for group in self._optimizer.param_groups:
            given = group.get("param_names")  # torch 2.6: optimizers take named parameters
            for index, parameter in enumerate(group["params"]):
                yield parameter, given[index] if given else f"parameter{position}"
                position += 1
