"""How alike heads are: a line over depth for every model, a matrix for each layer of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from moh.reporting.cells import number
from moh.reporting.records import HeadSimilarity
from moh.reporting.results import RowResult, State
from moh.reporting.spec import RowSpec, TableDefinition
from moh.reporting.style import MUTED, colour, look, mark_protocol

_KINDS = {
    "pattern": "attention patterns",
    "output": "head outputs",
    "gated_output": "gated head outputs",
}
_MOST_LAYERS = 6  # matrices side by side


def similarity_by_layer(
    definition: TableDefinition, results: Mapping[str, RowResult]
) -> Figure | None:
    """Mean similarity of the pairs of heads of each layer, a line a model (first seed).

    A line of panels for each baseline and the models compared with it: attention patterns on the
    left, head outputs before the gates on the right. None without records.
    """
    families: dict[str, list[_Line]] = {}
    for row in definition.spec.rows:
        similarity = first_similarity(results[row.id])
        if similarity is not None:
            baseline = definition.baseline_of(row) or row
            line = _Line(row, results[row.id].state, similarity)
            families.setdefault(baseline.id, []).append(line)
    if not families:
        return None
    with look():
        figure = Figure(figsize=(7.6, 0.5 + 2.1 * len(families)), layout="constrained")
        panels = figure.subplots(len(families), 2, squeeze=False)
        for place, (pair, lines) in enumerate(zip(panels, families.values(), strict=True)):
            for axes, kind in zip(pair, ("pattern", "output"), strict=True):
                for line in lines:
                    line.draw(axes, kind)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.yaxis.set_major_locator(MaxNLocator(4))
                if place == 0:
                    axes.set_title(_KINDS[kind])
                if place == len(families) - 1:
                    axes.set_xlabel("layer")
            pair[0].set_ylabel("similarity")
            pair[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9)
        mark_protocol(figure, definition.spec.protocol)
        return figure


@dataclass(frozen=True)
class _Line:
    """One model in the panels."""

    row: RowSpec
    state: State
    similarity: HeadSimilarity

    def draw(self, axes: Axes, kind: str) -> None:
        means = [pair_mean(matrix) for matrix in self.similarity.matrices[kind]]
        axes.plot(
            [place for place, mean in enumerate(means, 1) if mean is not None],
            [mean for mean in means if mean is not None],
            marker="o",
            markersize=4,
            linewidth=1.6,
            color=colour(self.row.id),
            linestyle="-" if self.state.complete else ":",
            label=self.row.label if self.state.complete else f"{self.row.label}, {self.state}",
        )


def similarity_matrices(similarity: HeadSimilarity, title: str, protocol: str = "paper") -> Figure:
    """Head against head in each layer: patterns above, outputs below.

    Of a deep model some layers, evenly spaced from the first to the last. The number in a corner is
    the mean over the pairs.
    """
    layers = len(similarity.layers)
    shown = sorted({round(i) for i in np.linspace(0, layers - 1, min(layers, _MOST_LAYERS))})
    kinds = ("pattern", "output")
    with look():
        width = 1.35 + 1.55 * len(shown)
        figure = Figure(figsize=(max(4.6, width), 4.1), layout="constrained")
        panels = figure.subplots(len(kinds), len(shown), squeeze=False)
        for line, kind in zip(panels, kinds, strict=True):
            images, most = [], _largest([similarity.matrices[kind][layer] for layer in shown])
            for axes, layer in zip(line, shown, strict=True):
                images.append(_matrix(axes, similarity.matrices[kind][layer], kind, most))
                if kind == kinds[0]:
                    axes.set_title(f"layer {layer + 1}", loc="center", fontsize=9.5, pad=5)
            line[0].set_ylabel(_KINDS[kind].replace(" ", "\n", 1), fontsize=9.5)
            bar = figure.colorbar(images[-1], ax=list(line), aspect=12, pad=0.01)
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0, labelsize=8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        mark_protocol(figure, protocol)
        return figure


def _largest(matrices: Sequence[Sequence[Sequence[float]]]) -> float:
    """Bound of the colours: the largest cosine of two heads, rounded up to a tenth."""
    most = 0.0
    for values in matrices:
        matrix: npt.NDArray[np.float64] = np.abs(np.array(values, dtype=np.float64))
        np.fill_diagonal(matrix, 0.0)
        most = max(most, float(matrix.max()))
    return float(min(1.0, max(0.2, np.ceil(10 * most) / 10)))


def _matrix(axes: Axes, values: Sequence[Sequence[float]], kind: str, most: float) -> AxesImage:
    matrix = np.array(values)
    np.fill_diagonal(matrix, np.nan)  # a head and itself say nothing
    if kind == "pattern":
        image = axes.imshow(matrix, cmap="viridis", vmin=0.0, vmax=1.0)
    else:
        image = axes.imshow(matrix, cmap="PuOr_r", vmin=-most, vmax=most)
    mean = pair_mean(values)
    axes.set_xlabel("" if mean is None else f"mean {number(mean, 2)}", fontsize=8.5, color=MUTED)
    axes.set_facecolor("#eef0f3")
    axes.grid(False)
    step = max(1, len(matrix) // 4)
    places = range(0, len(matrix), step)
    axes.set_xticks([])
    axes.set_yticks(list(places), [str(place + 1) for place in places], fontsize=7.5)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def pair_mean(matrix_HH: Sequence[Sequence[float]]) -> float | None:
    """Mean over the pairs of different heads; None for a single head."""
    matrix: npt.NDArray[np.float64] = np.array(matrix_HH, dtype=np.float64)
    upper = matrix[np.triu_indices(len(matrix), k=1)]
    return float(upper.mean()) if len(upper) else None


def first_similarity(result: RowResult) -> HeadSimilarity | None:
    """Of the first seed that has one."""
    return next((run.head_similarity for run in result.runs if run.head_similarity), None)
