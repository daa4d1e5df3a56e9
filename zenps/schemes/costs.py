"""Cost model: predicts the bytes on the busiest link, and the seconds, that a scheme takes to synchronise.

Each scheme states its own formula (:mod:`zenps.schemes.builtin`). The formulas are those of the papers, above
all of Zen (OSDI '25, §2.4 and §3), with the bytes that our codecs take. They leave out CPU time, and the
overlap with a step's computation. A prediction takes some microseconds. It has the same bits on every rank,
so ranks that decide by it decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from zenps.errors import UsageError

from .registry import scheme_of
from .traffic import Cost, Links, Tensor


def predict(scheme: str, tensor: Tensor, links: Links) -> Cost:
    """What ``tensor`` costs under the scheme of this name.

    Raises:
        ConfigError: there is no such scheme.
        UsageError: ``tensor`` is described for another number of workers than ``links`` has.
    """
    declared = scheme_of(scheme)
    if not tensor.is_sparse:
        return declared.dense_cost(tensor, links)
    if len(tensor.unions) != (links.workers - 1).bit_length():
        raise UsageError(
            f"{len(tensor.unions)} unions for {links.workers} workers; expected those of 2, 4, … and all: "
            f"{(links.workers - 1).bit_length()}"
        )
    return declared.cost(tensor, links)


def predict_step(scheme: str, tensors: Iterable[Tensor], links: Links) -> Cost:
    """What it costs to synchronise all of ``tensors``.

    A link carries the bytes of one tensor after those of another.

    Raises:
        ConfigError, UsageError: as :func:`predict`.
    """
    costs = [predict(scheme, tensor, links) for tensor in tensors]
    return links.cost(
        push=sum(cost.push_bytes for cost in costs),
        pull=sum(cost.pull_bytes for cost in costs),
        busiest=sum(cost.busiest_bytes for cost in costs),
        serial=sum(cost.serial_bytes for cost in costs),
        rounds=scheme_of(scheme).step_rounds([cost.rounds for cost in costs]),
        variant=", ".join(sorted({cost.variant for cost in costs} - {""})),
    )
