"""Score against activated ratio (the paper's Table H as a curve), with its controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moh.reporting.cells import number, spread
from moh.reporting.comparison import title_of
from moh.reporting.results import RowResult, Score, State
from moh.reporting.spec import ColumnSpec, RowSpec, TableDefinition
from moh.reporting.style import INK, MUTED, OTHER, look, new_figure


@dataclass(frozen=True)
class _Series:
    """A line of the figure: one way to choose or weight the heads."""

    label: str
    colour: str
    marker: str


_SERIES = {
    "": _Series("MoH", "#0072b2", "o"),
    "random": _Series("random heads", "#d55e00", "s"),
    "fixed": _Series("fixed heads", "#009e73", "^"),
    "paper": _Series("paper's gates", "#aa4499", "D"),
}


@dataclass(frozen=True)
class _Point:
    x: float
    row: RowSpec
    score: Score
    state: State


def score_column(definition: TableDefinition) -> ColumnSpec | None:
    """The metric that the table compares first."""
    return next((column for column in definition.spec.columns if column.gap), None)


def sweep_figure(definition: TableDefinition, results: Mapping[str, RowResult]) -> Figure | None:
    """Score against what the sweep varies, MHA as a level line, each control as a line of its own.

    Bars and the MHA band are one standard deviation over seeds, where there are two seeds or more;
    hollow points off the curves are no full runs of the protocol. Squares are the paper's values.
    None without any MoH point.
    """
    column = score_column(definition)
    if column is None:
        return None
    shares = definition.spec.sweep is not None and bool(definition.spec.sweep.shares)
    measured = "shared_share" if shares else "activated_ratio"
    points, baselines = [], []
    for row in definition.spec.rows:
        result, score = results[row.id], results[row.id].score(column)
        x = result.runs[0].get(measured) if result.runs else None
        if score is not None and row.baseline:
            baselines.append((row, score, result.state))
        elif score is not None and x is not None:
            points.append(_Point(100 * float(x), row, score, result.state))
    if not points:
        return None
    shown = [name for name in _SERIES if any(point.row.control == name for point in points)]
    with look():
        figure, axes = new_figure(6.4, 3.9 if len(shown) > 1 else 3.6)
        for row, score, state in baselines:
            _level(axes, row.label if state.complete else f"{row.label}, {state}", score, column)
        for name, shift in zip(shown, _dodge(points, len(shown)), strict=True):
            _draw(axes, [p for p in points if p.row.control == name], _SERIES[name], shift)
        labels = [_SERIES[name].label for name in shown]
        if _paper_points(axes, definition, column):
            labels.append("paper")
        axes.set_xlabel("shared heads among the active (%)" if shares else "activated heads (%)")
        axes.set_ylabel(title_of(column))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0.07, y=0.12)
        if len(labels) > 1:
            figure.legend(loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
        if definition.spec.protocol != "paper":
            text = f"{definition.spec.protocol} protocol, not the paper's"
            axes.set_title(text, loc="right", fontsize=8.5, fontweight="normal", color=MUTED, pad=6)
        return figure


def _dodge(points: Sequence[_Point], series: int) -> list[float]:
    """Shift of each series, so that error bars at one ratio stand side by side; none of MoH's."""
    places = sorted({point.x for point in points})
    width = 0.015 * (places[-1] - places[0] or 40)
    return [width * step for step in (0, -1, 1, 2, -2)][:series]


def _draw(axes: Axes, points: Sequence[_Point], series: _Series, shift: float) -> None:
    """One line with its error bars, the seeds behind them."""
    curve = sorted((p.x + shift, p.score.mean) for p in points if p.state.complete)
    axes.plot(
        [x for x, _ in curve],
        [y for _, y in curve],
        color=series.colour,
        linewidth=1.8 if series.label == "MoH" else 1.1,
        linestyle="-" if series.label == "MoH" else (0, (2, 1.5)),
        zorder=3,
    )
    label = series.label
    for point in points:
        x, complete = point.x + shift, point.state.complete
        axes.errorbar(
            x,
            point.score.mean,
            yerr=point.score.sd,
            fmt=series.marker,
            color=series.colour,
            markerfacecolor=series.colour if complete else "white",
            markersize=6.5 if series.label == "MoH" else 5.5,
            capsize=2.5,
            elinewidth=1.2,
            zorder=4,
            label=label,
        )
        label = "_nolegend_"
        if point.score.n > 1:
            values = list(point.score.values.values())
            axes.plot([x] * point.score.n, values, ".", color=series.colour, alpha=0.4, ms=4)
        if not complete:
            axes.annotate(
                str(point.state),
                (x, point.score.mean),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=MUTED,
            )


def _paper_points(axes: Axes, definition: TableDefinition, column: ColumnSpec) -> bool:
    """The paper's values at the ratios that it states; True if there are any."""
    points = []
    for row in definition.spec.rows:
        ratio = definition.paper_value(row, "activated_ratio")
        value = definition.paper_value(row, column.key)
        if ratio is not None and value is not None and not row.calibration:
            points.append((ratio, value))
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, "s:", color=OTHER, lw=1, ms=5, markerfacecolor="white", label="paper", zorder=2
        )
    return bool(points)


def _level(axes: Axes, label: str, score: Score, column: ColumnSpec) -> None:
    axes.axhline(score.mean, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    around = ""
    if score.sd is not None:
        low, high = score.mean - score.sd, score.mean + score.sd
        axes.axhspan(low, high, color=INK, alpha=0.08, linewidth=0, zorder=0)
        around = f" {spread(score.sd, column.decimals)}"
    axes.annotate(
        f"{label}\n{number(score.mean, column.decimals)}{around}\nn = {score.n}",
        (1.015, score.mean),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color=INK,
        annotation_clip=False,
    )
