"""What ranks agree on of an optimizer's parameters: names, which gradients are sparse, how to fuse others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from zenps.errors import MismatchError, UsageError, listing

from ..core.request import Request
from ..process import PROCESS
from .ask import ask_all
from .broadcast import broadcast_object
from .buckets import Bucket, fuse


class Agreed:
    """The parameters of one optimizer. All ranks make it, and call its methods, at the same points.

    Args:
        prefix: of the rounds' names.
        own: this rank's parameters by name. Ranks may have been given them in different orders; that of the
            first goes for all. A joining worker would be alone with its question; it adopts what others have.

    Attributes:
        names: of all parameters, in the order of all ranks.
        priorities: of their gradients: those of the first layers, which forward needs first, are the highest.
        sparse: those whose gradient is.
        bucket_of: the others, once their gradients were seen.

    Raises:
        MismatchError: ranks have different parameters.
    """

    def __init__(self, prefix: str, own: dict[str, Parameter]) -> None:
        self._prefix = prefix
        self._own = own
        names = list(own) if PROCESS.world.is_joining else self._names_of_all()
        self._put_in_order(names)
        self.sparse: set[Parameter] = set()
        self.bucket_of: dict[Parameter, Bucket] = {}
        self._unknown = list(self.names)

    @property
    def buckets(self) -> list[Bucket]:
        """Each once, in the order of all ranks."""
        return list(dict.fromkeys(self.bucket_of.values()))

    def agree_on_kinds(self) -> None:
        """Asks all ranks how they see the gradients that were never seen before, and fuses the dense.

        Raises:
            MismatchError: a gradient is dense here and sparse there.
        """
        if not self._unknown:
            return
        seen = torch.zeros((len(self._unknown), 2), dtype=torch.int64, device="cpu")
        for index, parameter in enumerate(self._unknown):
            if parameter.grad is not None:
                seen[index, int(parameter.grad.is_sparse)] = 1
        counts = PROCESS.world.begin(Request(seen, f"{self._prefix}/kinds")).wait().tolist()
        unknown, dense = [], []
        for parameter, (as_dense, as_sparse) in zip(self._unknown, counts, strict=True):
            if as_dense and as_sparse:
                raise MismatchError(
                    f"gradient of {self.names[parameter]!r}: dense on {as_dense} rank(s), "
                    f"sparse on {as_sparse}; use the same sparse=… everywhere"
                )
            if as_sparse:
                self.sparse.add(parameter)
            elif as_dense:
                dense.append(parameter)
            else:
                unknown.append(parameter)
        self._unknown = unknown
        # Backward computes the last layers' gradients first, so buckets are filled from the end.
        prefix, world = f"{self._prefix}/bucket{len(self.bucket_of)}", PROCESS.world
        for bucket in fuse(prefix, reversed(dense), world.bucket_bytes, world.quantized_run):
            self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)

    def adopt(self, root_rank: int) -> None:
        """Takes over what the root has agreed on with others; between two steps.

        Raises:
            MismatchError: the root has other parameters.
            PeerLostError: the root is gone.
        """
        agreed: dict[str, Any] = {
            "names": list(self.names.values()),
            "unknown": [self.names[parameter] for parameter in self._unknown],
            "sparse": [name for parameter, name in self.names.items() if parameter in self.sparse],
            "buckets": [
                [bucket.name, [self.names[parameter] for parameter in bucket.parameters]]
                for bucket in self.buckets
            ],
        }
        agreed = broadcast_object(agreed, root_rank, f"{self._prefix}/agreed")
        own = self._own
        if differing := set(agreed["names"]) ^ own.keys():
            raise MismatchError(f"rank {root_rank} or this one alone has {listing(sorted(differing))}")
        self._put_in_order(agreed["names"])
        self._unknown = [own[name] for name in agreed["unknown"]]
        self.sparse = {own[name] for name in agreed["sparse"]}
        self.bucket_of = {}
        for bucket_name, names in agreed["buckets"]:
            bucket = Bucket(bucket_name, [own[name] for name in names], PROCESS.world.quantized_run)
            self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)

    def _put_in_order(self, names: Sequence[str]) -> None:
        self.names = {self._own[name]: name for name in names}
        self.priorities = {parameter: -place for place, parameter in enumerate(self.names)}

    def _names_of_all(self) -> list[str]:
        root = min(PROCESS.world.ranks)
        names: list[str] = broadcast_object(list(self._own), root, name=f"{self._prefix}/names")
        differing = set(names) ^ self._own.keys()
        if others := ask_all(len(differing), f"{self._prefix}/differing"):
            here = f"; rank {root} or this one alone has {listing(sorted(differing))}" if differing else ""
            raise MismatchError(f"rank(s) {listing(others)} have other parameters than rank {root}{here}")
        return names


def named(
    optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]] | None
) -> dict[str, Parameter]:
    """The optimizer's parameters that need gradients, by name; None: by their position.

    Raises:
        UsageError: one has no name, or two have the same.
    """
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if parameters is None:
        return {f"parameter{index}": parameter for index, parameter in enumerate(own)}
    wanted = set(own)
    pairs = [(name, parameter) for name, parameter in parameters if parameter in wanted]
    if len(dict(pairs)) < len(pairs):
        raise UsageError("two parameters have one name in named_parameters; give each its own")
    missing = len(wanted - {parameter for _, parameter in pairs})
    if missing:
        raise UsageError(f"{missing} parameter(s) of the optimizer are not in named_parameters")
    return dict(pairs)
