"""One row against the paper and against its baseline, in cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moh.reporting.cells import ABSENT, Cell, number, spread
from moh.reporting.results import Gap, RowResult, Score, State, compare, scale
from moh.reporting.spec import ColumnSpec, RowSpec, TableDefinition

ARROWS = {"higher": "\u2191", "lower": "\u2193", "neither": "", "none": ""}
APPROXIMATELY = "\u2248"
# run.json fields whose recorded unit is not "a plain number".
_FIELD_UNITS = {"seconds": "s", "peak_memory_mib": "MiB"}
_ONE_SEED = (
    "One seed: the gap has no spread yet, and seeds alone may differ by as much. "
    "More seeds turn it into a measured difference."
)
_ITEM_ERROR = "The standard error (se) is over the evaluated items; an sd needs two seeds."
_UNPAIRED = "No common seed with the baseline: difference of the means, without a spread."


class Notes:
    """Footnotes in order of first use, marked a, b, c, ..."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """The mark of a sentence, a new one for a new sentence."""
        index = len(self._marks)
        letters = chr(ord("a") + index % 26) * (1 + index // 26)
        return self._marks.setdefault(sentence(text), letters)

    def texts(self) -> dict[str, str]:
        """Mark -> sentence."""
        return {mark: text for text, mark in self._marks.items()}


@dataclass(frozen=True)
class Comparison:
    """What can be said of one metric of one row; absent where it cannot."""

    paper: Cell
    ours: Cell
    delta: Cell
    paper_gap: Cell
    gap: Cell


def compare_row(
    definition: TableDefinition,
    column: ColumnSpec,
    row: RowSpec,
    results: dict[str, RowResult],
    notes: Notes,
) -> Comparison:
    """Compare a row's metric with the paper's value and with its baseline."""
    result = results[row.id]
    score = result.score(column)
    ours, delta = Cell(), Cell()
    if score is not None:
        marks = tuple(notes.mark(mark) for mark in score.marks)
        ours = replace(score_cell(column, score, result.state), notes=marks)
        paper = definition.paper_value(row, column.key)
        if paper is not None and result.state.complete:
            delta = Cell(number(score.mean - paper, column.decimals, signed=True))
    return Comparison(
        paper=_paper_cell(definition, column, row, notes),
        ours=ours,
        delta=delta,
        paper_gap=paper_gap_cell(definition, column, row) if column.gap else Cell(),
        gap=_gap_cell(definition, column, row, results, notes) if column.gap else Cell(),
    )


def compare_all(
    definition: TableDefinition,
    columns: Sequence[ColumnSpec],
    row: RowSpec,
    results: dict[str, RowResult],
    notes: Notes,
) -> tuple[Cell, dict[str, Comparison]]:
    """A row's label and its metrics; notes that all the paper's values carry go to the label."""
    found = {
        column.key: compare_row(definition, column, row, results, notes)
        for column in columns
        if column.field is None
    }
    filled = {item.paper.notes for item in found.values() if item.paper.text != ABSENT}
    if len(filled) != 1:
        return Cell(row.label), found
    bare = {key: replace(item, paper=replace(item.paper, notes=())) for key, item in found.items()}
    return Cell(row.label, notes=filled.pop()), bare


def kind_of(row: RowSpec) -> str:
    """Kind of the lines of a row, as :class:`moh.reporting.cells.Row` has it."""
    return "calibration" if row.calibration else "baseline" if row.baseline else "model"


def has_paper(definition: TableDefinition, column: ColumnSpec) -> bool:
    """True where the paper prints a value of any row for the column."""
    return any(key == column.key for _, key in definition.paper)


def has_paper_gap(definition: TableDefinition, column: ColumnSpec) -> bool:
    """True where the paper prints both a row and its baseline."""
    return any(
        paper_gap_cell(definition, column, row).text != ABSENT for row in definition.spec.rows
    )


def title_of(column: ColumnSpec) -> str:
    """Header with unit and the direction of better."""
    unit = f" ({column.unit})" if column.unit else ""
    arrow = ARROWS[column.direction]
    return f"{column.header}{unit}{' ' + arrow if arrow else ''}"


def sentence(text: str) -> str:
    """Text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def field_cell(definition: TableDefinition, column: ColumnSpec, result: RowResult) -> Cell:
    """A field of ``run.json``; without a run, what the table knows of the model itself."""
    assert column.field is not None
    values = [run.get(column.field) for run in result.runs]
    known = [float(value) for value in values if value is not None]
    if not known:
        model = definition.models.get(result.row.experiment or "")
        fact = None if model is None else getattr(model, column.field, None)
        known = [] if fact is None else [float(fact)]
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


def state_cell(state: State, notes: Notes) -> Cell:
    """A row's state; the reason of a block is a sentence and stands below the table."""
    tone = "" if state.complete else "warn"
    if state.word == "blocked" and state.detail:
        return Cell(state.word, tone=tone, notes=(notes.mark(state.detail),))
    return Cell(str(state), tone=tone)


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
    notes: Notes,
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
    definition: TableDefinition, column: ColumnSpec, row: RowSpec, notes: Notes
) -> Cell:
    entry = definition.paper.get((row.id, column.key))
    if entry is None:
        return Cell()
    own = entry.note and entry.note != definition.common_note
    marks = (notes.mark(entry.note),) if own else ()
    if entry.value is None:
        return Cell(ABSENT, notes=marks)
    about = f"{APPROXIMATELY} " if entry.approximate else ""
    return Cell(about + number(entry.value, entry.decimals), notes=marks)


def paper_gap_cell(definition: TableDefinition, column: ColumnSpec, row: RowSpec) -> Cell:
    """The paper's value of a row minus that of its baseline."""
    baseline = definition.baseline_of(row)
    entry = definition.paper.get((row.id, column.key))
    other = None if baseline is None else definition.paper.get((baseline.id, column.key))
    if entry is None or other is None or entry.value is None or other.value is None:
        return Cell()
    decimals = max(entry.decimals, other.decimals)
    return Cell(number(entry.value - other.value, decimals, signed=True))
