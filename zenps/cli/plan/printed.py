"""Tables of a plan, for the terminal."""

from __future__ import annotations

import textwrap

from rich.text import Text

from ..printing import make_table, print_wide, printable
from .planner import Plan, TensorSummary
from .units import show_bytes, show_seconds

TEXT_COLUMNS = 100
"""The width of a paragraph."""

_COLUMNS = (
    "tensor",
    "rows",
    "columns",
    "pushed",
    "overlap",
    "γ 2",
    "γ 8",
    "γ 64",
    "γ 1024",
    "skew 8",
    "skew 128",
)


def show_plan(plan: Plan) -> None:
    """Prints the tensors, the seconds of a step under each scheme, and the recommendation."""
    tensors = make_table(*_COLUMNS, numbers=_COLUMNS[1:])
    for tensor in plan.tensors:
        tensors.add_row(Text(printable(tensor.tensor)), *_tensor_row(tensor))
    schemes = list(dict.fromkeys(prediction.scheme for prediction in plan.predictions))
    costs = make_table("scheme")
    seconds = {(p.scheme, p.workers): p.seconds for p in plan.predictions}
    counts = list(dict.fromkeys(p.workers for p in plan.predictions))
    for workers in counts:
        costs.add_column(f"n = {workers}", no_wrap=True, justify="right")
    for scheme in schemes:
        cells = []
        for workers in counts:
            is_best = seconds[scheme, workers] == min(seconds[other, workers] for other in schemes)
            cells.append(Text(show_seconds(seconds[scheme, workers]), "bold green" if is_best else ""))
        costs.add_row(scheme, *cells)
    where = (
        f"{plan.servers} servers on hosts of their own" if plan.servers else "a server on each worker's host"
    )
    latency = show_seconds(plan.latency_seconds)
    network = f"{show_bytes(plan.bytes_per_second)}/s each way, {latency} a message, {where}"
    print_wide(tensors)
    print_wide(Text(f"\nA step's synchronisation: {network}"))
    print_wide(costs)
    print_wide(Text(f"\n{textwrap.fill(printable(plan.reason), TEXT_COLUMNS)}"))
    for note in plan.notes:
        print_wide(Text(textwrap.fill(f"note: {printable(note)}", TEXT_COLUMNS), "yellow"))


def _tensor_row(tensor: TensorSummary) -> list[str]:
    if not tensor.is_sparse:
        return [str(tensor.rows), "1", "dense", *[""] * (len(_COLUMNS) - 4)]
    return [
        str(tensor.rows),
        str(tensor.columns),
        f"{tensor.density:.3%}",
        "" if tensor.overlap is None else f"{tensor.overlap:.2f}",
        *(f"{tensor.densification[count]:.3g}" for count in (2, 8, 64, 1024)),
        *(f"{tensor.skewness[parts]:.3g}" for parts in (8, 128)),
    ]
