"""The stacked layout: a column a metric; paper, ours and the gaps below each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from moh.reporting.cells import ABSENT, PLUS_MINUS, STATE, Cell, Heading, Row
from moh.reporting.comparison import (
    ARROWS,
    Comparison,
    Notes,
    compare_all,
    field_cell,
    kind_of,
    state_cell,
    title_of,
)
from moh.reporting.results import RowResult, State
from moh.reporting.spec import ColumnSpec, TableDefinition

# Verdicts as marks: in words they would make every column as wide as a sentence.
MARKS = {"better": "\u25b2", "worse": "\u25bc", "even": "\u25cb"}
LEGEND = (
    f"{MARKS['better']} better and {MARKS['worse']} worse than the baseline; {MARKS['even']} no "
    "larger than the spread of the gap, or, with one seed, its standard error over items."
)
Line = tuple[Cell, Mapping[str, Cell]]  # what the line holds, and its cell of each metric


def stacked(
    definition: TableDefinition,
    columns: Sequence[ColumnSpec],
    results: dict[str, RowResult],
    notes: Notes,
) -> tuple[list[Heading], list[Row]]:
    """Headings and rows; what a row has nothing of makes no line."""
    rows = []
    spreads = {column.key: "sd" if column.spread == "sd" else "se" for column in columns}
    for row in definition.spec.rows:
        result = results[row.id]
        label, found = compare_all(definition, columns, row, results, notes)
        for index, (what, cells) in enumerate(_lines(found, result.state, spreads)):
            first = index == 0
            line = [label if first else Cell(""), what]
            for column in columns:
                if column.field is None:
                    line.append(cells[column.key])
                else:
                    line.append(field_cell(definition, column, result) if first else Cell(""))
            line.append(state_cell(result.state, notes) if first else Cell(""))
            rows.append(Row(row.id, kind_of(row), tuple(line), first))
    common, values = _common(columns)
    headings = [Heading("Model", numeric=False), Heading(values, numeric=False)]
    for column in columns:
        alike = column.metric is not None and (column.unit, column.direction) == common
        headings.append(Heading(column.header if alike else title_of(column)))
    return [*headings, Heading(STATE, numeric=False)], rows


def _lines(
    found: Mapping[str, Comparison], state: State, spreads: Mapping[str, str]
) -> Iterable[Line]:
    """The paper's value always; the others where the row has any.

    Args:
        spreads: metric -> ``sd`` or ``se``, what the spread of our value is.
    """

    def cells(part: str) -> dict[str, Cell]:
        return {key: getattr(item, part) for key, item in found.items()}

    yield Cell("paper"), cells("paper")
    yield from _filled(Cell("paper's gap"), cells("paper_gap"))
    yield from _measured("ours", cells("ours"), state, spreads)
    yield from _filled(Cell("delta"), cells("delta"))
    gaps = cells("gap")
    kinds = {key: "se" if cell.spread.endswith(" se") else "sd" for key, cell in gaps.items()}
    yield from _measured("our gap", gaps, state, kinds)


def _filled(what: Cell, cells: Mapping[str, Cell]) -> Iterable[Line]:
    if any(cell.text != ABSENT for cell in cells.values()):
        yield what, cells


def _measured(
    what: str, cells: Mapping[str, Cell], state: State, kinds: Mapping[str, str]
) -> Iterable[Line]:
    """Values, and their spreads below. What all of them share stands once, before the line."""
    shown = [cell for cell in cells.values() if cell.text != ABSENT]
    counts = {cell.count for cell in shown}
    count = counts.pop() if len(counts) == 1 else ""
    notes = {cell.notes for cell in shown}
    common = notes.pop() if len(notes) == 1 else ()
    bare = {
        key: replace(
            cell,
            spread="",
            count="" if count else cell.count,
            word=MARKS.get(cell.tone, ""),
            notes=() if common else cell.notes,
        )
        for key, cell in cells.items()
    }
    mark = "" if state.complete else f", {state.word}"
    tone = "" if state.complete else "warn"
    yield from _filled(Cell(f"{what} {count}".rstrip() + mark, tone=tone, notes=common), bare)
    around = {key: cell.spread for key, cell in cells.items() if cell.spread}
    named = {kinds[key] for key in around}
    below = {key: Cell() for key in cells} | {
        key: Cell(text.removeprefix(f"{PLUS_MINUS} ").removesuffix(" se"))
        for key, text in around.items()
    }
    yield from _filled(Cell(f"{PLUS_MINUS} {named.pop() if len(named) == 1 else ''}"), below)


def _common(columns: Sequence[ColumnSpec]) -> tuple[tuple[str, str] | None, str]:
    """Unit and direction of most metrics, where they have a unit, and how a heading says it."""
    metrics = [column for column in columns if column.metric is not None]
    alike = Counter((column.unit, column.direction) for column in metrics)
    (unit, direction), count = alike.most_common(1)[0]
    if not unit or count <= len(metrics) / 2:
        return None, ""
    return (unit, direction), f"in {unit} {ARROWS[direction]}"
