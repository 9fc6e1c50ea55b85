"""Head load as heatmaps: by layer, and by class or task (the paper's Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from moh.reporting.records import HeadLoad
from moh.reporting.style import INK, MUTED, look, new_figure

_ANNOTATED_CELLS = 200
_BLANK = "#eef0f3"


def load_by_layer(load: HeadLoad, title: str) -> Figure:
    """Load of each routed head (columns) in each routed layer (rows).

    The number is the share of tokens; the colour compares it with the uniform load ``top_k / E``
    of its layer, since layers may differ in both.
    """
    labels = [
        f"{index + 1}  (top {k} of {routed})"
        for index, (k, routed) in enumerate(zip(load.top_k, load.num_routed, strict=True))
    ]
    uniform = [load.uniform(index) for index in range(len(load.layers))]
    return _heatmap(load.overall, labels, uniform, title, "routed layer")


def load_by_group(load: HeadLoad, title: str) -> Figure | None:
    """Load of the last routed layer's heads for each class or task; None without groups."""
    return _by_group(load, load.groups, title)


def load_by_axis(load: HeadLoad, title: str) -> Figure | None:
    """The same for each noise level; None where none were told apart."""
    return _by_group(load, load.axis_groups, title)


def _by_group(
    load: HeadLoad, groups: Mapping[str, Sequence[Sequence[float]]], title: str
) -> Figure | None:
    if not groups:
        return None
    last = len(load.layers) - 1
    rows = [layers[last] for layers in groups.values()]
    title = f"{title} (layer {last + 1}: top {load.top_k[last]} of {load.num_routed[last]})"
    return _heatmap(rows, list(groups), [load.uniform(last)] * len(rows), title, "")


def _heatmap(
    rows: Sequence[Sequence[float]],
    labels: Sequence[str],
    uniform: Sequence[float],
    title: str,
    ylabel: str,
) -> Figure:
    widest = max(map(len, rows))
    load = np.full((len(rows), widest), np.nan)
    for index, values in enumerate(rows):
        load[index, : len(values)] = values
    relative = load / np.array(uniform)[:, None]
    top = max(2.0, float(np.nanmax(relative)))
    with look():
        # Tiles of many heads or layers shrink, so that labels stay readable in a column of text.
        tile_width = 0.42 if widest <= 12 else 0.2
        tile_height = 0.34 if len(rows) <= 16 else 0.2
        figure, axes = new_figure(
            max(4.6, 2.6 + tile_width * widest), 1.5 + tile_height * len(rows)
        )
        axes.grid(False)
        axes.set_facecolor(_BLANK)
        image = axes.pcolormesh(
            np.ma.masked_invalid(relative),
            cmap="PuOr_r",
            norm=TwoSlopeNorm(1.0, 0.0, top),
            edgecolors="white",
            linewidth=1.5,
        )
        if load.size <= _ANNOTATED_CELLS:
            for (y, x), value in np.ndenumerate(load):
                if np.isfinite(value):
                    dark = not 0.35 < relative[y, x] < 1 + 0.65 * (top - 1)
                    axes.text(
                        x + 0.5,
                        y + 0.5,
                        f"{value:.2f}".removeprefix("0") if value < 0.995 else "1",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if dark else INK,
                    )
        axes.invert_yaxis()
        axes.set_yticks(np.arange(len(rows)) + 0.5, labels)
        step = max(1, widest // 12)
        axes.set_xticks(
            np.arange(0, widest, step) + 0.5, [str(head + 1) for head in range(0, widest, step)]
        )
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("routed head")
        axes.set_ylabel(ylabel)
        axes.set_title(title)
        bar = figure.colorbar(image, ax=axes, aspect=14, pad=0.02, ticks=[0, 1, top])
        bar.ax.set_yticklabels(["0", "uniform", f"{top:.2g} \u00d7"], fontsize=8.5)
        bar.ax.tick_params(length=0)
        bar.ax.axhline(1.0, color=MUTED, linewidth=1)
        bar.outline.set_visible(False)
        return figure
