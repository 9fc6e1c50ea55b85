"""The report: one HTML file that opens without a network, made from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moh.reporting.cells import Cell, Table
from moh.reporting.comparison import find_gap, gap_cell, score_cell, title_of
from moh.reporting.figures import training_figure
from moh.reporting.head_figures import load_by_axis, load_by_group, load_by_layer
from moh.reporting.overview import overview, standings
from moh.reporting.progress_figure import progress_figure
from moh.reporting.provenance_view import Provenance, provenance
from moh.reporting.records import Record, Records, load_records
from moh.reporting.render import environment, to_html, to_latex
from moh.reporting.results import RowResult, collect
from moh.reporting.similarity_figures import (
    first_similarity,
    similarity_by_layer,
    similarity_matrices,
)
from moh.reporting.spec import EXPERIMENTS_DIR, TableDefinition, load_table
from moh.reporting.style import png_uri, svg_uri
from moh.reporting.sweep_figure import score_column, sweep_figure
from moh.reporting.sweep_rows import with_recorded_rows
from moh.reporting.tables import build_table

_CARD_ROWS = 6


@dataclass(frozen=True)
class Image:
    """An embedded image with the text that replaces it."""

    uri: str
    alt: str
    label: str = ""


@dataclass(frozen=True)
class FigureBlock:
    """One figure of a section; without images, the caption says what is missing."""

    kind: str
    title: str
    caption: str
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class CardLine:
    """One model in the summary of a table."""

    label: str
    score: Cell
    gap: Cell
    baseline: bool
    state: str


@dataclass(frozen=True)
class Card:
    """The comparison of a table in a few lines."""

    metric: str
    lines: tuple[CardLine, ...]


@dataclass(frozen=True)
class Section:
    """A table with everything that belongs to it."""

    name: str
    family: str
    short: str
    title: str
    table: Table
    html: str
    latex: str
    card: Card | None
    figures: tuple[FigureBlock, ...]
    abouts: Mapping[str, str] = field(default_factory=dict)


def build_report(
    results_dir: Path,
    out_path: Path,
    tables: Sequence[str],
    experiments_dir: Path = EXPERIMENTS_DIR,
) -> Path:
    """Write the report of some tables, in this order; absent runs read ``not run``.

    Args:
        results_dir: folder with ``runs/``.
        out_path: HTML file to write; its folder is made.

    Returns:
        ``out_path``, absolute.

    Raises:
        ValueError: an unknown table, or a record that contradicts one.
    """
    records = load_records(results_dir)
    definitions = [
        with_recorded_rows(load_table(name, experiments_dir), records) for name in tables
    ]
    collected = [collect(definition, records) for definition in definitions]
    sections = [
        _section(definition, results, records)
        for definition, results in zip(definitions, collected, strict=True)
    ]
    page = environment().get_template("report.html.j2")
    paper = [definition for definition in definitions if definition.spec.protocol == "paper"]
    text = page.render(
        sections=sections,
        overview=to_html(overview(standings(paper, records))) if paper else "",
        demo=any(section.table.demo for section in sections),
        only_demo=all(section.table.demo for section in sections),
        provenance=_provenance(collected),
        problems=records.problems,
    )
    out_path.parent.mkdir(parents=True, exist_ok=True)
    out_path.write_text(text, encoding="utf-8")
    return out_path.resolve()


def sample_grids(
    definition: TableDefinition, results: Mapping[str, RowResult]
) -> list[tuple[str, Path]]:
    """Label and grid of generated images of each row, from its first seed that has one."""
    grids = []
    for row in definition.spec.rows:
        result = results[row.id]
        paths = [run.samples_image for run in result.runs if run.samples_image is not None]
        if paths:
            mark = "" if result.state.complete else f", {result.state}"
            grids.append((row.label + mark, paths[0]))
    return grids


def _section(
    definition: TableDefinition, results: dict[str, RowResult], records: Records
) -> Section:
    spec = definition.spec
    table = build_table(definition, records)
    makers = {
        "sweep": _sweep,
        "progress": _progress,
        "training_curves": _training,
        "head_load": _head_load,
        "samples": _samples,
        "head_similarity": _head_similarity,
    }
    # Of the paper's tables, mere places of what was not run would bury what was.
    drawn = table.demo or any(result.runs for result in results.values())
    shown = {heading.group or heading.text for heading in table.headings}
    abouts = {
        column.header: column.about
        for column in spec.columns
        if column.about and shown & {title_of(column), column.header}
    }
    return Section(
        name=definition.name,
        family=spec.family,
        short=spec.paper or spec.title,
        title=table.title,
        table=table,
        html=to_html(table),
        latex=to_latex(table),
        card=_card(definition, results) if drawn else None,
        figures=tuple(makers[name](definition, results) for name in spec.figures if drawn),
        abouts=abouts,
    )


def _card(definition: TableDefinition, results: dict[str, RowResult]) -> Card | None:
    column = score_column(definition)
    # A sweep is told by its curve.
    curve = "sweep" in definition.spec.figures
    if column is None or curve or len(definition.spec.rows) > _CARD_ROWS:
        return None
    lines = []
    for row in definition.spec.rows:
        score = results[row.id].score(column)
        gap = find_gap(definition, column, row, results)
        lines.append(
            CardLine(
                label=row.label,
                score=Cell() if score is None else score_cell(column, score, results[row.id].state),
                gap=Cell("") if gap is None else gap_cell(gap, column.decimals),
                baseline=row.baseline,
                state=str(results[row.id].state),
            )
        )
    return Card(title_of(column), tuple(lines))


def _sweep(definition: TableDefinition, results: dict[str, RowResult]) -> FigureBlock:
    figure = sweep_figure(definition, results)
    caption = (
        "The dashed line is MHA; bars and the grey band are one standard deviation over seeds, "
        "where there are at least two; faint dots are the seeds."
    )
    return FigureBlock(
        "wide",
        "Score against activated ratio",
        caption,
        () if figure is None else (Image(svg_uri(figure), "Curve: score by activated ratio"),),
    )


def _progress(definition: TableDefinition, results: dict[str, RowResult]) -> FigureBlock:
    figure = progress_figure(definition, results)
    caption = (
        "Each score along training. Bars are standard errors over the evaluated items, where the "
        "benchmark states them."
    )
    return FigureBlock(
        "wide",
        "Scores along training",
        caption,
        () if figure is None else (Image(svg_uri(figure), "Curves: scores along training"),),
    )


def _training(definition: TableDefinition, results: dict[str, RowResult]) -> FigureBlock:
    figure = training_figure(definition, results)
    caption = (
        "Loss of the task alone, without the balance loss, as a mean over seeds: faint as logged, "
        "full as a moving mean over 5 % of the steps. The steep first tenth is cut off."
    )
    return FigureBlock(
        "wide",
        "Training",
        caption,
        () if figure is None else (Image(svg_uri(figure), "Curves: loss by training samples"),),
    )


def _head_load(definition: TableDefinition, results: dict[str, RowResult]) -> FigureBlock:
    label, images = definition.spec.group_label, []
    for row in definition.spec.rows:
        run = next((run for run in results[row.id].runs if run.head_load is not None), None)
        if run is None or run.head_load is None:
            continue
        mark = "" if results[row.id].state.complete else f", {results[row.id].state}"
        title = f"{row.label}{mark}"
        figure = load_by_layer(run.head_load, f"{title}: by layer")
        images.append(Image(svg_uri(figure), f"Heatmap: head load of {title} by layer"))
        by_group = load_by_group(run.head_load, f"{title}: by {label}")
        if by_group is not None:
            images.append(Image(svg_uri(by_group), f"Heatmap: head load of {title} by {label}"))
        axis = run.head_load.axis
        by_axis = load_by_axis(run.head_load, f"{title}: by {axis}")
        if by_axis is not None:
            images.append(Image(svg_uri(by_axis), f"Heatmap: head load of {title} by {axis}"))
    caption = (
        "Share of tokens that select each routed head (first seed; shared heads serve every token "
        "and are not shown). Colour: against the uniform load, top k over routed heads, at which "
        f"the balance loss aims. By {label}, in the last routed layer, it shows whether heads "
        "specialise, as in the paper's Figure 8."
    )
    return FigureBlock("pair", "Head load", caption, tuple(images))


def _head_similarity(definition: TableDefinition, results: dict[str, RowResult]) -> FigureBlock:
    images, measured = [], []
    by_layer = similarity_by_layer(definition, results)
    if by_layer is not None:
        images.append(Image(svg_uri(by_layer), "Curves: similarity of heads by layer"))
    for row in definition.spec.rows:
        similarity = first_similarity(results[row.id])
        if similarity is not None:
            figure = similarity_matrices(similarity, row.label, definition.spec.protocol)
            images.append(Image(svg_uri(figure), f"Matrices: similarity of heads of {row.label}"))
            measured.append(similarity.samples)
    over = "; ".join(dict.fromkeys(measured))
    caption = (
        "Two heads of a layer: one minus half the mean L1 distance of their attention patterns, "
        "and the mean cosine of their outputs before the gates "
        f"(first seed; {over}). 1 is the same head twice."
    )
    return FigureBlock("pair", "Similarity of heads", caption, tuple(images))


def _samples(definition: TableDefinition, results: dict[str, RowResult]) -> FigureBlock:
    images = tuple(
        Image(png_uri(path), f"Generated images of {label}", label)
        for label, path in sample_grids(definition, results)
    )
    loads = (run.head_load for result in results.values() for run in result.runs)
    groups = next((list(load.groups) for load in loads if load is not None), [])
    columns = f" Columns, left to right: {', '.join(groups)}." if groups else ""
    caption = f"Samples of each model, a column a class (first seed).{columns}"
    return FigureBlock("grids", "Samples", caption, images)


def _provenance(collected: Sequence[Mapping[str, RowResult]]) -> Provenance:
    runs: dict[str, Record] = {}
    for results in collected:
        for result in results.values():
            runs.update((run.run_id, run) for run in result.runs)
    return provenance(list(runs.values()))
