"""Table definitions: ``experiments/<table>/table.yaml`` and the paper's values beside it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from moh.errors import nearest

EXPERIMENTS_DIR = Path(__file__).resolve().parents[2] / "experiments"
DIRECTIONS = {"higher": 1, "lower": -1, "none": 0}
FIGURES = ("sweep", "training_curves", "head_load", "samples")
_PAPER_FIELDS = ("row_id", "metric", "value", "source", "note")


@dataclass
class RowSpec:
    """One row: an experiment, all its seeds together."""

    id: str = MISSING
    label: str = MISSING
    experiment: str = MISSING  # run name
    baseline: bool = False
    versus: str | None = None  # id of its baseline; null: the nearest baseline row above
    blocked: str | None = None  # why it cannot be run
    tolerance: dict[str, float] = field(default_factory=dict)  # instead of the columns' own


@dataclass
class ColumnSpec:
    """One column: a metric of ``metrics.json`` or a field of ``run.json`` (exactly one)."""

    header: str = MISSING
    metric: str | None = None
    field: str | None = None  # dotted path
    unit: str = ""  # shown; "%" of a plain number is 100 times it, "M" a millionth
    decimals: int = 0
    direction: str = "none"  # higher | lower | none: which is better
    gap: bool = False  # with a column for the difference to the baseline
    spread: str = "sd"  # sd (over seeds) | stderr (over evaluated items)
    tolerance: float | None = None  # |ours - paper| that still counts as matched
    optional: bool = False  # left out while no run has it
    about: str = ""  # what is measured, for the notes of the report


@dataclass
class ReferenceSpec:
    """A measured value that no row owns (an untrained network, a unigram model)."""

    label: str = MISSING
    metric: str = MISSING
    column: str = MISSING  # metric of the column in which it stands


@dataclass
class TableSpec:
    """A table: what to show of which experiments."""

    title: str = MISSING
    caption: str = ""
    protocol: str = "paper"  # paper | demo
    family: str = MISSING
    seeds: int = 1  # wanted for each row
    loss_label: str = "training loss"
    group_label: str = "class"  # what the groups of the head load are
    rows: list[RowSpec] = MISSING
    columns: list[ColumnSpec] = MISSING
    references: list[ReferenceSpec] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)  # sweep | training_curves | head_load | ...


@dataclass(frozen=True)
class PaperValue:
    """A value that the paper prints, or None where it prints none."""

    value: float | None
    source: str
    note: str


@dataclass(frozen=True)
class TableDefinition:
    """A table's own name, its specification and the paper's values for it."""

    name: str
    spec: TableSpec
    paper: Mapping[tuple[str, str], PaperValue]  # (row id, metric)

    def baseline_of(self, row: RowSpec) -> RowSpec | None:
        """The row that ``row`` is compared with; None for a baseline itself."""
        if row.baseline:
            return None
        if row.versus is not None:
            return next(other for other in self.spec.rows if other.id == row.versus)
        above = self.spec.rows[: self.spec.rows.index(row)]
        return next((other for other in reversed(above) if other.baseline), None)

    def paper_value(self, row: RowSpec, metric: str) -> float | None:
        """The paper's number; None where it has none."""
        entry = self.paper.get((row.id, metric))
        return None if entry is None else entry.value

    def tolerance(self, row: RowSpec, column: ColumnSpec) -> float | None:
        """Stored tolerance of one cell; None where nobody stored one."""
        return row.tolerance.get(column.metric or "", column.tolerance)


def table_names(experiments_dir: Path = EXPERIMENTS_DIR) -> list[str]:
    """Names of all tables, sorted."""
    return sorted(path.parent.name for path in experiments_dir.glob("*/table.yaml"))


def load_table(name: str, experiments_dir: Path = EXPERIMENTS_DIR) -> TableDefinition:
    """Read and check one table definition.

    Raises:
        ValueError: an unknown table (with the nearest names), a misspelt key, a repeated row id,
            a baseline that is no row, or a value of the paper for a row that is not there.
    """
    names = table_names(experiments_dir)
    if name not in names:
        known = nearest(name, names) or f"; there are: {', '.join(names) or 'none'}"
        raise ValueError(f"no table {name!r}{known}")
    path = experiments_dir / name / "table.yaml"
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TableSpec), OmegaConf.load(path))
        spec = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{name}/table.yaml: {' '.join(str(error).split())}") from None
    assert isinstance(spec, TableSpec)
    _check(name, spec)
    definition = TableDefinition(name, spec, _load_paper(path.with_name("paper.csv"), spec))
    return definition


def _check(name: str, spec: TableSpec) -> None:
    where = f"{name}/table.yaml"
    ids = [row.id for row in spec.rows]
    metrics = [column.metric for column in spec.columns if column.metric]
    for kind, values in (("row id", ids), ("metric", metrics)):
        repeated = sorted({value for value in values if values.count(value) > 1})
        if repeated:
            raise ValueError(f"{where}: {kind} {', '.join(repeated)} appears more than once")
    for row in spec.rows:
        if row.versus is not None and row.versus not in ids:
            raise ValueError(
                f"{where}: row {row.id} is compared with {row.versus}, not one of {ids}"
            )
    for column in spec.columns:
        if (column.metric is None) == (column.field is None):
            raise ValueError(f"{where}: column {column.header!r} needs either metric or field")
        if column.direction not in DIRECTIONS:
            raise ValueError(
                f"{where}: direction {column.direction!r} of column {column.header!r} is not one "
                f"of {', '.join(DIRECTIONS)}"
            )
        if column.gap and not DIRECTIONS[column.direction]:
            raise ValueError(f"{where}: column {column.header!r} has a gap but no direction")
        if column.spread not in ("sd", "stderr"):
            raise ValueError(f"{where}: spread {column.spread!r} is neither sd nor stderr")
    for reference in spec.references:
        if reference.column not in metrics:
            raise ValueError(
                f"{where}: reference column {reference.column} is not one of {metrics}"
            )
    for figure in spec.figures:
        if figure not in FIGURES:
            raise ValueError(f"{where}: figure {figure!r} is not one of {', '.join(FIGURES)}")


def _load_paper(path: Path, spec: TableSpec) -> dict[tuple[str, str], PaperValue]:
    if not path.is_file():
        return {}
    ids = {row.id for row in spec.rows}
    metrics = {column.metric for column in spec.columns if column.metric}
    where = f"{path.parent.name}/paper.csv"
    values: dict[tuple[str, str], PaperValue] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _PAPER_FIELDS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{where}: no column {', '.join(missing)}")
        for line in reader:
            key = (line["row_id"], line["metric"])
            if key[0] not in ids or key[1] not in metrics:
                raise ValueError(f"{where}: {key[0]}, {key[1]} is no row and metric of the table")
            if key in values:
                raise ValueError(f"{where}: {key[0]}, {key[1]} appears more than once")
            try:
                number = float(line["value"]) if line["value"].strip() else None
            except ValueError:
                raise ValueError(f"{where}: {line['value']!r} of {key[0]} is no number") from None
            values[key] = PaperValue(number, line["source"] or "", line["note"] or "")
    return values
