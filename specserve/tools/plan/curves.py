"""Draw panels of curves as PNG, SVG or PDF, by the name of the file.

The only module that knows matplotlib, which the extra `plots` installs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Curve:
    """Curve with its label. Curves with the same `colour` share it; None takes the next one."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes with their curves. `steps` draws whole numbers, which do not rise in between."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    steps: bool = False
    counts_across: bool = False  # only whole numbers on the axis below


def check_drawable(file: Path) -> None:
    """Raise ConfigError if the picture cannot be drawn, before any work is done for it."""
    if file.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"a plot is written as {', '.join(FORMATS)}, not {file.suffix or file.name!r}"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib; install it with: pip install 'specserve[plots]'"
        ) from error


def draw(panels: Sequence[Panel], file: Path) -> None:
    """Draw the panels side by side."""
    check_drawable(file)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(
        {
            "svg.hashsalt": "specserve",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
        }
    ):
        figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _draw_panel(axes, panel)
        with warnings.catch_warnings():
            # The place for a legend takes more than a second to find on a busy machine.
            warnings.filterwarnings("ignore", 'Creating legend with loc="best"')
            figure.savefig(
                file, dpi=100, metadata={"Date": None} if file.suffix.lower() == ".svg" else None
            )


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw the curves of a panel, its labels and its legend."""
    from matplotlib.ticker import MaxNLocator

    for curve in panel.curves:
        colour = None if curve.colour is None else f"C{curve.colour}"
        style = "--" if curve.dashed else "-"
        axes.plot(
            curve.xs,
            curve.ys,
            style,
            label=curve.name,
            color=colour,
            drawstyle="steps-post" if panel.steps else "default",
        )
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.steps:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.counts_across:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small", frameon=False)
