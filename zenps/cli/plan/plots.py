"""Plots of a plan, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zenps.errors import ConfigError

from .planner import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    return [
        _write(folder / "seconds.png", "workers", "seconds a step", lambda axes: _seconds(plan, axes)),
        _write(
            folder / "densification.png", "workers", "rows of the union ÷ rows of one worker",
            lambda axes: _curves({t.tensor: t.densification for t in plan.tensors}, axes),
        ),
        _write(
            folder / "skewness.png", "contiguous ranges", "rows of the fullest ÷ mean",
            lambda axes: _curves({t.tensor: t.skewness for t in plan.tensors}, axes),
        ),
    ]  # fmt: skip


def _seconds(plan: Plan, axes: Axes) -> None:
    curves: dict[str, dict[int, float]] = {}
    for prediction in plan.predictions:
        curves.setdefault(prediction.scheme, {})[prediction.workers] = prediction.seconds
    _curves(curves, axes)


def _curves(curves: dict[str, dict[int, float]], axes: Axes) -> None:
    for name, points in curves.items():
        if points:
            axes.plot(list(points), list(points.values()), marker=".", label=name)


def _write(file: Path, x: str, y: str, draw: Callable[[Axes], None]) -> Path:
    from matplotlib.figure import Figure  # without pyplot, which looks for a display

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    if axes.lines:
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    return file
