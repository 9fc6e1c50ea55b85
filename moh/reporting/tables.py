"""From a table definition and the records to a table ready to be rendered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from moh.reporting.cells import ABSENT, PLUS_MINUS, Cell, Heading, Row, Table, number, spread
from moh.reporting.records import Records
from moh.reporting.results import Gap, RowResult, Score, State, collect, compare, scale
from moh.reporting.spec import ColumnSpec, RowSpec, TableDefinition

_ARROWS = {"higher": "\u2191", "lower": "\u2193", "none": ""}
# run.json fields whose recorded unit is not "a plain number".
_FIELD_UNITS = {"seconds": "s", "peak_memory_mib": "MiB"}
_ONE_SEED = (
    "One seed: the gap has no spread yet, and seeds alone may differ by as much. "
    "More seeds turn it into a measured difference."
)
_ITEM_ERROR = "se: standard error over the evaluated items; sd needs two seeds."
_UNPAIRED = "No common seed with the baseline: difference of the means, without a spread."


class _Notes:
    """Footnotes in order of first use, marked a, b, c, ..."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, text: str) -> str:
        index = len(self._marks)
        letters = chr(ord("a") + index % 26) * (1 + index // 26)
        return self._marks.setdefault(text, letters)

    def texts(self) -> dict[str, str]:
        return {mark: text for text, mark in self._marks.items()}


def build_table(definition: TableDefinition, records: Records) -> Table:
    """Fill a table from the records.

    Raises:
        ValueError: a record whose unit or direction contradicts the table definition.
    """
    spec = definition.spec
    results = collect(definition, records)
    columns = [column for column in spec.columns if _shown(column, results, definition)]
    notes = _Notes()
    rows = []
    for row in spec.rows:
        cells = [Cell(row.label)]
        for column in columns:
            cells.extend(_cells(definition, column, row, results, notes))
        state = results[row.id].state
        cells.append(Cell(str(state), tone="" if state.complete else "warn"))
        rows.append(Row(row.id, "baseline" if row.baseline else "model", tuple(cells)))
    headings = [Heading("Model", numeric=False)]
    for column in columns:
        headings.extend(_headings(definition, column))
    headings.append(Heading("State", numeric=False))
    headings, rows = _raise_notes(headings, rows)
    rows.extend(_reference_rows(definition, columns, results, notes, len(headings)))
    remarks = [remark for result in results.values() for remark in result.remarks]
    return Table(
        name=definition.name,
        title=spec.title,
        caption=spec.caption,
        demo=spec.protocol != "paper",
        headings=tuple(headings),
        rows=tuple(rows),
        notes=notes.texts(),
        remarks=tuple(remarks),
    )


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


def _shown(column: ColumnSpec, results: dict[str, RowResult], definition: TableDefinition) -> bool:
    if not column.optional:
        return True
    if column.field is not None:
        return any(run.get(column.field) is not None for r in results.values() for run in r.runs)
    return any(result.score(column) for result in results.values()) or _has_paper(
        definition, column
    )


def _has_paper(definition: TableDefinition, column: ColumnSpec) -> bool:
    return any(metric == column.metric for _, metric in definition.paper)


def title_of(column: ColumnSpec) -> str:
    """Header with unit and the direction of better."""
    unit = f" ({column.unit})" if column.unit else ""
    arrow = _ARROWS[column.direction]
    return f"{column.header}{unit}{' ' + arrow if arrow else ''}"


def _headings(definition: TableDefinition, column: ColumnSpec) -> list[Heading]:
    title = title_of(column)
    if column.metric is None:
        return [Heading(title)]
    kind = f"{'sd' if column.spread == 'sd' else 'se'} (n)"
    if _has_paper(definition, column):
        texts = ["paper", f"ours {PLUS_MINUS} {kind}", "delta"]
        if column.gap:
            texts += ["paper's gap", "our gap"]
        return [Heading(text, title) for text in texts]
    baselines = [row.label for row in definition.spec.rows if row.baseline]
    gap = [f"gap to {baselines[0] if len(baselines) == 1 else 'baseline'}"] if column.gap else []
    return [Heading(text, title) for text in (f"mean {PLUS_MINUS} {kind}", *gap)]


def _cells(
    definition: TableDefinition,
    column: ColumnSpec,
    row: RowSpec,
    results: dict[str, RowResult],
    notes: _Notes,
) -> list[Cell]:
    result = results[row.id]
    if column.field is not None:
        return [_field_cell(column, result)]
    score = result.score(column)
    ours = Cell()
    if score is not None:
        marks = tuple(notes.mark(_sentence(mark)) for mark in score.marks)
        ours = replace(score_cell(column, score, result.state), notes=marks)
    gap = _gap_cell(definition, column, row, results, notes)
    if not _has_paper(definition, column):
        return [ours, gap] if column.gap else [ours]
    assert column.metric is not None
    paper = definition.paper_value(row, column.metric)
    cells = [_paper_cell(definition, column, row, notes), ours]
    if paper is None or score is None or not result.state.complete:
        cells.append(Cell())
    else:
        cells.append(Cell(number(score.mean - paper, column.decimals, signed=True)))
    if column.gap:
        cells += [_paper_gap_cell(definition, column, row), gap]
    return cells


def _field_cell(column: ColumnSpec, result: RowResult) -> Cell:
    assert column.field is not None
    values = [run.get(column.field) for run in result.runs]
    known = [float(value) for value in values if value is not None]
    if not known:
        return Cell()
    unit = _FIELD_UNITS.get(column.field.split(".")[0], "")
    mean = sum(known) / len(known) * scale(unit, column.unit)
    return Cell(number(mean, column.decimals))


def score_cell(column: ColumnSpec, score: Score, state: State) -> Cell:
    """A score with its spread and seeds; one that is not complete says so beside the number."""
    if column.spread == "stderr":
        around = "" if score.stderr is None else spread(score.stderr, column.decimals)
    else:
        around = "" if score.sd is None else spread(score.sd, column.decimals)
    # Overrides may be many: they stay in the state column.
    mark = "changed" if state.word == "changed" else str(state)
    return Cell(
        text=number(score.mean, column.decimals),
        spread=around,
        count=f"({score.n})",
        word="" if state.complete else mark,
        tone="" if state.complete else "warn",
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def find_gap(
    definition: TableDefinition, column: ColumnSpec, row: RowSpec, results: dict[str, RowResult]
) -> Gap | None:
    """Gap of a row to its baseline; None unless both are complete, measured and finite."""
    baseline = definition.baseline_of(row)
    if baseline is None or not (
        results[row.id].state.complete and results[baseline.id].state.complete
    ):
        return None
    score, other = results[row.id].score(column), results[baseline.id].score(column)
    if score is None or other is None or not math.isfinite(score.mean - other.mean):
        return None
    return compare(score, other, column)


def gap_cell(gap: Gap, decimals: int) -> Cell:
    """A gap with its sign, its own spread and its verdict in words."""
    if gap.sd is not None:
        around = spread(gap.sd, decimals)
    elif gap.item_error is not None:
        around = f"{spread(gap.item_error, decimals)} se"
    else:
        around = ""
    tone = gap.verdict if gap.verdict in ("better", "worse") else "even"
    word = gap.verdict
    if gap.n == 0:
        word += ", unpaired"
    elif not around:
        word += ", one seed"
    count = f"({gap.n})" if gap.n else ""
    return Cell(number(gap.value, decimals, signed=True), around, count, word, tone)


def _gap_cell(
    definition: TableDefinition,
    column: ColumnSpec,
    row: RowSpec,
    results: dict[str, RowResult],
    notes: _Notes,
) -> Cell:
    gap = find_gap(definition, column, row, results)
    if gap is None:
        return Cell()
    texts = []
    if gap.n == 0:
        texts.append(_UNPAIRED)
    elif gap.item_error is not None:
        texts.append(_ITEM_ERROR)
    elif gap.sd is None:
        texts.append(_ONE_SEED)
    marks = tuple(notes.mark(text) for text in texts)
    return replace(gap_cell(gap, column.decimals), notes=marks)


def _paper_cell(
    definition: TableDefinition, column: ColumnSpec, row: RowSpec, notes: _Notes
) -> Cell:
    entry = definition.paper.get((row.id, column.metric or ""))
    if entry is None:
        return Cell()
    marks = (notes.mark(_sentence(entry.note)),) if entry.note else ()
    text = ABSENT if entry.value is None else number(entry.value, column.decimals)
    return Cell(text, notes=marks)


def _paper_gap_cell(definition: TableDefinition, column: ColumnSpec, row: RowSpec) -> Cell:
    baseline = definition.baseline_of(row)
    assert column.metric is not None
    value = definition.paper_value(row, column.metric)
    other = None if baseline is None else definition.paper_value(baseline, column.metric)
    if value is None or other is None:
        return Cell()
    return Cell(number(value - other, column.decimals, signed=True))


def _reference_rows(
    definition: TableDefinition,
    columns: Sequence[ColumnSpec],
    results: dict[str, RowResult],
    notes: _Notes,
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
        if _has_paper(definition, column):
            start += 1
        source = ColumnSpec(reference.label, reference.metric, None, column.unit, column.decimals)
        found = [r.score(source) for r in results.values() if r.state.complete]
        scores = [score for score in found if score is not None]
        if not scores:
            continue
        values = [value for score in scores for value in score.values.values()]
        marks = dict.fromkeys(_sentence(mark) for score in scores for mark in score.marks)
        low, high = min(values), max(values)
        text = number(low, column.decimals)
        if text != number(high, column.decimals):
            text = f"{text} to {number(high, column.decimals)}"
        cells = [Cell("")] * width
        cells[0] = Cell(reference.label)
        cells[start] = Cell(text, notes=tuple(map(notes.mark, marks)))
        rows.append(Row(reference.metric, "reference", tuple(cells)))
    return rows
