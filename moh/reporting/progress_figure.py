"""Scores along training, from evaluations of kept checkpoints (the paper's Figure 2 as curves)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moh.reporting.comparison import title_of
from moh.reporting.results import RowResult
from moh.reporting.spec import ColumnSpec, TableDefinition
from moh.reporting.style import OTHER, colour, look, mark_protocol

_WIDTH, _HEIGHT, _ACROSS = 2.9, 2.5, 3  # inches of a panel; panels side by side


def progress_figure(definition: TableDefinition, results: Mapping[str, RowResult]) -> Figure | None:
    """A panel a metric: each curve of the table against what its rows were trained.

    Hollow points are no full runs of the protocol and stand off the lines; squares are the paper's
    values. None where nothing was measured.
    """
    columns = [
        c for c in definition.spec.columns if c.metric and c.direction in ("higher", "lower")
    ]
    columns = [c for c in columns if any(r.score(c) is not None for r in results.values())]
    if not columns:
        return None
    across = min(_ACROSS, len(columns))
    down = -(-len(columns) // across)
    with look():
        figure = Figure(figsize=(_WIDTH * across, _HEIGHT * down + 0.6), layout="constrained")
        panels = list(np.atleast_1d(figure.subplots(down, across, squeeze=False)).flat)
        for axes, column in zip(panels, columns, strict=False):
            _panel(axes, column, definition, results)
        for axes in panels[len(columns) :]:
            axes.set_axis_off()
        for axes in panels[max(0, len(columns) - across) : len(columns)]:
            axes.set_xlabel(definition.spec.progress_label)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=9
        )
        mark_protocol(figure, definition.spec.protocol)
        return figure


def _panel(
    axes: Axes,
    column: ColumnSpec,
    definition: TableDefinition,
    results: Mapping[str, RowResult],
) -> None:
    curves = list(dict.fromkeys(row.curve for row in definition.spec.rows))
    for curve in curves:
        rows = [row for row in definition.spec.rows if row.curve == curve]
        _paper(axes, definition, column, [row.id for row in rows])
        colour_of = colour(curve.lower())
        points = []
        for row in rows:
            score, state = results[row.id].score(column), results[row.id].state
            if score is None or row.at is None:
                continue
            if state.complete:
                points.append((row.at, score.mean))
            axes.errorbar(
                row.at,
                score.mean,
                yerr=score.stderr if column.spread == "stderr" else score.sd,
                fmt="o",
                color=colour_of,
                markerfacecolor=colour_of if state.complete else "white",
                markersize=5,
                capsize=2.5,
                elinewidth=1,
            )
        xs, ys = zip(*sorted(points), strict=True) if points else ((), ())
        axes.plot(xs, ys, color=colour_of, label=curve)
    axes.set_title(title_of(column))
    axes.margins(x=0.08, y=0.15)


def _paper(
    axes: Axes, definition: TableDefinition, column: ColumnSpec, row_ids: Sequence[str]
) -> None:
    """The paper's values at these rows."""
    points = []
    for row in definition.spec.rows:
        value = definition.paper_value(row, column.key)
        if row.id in row_ids and row.at is not None and value is not None:
            points.append((row.at, value))
    if points:
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(
            xs, ys, "s:", color=OTHER, lw=1, ms=5, markerfacecolor="white", label="paper", zorder=2
        )
