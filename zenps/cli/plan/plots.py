"""Plots of a plan, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from zenps.errors import ConfigError

from .planner import Plan


def check_plots(folder: Path) -> None:
    """Checks that plots can be written, and creates ``folder``.

    Raises:
        ConfigError: it cannot be created, or matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot", str(folder), "matplotlib to be installed: pip install matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--plot", str(folder), f"a folder that can be created ({error.strerror})") from None


def write_plots(plan: Plan, folder: Path) -> list[Path]:
    """Draws ``seconds.png`` by scheme, and ``densification.png`` and ``skewness.png`` by tensor."""
    seconds: dict[str, dict[int, float]] = {}
    for prediction in plan.predictions:
        seconds.setdefault(prediction.scheme, {})[prediction.workers] = prediction.seconds
    densification = {tensor.tensor: tensor.densification for tensor in plan.tensors}
    skewness = {tensor.tensor: tensor.skewness for tensor in plan.tensors}
    union, fullest = "rows of the union ÷ rows of one worker", "rows of the fullest ÷ mean"
    return [
        _write(folder / "seconds.png", "workers", "seconds a step", seconds),
        _write(folder / "densification.png", "workers", union, densification),
        _write(folder / "skewness.png", "contiguous ranges", fullest, skewness),
    ]


def _write(file: Path, x: str, y: str, curves: dict[str, dict[int, float]]) -> Path:
    from matplotlib.figure import Figure  # without pyplot, which looks for a display

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            axes.plot(list(points), list(points.values()), marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    if axes.lines:
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    return file
