"""Scheme selection: compares the predicted costs of all schemes, recommends one, and gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Final

from msgspec import Struct, structs

from zenps.config.settings import Config
from zenps.errors import listing
from zenps.schemes.base import Scheme
from zenps.schemes.costs import predict_step
from zenps.schemes.registry import fixed_schemes, scheme_of
from zenps.schemes.traffic import Cost, Links

from .profile import GRANULES, Profile
from .sparsified import sparsifier_savings
from .units import show_bytes, show_seconds

_USUAL: Final = Config()

DEFAULT: Final = _USUAL.sync.scheme
"""Recommended unless another scheme wins by :data:`MARGIN`."""

MARGIN: Final = 1.05
"""The factor is above 1 because the formulas leave out CPU time and extrapolate unions."""

MAX_WORKERS: Final = 1024
DOUBLINGS: Final = tuple(1 << level for level in range(1, MAX_WORKERS.bit_length()))


class TensorSummary(Struct, kw_only=True):
    """A line of the first table. A ratio is None if the trace does not tell it."""

    tensor: str
    rows: int
    columns: int
    item_bytes: int
    is_sparse: bool
    density: float
    """Of a dense tensor, the share of elements that are not zero."""
    overlap: float | None = None
    step_overlap: float | None = None
    densification: dict[int, float] = {}
    skewness: dict[int, float] = {}
    imbalance: float | None = None


class Prediction(Struct, kw_only=True):
    """The cost of synchronising all tensors in one step under one scheme."""

    workers: int
    scheme: str
    seconds: float
    push_bytes: float
    pull_bytes: float
    rounds: int
    variant: str


class Plan(Struct, kw_only=True):
    """The recommendation of ``zenps plan``, as ``--json`` prints it."""

    workers: int
    servers: int
    bytes_per_second: float
    latency_seconds: float
    tensors: list[TensorSummary]
    predictions: list[Prediction]
    scheme: str
    granule: int | None
    """``sync.granule``; None if no sparse tensor has single elements for rows."""
    reason: str
    notes: list[str]


def make_plan(
    found: Sequence[Profile],
    links: Links,
    counts: Sequence[int],
    rare: Sequence[str] = (),
    ruled_out: Mapping[str, str] = MappingProxyType({}),
    config: Config = _USUAL,
) -> Plan:
    """Predicts the cost of each scheme, and recommends one.

    Args:
        found: the tensors.
        links: the cluster; the recommendation is for its number of workers.
        counts: the numbers of workers for which the plan lists predictions.
        rare: names of tensors that are left out.
        ruled_out: schemes that the plan lists but does not recommend, each with the setting that excludes it.
        config: the settings, for the notes.
    """
    by_count = {count: _costs(found, links, count) for count in sorted({links.workers, *counts, *DOUBLINGS})}
    possible = {
        count: {scheme: cost for scheme, cost in costs.items() if scheme not in ruled_out}
        for count, costs in by_count.items()
    }
    choice = _choose(possible[links.workers])
    tensors = [_summary(profile, links) for profile in found]
    granules = [granule for profile in found if (granule := profile.granule(links.parts)) is not None]
    if not granules and any(profile.has_elements for profile in found):
        granules = [GRANULES[0]]  # all are too small for nearly even shares
    granule = min(granules, default=None)
    predictions = [
        Prediction(
            workers=count,
            scheme=scheme,
            seconds=cost.seconds,
            push_bytes=cost.push_bytes,
            pull_bytes=cost.pull_bytes,
            rounds=cost.rounds,
            variant=cost.variant,
        )
        for count in counts
        for scheme, cost in by_count[count].items()
    ]
    return Plan(
        workers=links.workers,
        servers=links.servers,
        bytes_per_second=links.bytes_per_second,
        latency_seconds=links.latency_seconds,
        tensors=tensors,
        predictions=predictions,
        scheme=choice,
        granule=granule,
        reason=" ".join(_reasons(found, links, possible, choice, granule)),
        notes=_notes(found, links.workers, rare, ruled_out, config),
    )


def _costs(found: Sequence[Profile], links: Links, workers: int) -> dict[str, Cost]:
    links = structs.replace(links, workers=workers)
    used = {scheme.name: _used(scheme, links) for scheme in fixed_schemes()}
    tensors = {each: [profile.as_tensor(each) for profile in found] for each in {*used.values()}}
    return {scheme: predict_step(scheme, tensors[each], each) for scheme, each in used.items()}


def _used(scheme: Scheme, links: Links) -> Links:
    """The part of the cluster that a scheme uses: among workers, no servers."""
    return structs.replace(links, servers=0) if scheme.engine == "peers" else links


def _choose(costs: dict[str, Cost]) -> str:
    fastest = min(costs, key=lambda name: costs[name].seconds)
    return DEFAULT if costs[DEFAULT].seconds <= MARGIN * costs[fastest].seconds else fastest


# ── why ─────────────────────────────────────────────────────────────────────────────────────────


def _reasons(
    found: Sequence[Profile],
    links: Links,
    by_count: dict[int, dict[str, Cost]],
    choice: str,
    granule: int | None,
) -> list[str]:
    costs = by_count[links.workers]
    own = costs[choice]
    said = [f"{choice} for {links.workers} workers: {show_seconds(own.seconds)} a step."]
    if not own.seconds:
        return [*said, "There is nothing to send."]
    said.append(_what_decides(found, links, choice, own))
    others = sorted((scheme for scheme in costs if scheme != choice), key=lambda name: costs[name].seconds)
    next_best = others[0]
    ratio = costs[next_best].seconds / own.seconds
    if f"{ratio:.2f}" == "1.00":
        said.append(f"Next is {next_best}, which is equally fast.")
    elif ratio < 1:  # the scheme's ``spends`` is not a reason then
        said.append(f"Next is {next_best}, which would take {ratio:.2f} of that time.")
        said.append(f"{choice} is recommended unless another scheme wins by {MARGIN - 1:.0%}.")
    else:
        why = scheme_of(next_best).spends
        said.append(f"Next is {next_best}, which takes {ratio:.2f} times as long: {why}.")
    said.append(_where_it_changes(by_count))
    if granule is not None:
        runs = f"Elements are partitioned in runs of {granule} (sync.granule)"
        said.append(f"{runs}, for even shares of all servers.")
    return said


def _what_decides(found: Sequence[Profile], links: Links, choice: str, cost: Cost) -> str:
    waiting = cost.rounds * links.latency_seconds
    over_servers = scheme_of(choice).engine != "peers"
    moved = (
        f"{show_bytes(cost.push_bytes)} pushed and {show_bytes(cost.pull_bytes)} pulled"
        if over_servers
        else f"{show_bytes(cost.busiest_bytes)} sent"
    )
    sent = f"{moved} on the busiest link"
    if waiting > cost.seconds / 2:
        return f"Latency decides: {cost.rounds} rounds of {show_seconds(links.latency_seconds)}, and {sent}."
    used = _used(scheme_of(choice), links)
    by_tensor = [predict_step(choice, [profile.as_tensor(used)], used).serial_bytes for profile in found]
    share, largest = max(zip(by_tensor, range(len(found)), strict=True))
    heaviest = found[largest]
    share /= sum(by_tensor)
    of = f"{share:.0%} of the bytes are those of {heaviest.tensor!r}"
    if not heaviest.is_sparse:
        return f"Bytes decide: {sent}. {of}, which is dense and travels whole under every scheme."
    grows = (
        f"one worker pushes {heaviest.density:.2%} of its {heaviest.rows} rows, and the union of all workers "
        f"has {heaviest.densification(links.workers):.1f} times as many"
    )
    heavier = "pulls" if cost.pull_bytes > cost.push_bytes else "pushes"
    which = f"Most of the time goes into {heavier}" if over_servers else "Bytes decide"
    return f"{which}: {sent}. {of}: {grows}."


def _where_it_changes(by_count: dict[int, dict[str, Cost]]) -> str:
    told: list[str] = []
    for choice, counts in groupby(sorted(by_count), key=lambda count: _choose(by_count[count])):
        first, *others = counts
        numbers = f"{first} to {others[-1]}" if others else f"{first}"
        told.append(f"{choice} for {numbers}" if told else f"{choice} is recommended for {numbers} workers")
    return f"{', '.join(told)}."


def _notes(
    found: Sequence[Profile],
    workers: int,
    rare: Sequence[str],
    ruled_out: Mapping[str, str],
    config: Config,
) -> list[str]:
    notes = []
    sync, least_bytes = config.sync, config.sparsifier.least_bytes
    whole_bytes, sparsified = sparsifier_savings(found, workers, sync.density, least_bytes)
    if sync.values != "same":
        notes.append(f"sync.values = {sync.values!r} is not counted: values count as gradients have them")
    if sync.sparsifier != "none":
        notes.append(f"sync.sparsifier = {sync.sparsifier!r} is not counted: dense gradients count whole")
    elif whole_bytes:
        others = ", ".join(f"{show_bytes(moved)} with {name}" for name, moved in sparsified.items())
        notes.append(
            f"of large dense gradients each worker pushes and pulls {show_bytes(whole_bytes)} a step; "
            f"sync.sparsifier would reduce that to {others} at a density of {sync.density:g} "
            "(docs/sparsifiers.md)"
        )
    for profile in found:
        name = repr(profile.tensor)
        if not profile.is_sparse and profile.density < 0.5 and profile.rows > 1 << 16:
            notes.append(
                f"{name} is dense, but {1 - profile.density:.0%} of its elements are zero: is there an "
                "embedding without sparse=True?"
            )
        both = (profile.overlap, profile.step_overlap)
        if profile.is_sparse and max(both) > 1.25 * min(both):
            notes.append(
                f"{name}: a worker's steps overlap by {profile.step_overlap:.2f}, workers by "
                f"{profile.overlap:.2f}; steps stand in for workers beyond {profile.workers}, whose "
                f"unions may be {'larger' if profile.overlap < profile.step_overlap else 'smaller'}"
            )
    if all(profile.workers == 1 for profile in found):
        notes.append("only one worker was recorded; its steps stand in for other workers")
    if rare:
        notes.append(f"pushed in fewer than half of the steps: {listing(rare)}")
    for setting in dict.fromkeys(ruled_out.values()):
        schemes = [scheme for scheme, against in ruled_out.items() if against == setting]
        notes.append(f"{setting} rules out {listing(schemes)}")
    return notes


def _summary(profile: Profile, links: Links) -> TensorSummary:
    summary = TensorSummary(
        tensor=profile.tensor,
        rows=profile.rows,
        columns=profile.columns,
        item_bytes=profile.item_bytes,
        is_sparse=profile.is_sparse,
        density=profile.density,
    )
    if profile.is_sparse:
        summary.overlap = None if math.isnan(profile.overlap) else profile.overlap
        summary.step_overlap = None if math.isnan(profile.step_overlap) else profile.step_overlap
        summary.densification = {count: profile.densification(count) for count in DOUBLINGS}
        summary.skewness = {parts: profile.skew(parts) for parts in DOUBLINGS}
        summary.imbalance = profile.as_tensor(links).union_imbalance
    return summary
