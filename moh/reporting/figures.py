"""Loss against training samples, and grids of generated images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from moh.reporting.records import Record
from moh.reporting.results import RowResult
from moh.reporting.spec import TableDefinition
from moh.reporting.style import MUTED, colour, look, new_figure, spread_apart

_MAX_POINTS = 400
Array = npt.NDArray[np.float64]


def training_figure(definition: TableDefinition, results: Mapping[str, RowResult]) -> Figure | None:
    """Task loss against samples, the mean over the seeds of each row; None without curves.

    The axis starts where a tenth of the samples is trained: before that, all models fall alike.
    """
    lines = []
    for row in definition.spec.rows:
        samples, loss = _mean_curve(results[row.id].runs)
        if len(samples) > 1:
            state = results[row.id].state
            label = row.label if state.complete else f"{row.label}, {state}"
            lines.append((label, colour(row.id), samples, loss, _smooth(loss)))
    if not lines:
        return None
    with look():
        figure, axes = new_figure(5.8, 3.5)
        floor, ceiling = np.inf, -np.inf
        for _, tint, samples, loss, smooth in lines:
            thin = slice(None, None, 1 + len(samples) // _MAX_POINTS)
            axes.plot(samples[thin], loss[thin], color=tint, alpha=0.25, linewidth=0.8)
            axes.plot(samples[thin], smooth[thin], color=tint, linewidth=1.8)
            settled = samples >= 0.1 * samples[-1]
            floor = min(floor, loss[settled].min())
            ceiling = max(ceiling, smooth[settled].max())
        margin = 0.06 * (ceiling - floor or 1.0)
        axes.set_ylim(floor - margin, ceiling + margin)
        ends = [smooth[-1] for *_, smooth in lines]
        for line, height in zip(lines, spread_apart(ends, 1.2 * margin), strict=True):
            axes.annotate(
                line[0],
                (1.01, height),
                xycoords=("axes fraction", "data"),
                va="center",
                color=line[1],
                fontweight="bold",
                fontsize=9.5,
                annotation_clip=False,
            )
        axes.set_xlim(0, max(samples[-1] for _, _, samples, _, _ in lines))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
        axes.set_xlabel("training samples (thousands)")
        axes.set_ylabel(definition.spec.loss_label)
        _mark_protocol(axes, definition)
        return figure


def _mean_curve(runs: Sequence[Record]) -> tuple[Array, Array]:
    """Samples that every run logged, and the mean of their losses there."""
    losses = [
        {
            step["samples"]: float(step["task_loss"])
            for step in run.curves
            if step.get("task_loss") is not None and math.isfinite(step["task_loss"])
        }
        for run in runs
    ]
    losses = [steps for steps in losses if steps]
    common = sorted(set.intersection(*map(set, losses))) if losses else []
    mean = [np.mean([steps[samples] for steps in losses]) for samples in common]
    return np.array(common, dtype=float), np.array(mean, dtype=float)


def _smooth(values: Array, share: float = 0.05) -> Array:
    """Mean over a window centred on each value and cut off at both ends."""
    half = max(1, int(len(values) * share / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    mean: Array = (sums[last] - sums[first]) / (last - first)
    return mean


def _protocol(definition: TableDefinition) -> str:
    protocol = definition.spec.protocol
    return "" if protocol == "paper" else f"{protocol} protocol, not the paper's"


def _mark_protocol(axes: Axes, definition: TableDefinition) -> None:
    """Say in the figure itself that its protocol is not the paper's: figures get copied."""
    if text := _protocol(definition):
        axes.set_title(text, loc="right", fontsize=8.5, fontweight="normal", color=MUTED, pad=6)


def samples_figure(definition: TableDefinition, grids: Sequence[tuple[str, Path]]) -> Figure:
    """Sample grids side by side, each under its label."""
    with look():
        images = [imread(path) for _, path in grids]
        height, width = images[0].shape[:2]
        figure = Figure(
            figsize=(2.6 * len(grids), 2.6 * height / width + 0.35), layout="constrained"
        )
        panels = np.atleast_1d(figure.subplots(1, len(grids)))
        for axes, (label, _), image in zip(panels, grids, images, strict=True):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set_title(label, loc="center", pad=5)
            axes.set_axis_off()
        if text := _protocol(definition):
            figure.supxlabel(text, fontsize=8.5, color=MUTED, x=0.99, ha="right")
        return figure
