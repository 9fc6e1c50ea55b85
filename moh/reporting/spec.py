"""Table definitions: ``experiments/<table>/table.yaml`` and the paper's values beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from moh.errors import nearest
from moh.reporting.stored import ModelFacts, PaperValue, load_models, load_paper
from moh.reporting.sweep_rows import SweepSpec, sweep_rows

EXPERIMENTS_DIR = Path(__file__).resolve().parents[2] / "experiments"
DIRECTIONS = {"higher": 1, "lower": -1, "neither": 0, "none": 0}
FIGURES = ("sweep", "progress", "training_curves", "head_load", "head_similarity", "samples")
LAYOUTS = ("wide", "stacked")
FAMILIES = ("ViT", "DiT", "LLM")  # in the paper's order


@dataclass
class RowSpec:
    """One row: an experiment, all its seeds together."""

    id: str = MISSING
    label: str = MISSING
    experiment: str | None = None  # run name; null: nothing that is run by the entry point
    section: str = ""  # rows in a row with the same one stand under it
    calibration: bool = False  # published weights through our evaluators: no gap, no row of ours
    baseline: bool = False
    versus: str | None = None  # id of its baseline; null: the nearest baseline row above
    blocked: str | None = None  # why it cannot be run
    alone: bool = False  # run by its own command, not with the table; so are published weights
    needs: list[str] = field(default_factory=list)  # overrides that are no change of protocol here
    at: float | None = None  # how far it is trained, for the progress figure
    curve: str = ""  # its line in that figure
    control: str = ""  # in a sweep: which control it is, empty for the models themselves
    tolerance: dict[str, float] = field(default_factory=dict)  # instead of the columns' own


@dataclass
class ColumnSpec:
    """One column: a metric of ``metrics.json`` or a field of ``run.json`` (exactly one)."""

    header: str = MISSING
    metric: str | None = None
    mean_of: list[str] = field(default_factory=list)  # metrics whose mean the metric is
    head_load: str | None = (
        None  # of the last routed layer's head load the metric is min | mean | max
    )
    field: str | None = None  # dotted path
    unit: str = ""  # shown; "%" of a plain number is 100 times it, "M" a millionth
    decimals: int = 0
    direction: str = "none"  # higher | lower | neither: which is better; none: not compared
    gap: bool = False  # with a column for the difference to the baseline
    spread: str = "sd"  # sd (over seeds) | stderr (over evaluated items)
    tolerance: float | None = None  # |ours - paper| that still counts as matched
    tolerance_percent: float | None = None  # the same as a share of the paper's value
    optional: bool = False  # left out while no run has it
    about: str = ""  # what is measured, for the notes of the report

    @property
    def key(self) -> str:
        """What names the column in ``paper.csv``: its metric, or its field."""
        return self.metric or self.field or ""


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
    paper: str = ""  # what it is in the paper ("Table 1"); empty: not of the paper
    layout: str = "wide"  # wide: a line a row | stacked: paper, ours and gaps below each other
    command: str = ""  # that runs it; empty: python -m moh table=NAME
    protocol: str = "paper"  # paper | demo
    family: str = MISSING
    seeds: int = 1  # wanted for each row
    loss_label: str = "training loss"
    progress_label: str = "samples"  # what the rows' `at` counts
    group_label: str = "class"  # what the groups of the head load are
    rows: list[RowSpec] = field(default_factory=list)
    sweep: SweepSpec | None = None  # further rows, made from a baseline
    columns: list[ColumnSpec] = MISSING
    references: list[ReferenceSpec] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)  # sweep | progress | training_curves | ...


@dataclass(frozen=True)
class TableDefinition:
    """A table's own name, its specification and what is known without a run.

    Attributes:
        paper: (row id, metric or field) -> the paper's value.
        models: experiment -> sizes of its model.
    """

    name: str
    spec: TableSpec
    paper: Mapping[tuple[str, str], PaperValue]
    models: Mapping[str, ModelFacts] = field(default_factory=dict)

    @property
    def experiments(self) -> list[str]:
        """What the table's command runs."""
        rows = [row for row in self.spec.rows if not (row.calibration or row.alone)]
        return list(dict.fromkeys(row.experiment for row in rows if row.experiment))

    @property
    def command(self) -> str:
        """What a user types to run it."""
        return self.spec.command or f"python -m moh table={self.name}"

    @property
    def common_note(self) -> str:
        """A note that all the paper's values of the table have; empty if they differ."""
        notes = {entry.note for entry in self.paper.values()}
        return notes.pop() if len(notes) == 1 and len(self.paper) > 1 else ""

    def baseline_of(self, row: RowSpec) -> RowSpec | None:
        """The row that ``row`` is compared with; None for a baseline and published weights."""
        if row.baseline or row.calibration:
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
        """Stored tolerance of one cell, in the column's unit; None where nobody stored one."""
        if column.key in row.tolerance:
            return row.tolerance[column.key]
        paper = self.paper_value(row, column.key)
        if column.tolerance_percent is not None and paper is not None:
            return abs(paper) * column.tolerance_percent / 100
        return column.tolerance


def table_names(experiments_dir: Path = EXPERIMENTS_DIR) -> list[str]:
    """Names of all tables, sorted."""
    return sorted(path.parent.name for path in experiments_dir.glob("*/table.yaml"))


def in_order(definitions: Iterable[TableDefinition]) -> list[TableDefinition]:
    """Tables in the order of the paper (Table 1, ..., Table A, ..., Figure 1, ...), then others."""

    def place(definition: TableDefinition) -> tuple[bool, bool, bool, bool, int, str, int, str]:
        spec = definition.spec
        kind, number = (*spec.paper.split(), "", "")[:2]
        digits = "".join(itertools.takewhile(str.isdigit, number))
        return (
            not kind,
            spec.protocol == "demo",
            kind != "Table",
            not digits,
            int(digits or 0),
            number,
            FAMILIES.index(spec.family) if spec.family in FAMILIES else len(FAMILIES),
            definition.name,
        )

    return sorted(definitions, key=place)


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
    if spec.sweep is not None:
        spec.rows += [RowSpec(**row) for row in sweep_rows(spec.sweep)]
    _check(name, spec)
    paper = load_paper(
        path.with_name("paper.csv"),
        {row.id for row in spec.rows},
        {column.key: column.unit for column in spec.columns},
    )
    models = load_models(experiments_dir / "models.csv")
    return TableDefinition(name, spec, paper, models)


def _check(name: str, spec: TableSpec) -> None:
    where = f"{name}/table.yaml"
    ids = [row.id for row in spec.rows]
    metrics = [column.metric for column in spec.columns if column.metric]
    if spec.layout not in LAYOUTS:
        raise ValueError(f"{where}: layout {spec.layout!r} is not one of {', '.join(LAYOUTS)}")
    for kind, values in (("row id", ids), ("metric", metrics)):
        repeated = sorted({value for value in values if values.count(value) > 1})
        if repeated:
            raise ValueError(f"{where}: {kind} {', '.join(repeated)} appears more than once")
    for row in spec.rows:
        if row.versus is not None and row.versus not in ids:
            raise ValueError(
                f"{where}: row {row.id} is compared with {row.versus}, not one of {ids}"
            )
        if "progress" in spec.figures and (row.at is None or not row.curve):
            raise ValueError(f"{where}: row {row.id} needs at and curve for the progress figure")
        if row.experiment is None and not row.blocked:
            raise ValueError(f"{where}: row {row.id} has no experiment and does not say why")
    for column in spec.columns:
        if (column.metric is None) == (column.field is None):
            raise ValueError(f"{where}: column {column.header!r} needs either metric or field")
        if column.direction not in DIRECTIONS:
            raise ValueError(
                f"{where}: direction {column.direction!r} of column {column.header!r} is not one "
                f"of {', '.join(DIRECTIONS)}"
            )
        if column.gap and column.direction == "none":
            raise ValueError(f"{where}: column {column.header!r} has a gap but no direction")
        if column.spread not in ("sd", "stderr"):
            raise ValueError(f"{where}: spread {column.spread!r} is neither sd nor stderr")
        if column.head_load not in (None, "min", "mean", "max"):
            raise ValueError(f"{where}: head_load {column.head_load!r} is not min, mean or max")
    for reference in spec.references:
        if reference.column not in metrics:
            raise ValueError(
                f"{where}: reference column {reference.column} is not one of {metrics}"
            )
    for figure in spec.figures:
        if figure not in FIGURES:
            raise ValueError(f"{where}: figure {figure!r} is not one of {', '.join(FIGURES)}")
