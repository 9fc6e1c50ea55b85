"""From a table definition and the records to a table ready to be rendered.

Two layouts: *wide* has a line a row and the paper's value, ours and the gaps beside each other;
*stacked* has a column a metric and these below each other, for tables of many metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moh.reporting.cells import ABSENT, PLUS_MINUS, STATE, Cell, Heading, Row, Table, number
from moh.reporting.comparison import (
    Notes,
    compare_all,
    field_cell,
    has_paper,
    has_paper_gap,
    kind_of,
    sentence,
    state_cell,
    title_of,
)
from moh.reporting.records import Records
from moh.reporting.results import RowResult, collect
from moh.reporting.spec import ColumnSpec, TableDefinition
from moh.reporting.stacked import LEGEND, MARKS, stacked
from moh.reporting.sweep_remarks import control_remarks
from moh.reporting.sweep_rows import with_recorded_rows

CALIBRATION = "Published weights, evaluated here"
_CALIBRATION_NOTE = (
    f"{CALIBRATION}: what our evaluators make of the authors' weights, one command a row "
    "(python -m moh experiment=NAME checkpoint=...). An evaluation that measures otherwise shows "
    "here; these rows enter no gap and are no training of ours."
)
_LINES = {
    "paper": "paper",
    "paper_gap": "paper's gap",
    "ours": "ours",
    "delta": "delta",
    "gap": "our gap",
}


def build_table(definition: TableDefinition, records: Records) -> Table:
    """Fill a table from the records.

    Raises:
        ValueError: a record whose unit or direction contradicts the table definition.
    """
    definition = with_recorded_rows(definition, records)
    spec = definition.spec
    results = collect(definition, records)
    columns = [column for column in spec.columns if _shown(column, results, definition)]
    notes = Notes()
    layout = stacked if spec.layout == "stacked" else _wide
    headings, rows = layout(definition, columns, results, notes)
    rows = _with_sections(definition, rows, len(headings))
    remarks = control_remarks(definition, results)
    remarks += [remark for result in results.values() for remark in result.remarks]
    remarks += [sentence(note) for note in (definition.common_note,) if note]
    if any(cell.word in MARKS.values() for row in rows for cell in row.cells):
        remarks.append(LEGEND)
    sources = dict.fromkeys(entry.source for entry in definition.paper.values() if entry.source)
    if sources:
        remarks.insert(0, f"Paper's values: {'; '.join(sources)}.")
    if any(row.calibration for row in spec.rows):
        remarks.insert(0, _CALIBRATION_NOTE)
    return Table(
        name=definition.name,
        title=f"{spec.paper}: {spec.title}" if spec.paper else spec.title,
        caption=spec.caption,
        demo=spec.protocol != "paper",
        headings=tuple(headings),
        rows=tuple(rows),
        notes=notes.texts(),
        remarks=tuple(remarks),
        command=definition.command,
        pinned=2 if spec.layout == "stacked" else 1,
    )


def _shown(column: ColumnSpec, results: dict[str, RowResult], definition: TableDefinition) -> bool:
    if not column.optional:
        return True
    if column.field is not None:
        return any(run.get(column.field) is not None for r in results.values() for run in r.runs)
    return any(result.score(column) for result in results.values()) or has_paper(definition, column)


def _wide(
    definition: TableDefinition,
    columns: Sequence[ColumnSpec],
    results: dict[str, RowResult],
    notes: Notes,
) -> tuple[list[Heading], list[Row]]:
    rows = []
    for row in definition.spec.rows:
        label, found = compare_all(definition, columns, row, results, notes)
        cells = [label]
        for column in columns:
            if column.field is not None:
                cells.append(field_cell(definition, column, results[row.id]))
                continue
            cells += [getattr(found[column.key], part) for part in _parts(definition, column)]
        cells.append(state_cell(results[row.id].state, notes))
        rows.append(Row(row.id, kind_of(row), tuple(cells)))
    headings = [Heading("Model", numeric=False)]
    for column in columns:
        headings.extend(_headings(definition, column))
    headings.append(Heading(STATE, numeric=False))
    headings, rows = _raise_notes(headings, rows)
    rows.extend(_reference_rows(definition, columns, results, notes, len(headings)))
    return headings, rows


def _parts(definition: TableDefinition, column: ColumnSpec) -> list[str]:
    """Fields of a comparison that stand beside each other for one metric."""
    if not has_paper(definition, column):
        return ["ours", "gap"] if column.gap else ["ours"]
    gaps = ["paper_gap", "gap"] if has_paper_gap(definition, column) else ["gap"]
    return ["paper", "ours", "delta"] + (gaps if column.gap else [])


def _headings(definition: TableDefinition, column: ColumnSpec) -> list[Heading]:
    title = title_of(column)
    if column.field is not None:
        return [Heading(title)]
    around = f"{PLUS_MINUS} {'sd' if column.spread == 'sd' else 'se'} (n)"
    if has_paper(definition, column):
        parts = _parts(definition, column)
        texts = [f"ours {around}" if part == "ours" else _LINES[part] for part in parts]
        return [Heading(text, title) for text in texts]
    baselines = [row.label for row in definition.spec.rows if row.baseline]
    gap = [f"gap to {baselines[0] if len(baselines) == 1 else 'baseline'}"] if column.gap else []
    return [Heading(text, title) for text in (f"mean {around}", *gap)]


def _raise_notes(headings: list[Heading], rows: list[Row]) -> tuple[list[Heading], list[Row]]:
    """Move notes that every filled cell of a column carries to its heading."""
    grid = [list(row.cells) for row in rows]
    raised = []
    for index, heading in enumerate(headings):
        filled = [cells[index].notes for cells in grid if cells[index].text != ABSENT]
        common = filled[0] if len(filled) > 1 and len(set(filled)) == 1 else ()
        raised.append(replace(heading, notes=common))
        if common:
            for cells in grid:
                cells[index] = replace(cells[index], notes=())
    lines = [replace(row, cells=tuple(cells)) for row, cells in zip(rows, grid, strict=True)]
    return raised, lines


def _with_sections(definition: TableDefinition, rows: list[Row], width: int) -> list[Row]:
    """Put a line with its title before each section; the published weights are one."""
    titles = {
        row.id: ": ".join([CALIBRATION] * row.calibration + [row.section] * bool(row.section))
        for row in definition.spec.rows
    }
    placed: list[Row] = []
    above = ""
    for row in rows:
        title = titles.get(row.id, above)
        if title != above and title:
            placed.append(
                Row(f"section {title}", "section", (Cell(title),) + (Cell(""),) * (width - 1))
            )
        above = title
        placed.append(row)
    return placed


def _reference_rows(
    definition: TableDefinition,
    columns: Sequence[ColumnSpec],
    results: dict[str, RowResult],
    notes: Notes,
    width: int,
) -> list[Row]:
    """Values that no row owns, each in its metric's column; absent ones make no row."""
    rows = []
    for reference in definition.spec.references:
        start = 1
        for column in columns:
            if column.metric == reference.column:
                break
            start += len(_headings(definition, column))
        else:
            continue
        if has_paper(definition, column):
            start += 1
        source = ColumnSpec(
            reference.label, reference.metric, unit=column.unit, decimals=column.decimals
        )
        found = [r.score(source) for r in results.values() if r.state.complete]
        scores = [score for score in found if score is not None]
        if not scores:
            continue
        values = [value for score in scores for value in score.values.values()]
        marks = dict.fromkeys(notes.mark(mark) for score in scores for mark in score.marks)
        low, high = min(values), max(values)
        text = number(low, column.decimals)
        if text != number(high, column.decimals):
            text = f"{text} to {number(high, column.decimals)}"
        cells = [Cell("")] * width
        cells[0] = Cell(reference.label)
        cells[start] = Cell(text, notes=tuple(marks))
        rows.append(Row(reference.metric, "reference", tuple(cells)))
    return rows
