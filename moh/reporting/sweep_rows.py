"""Rows of a sweep: made from its baseline and its ratios, and from what has been recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from moh.reporting.records import Records
from moh.sweeps import CONTROLS, Point, experiment_of, percent, point_of, points

if TYPE_CHECKING:
    from moh.reporting.spec import TableDefinition

_CONTROL_NAMES = {"random": "random heads", "fixed": "fixed heads", "paper": "paper's gates"}


@dataclass
class SweepSpec:
    """The rows that a sweep always has; further points of it appear once they are recorded."""

    base: str = MISSING  # experiment of the baseline
    ratios: list[float] = MISSING
    controls: list[str] = field(default_factory=list)
    control_ratios: list[float] | None = None  # null: every ratio
    shares: list[float] = field(default_factory=list)  # of shared heads, instead of controls


def sweep_rows(sweep: SweepSpec, recorded: Iterable[Point] = ()) -> list[dict[str, Any]]:
    """The fields of each :class:`moh.reporting.spec.RowSpec`: MHA, then ratio by ratio.

    Raises:
        ValueError: an unknown control.
    """
    for control in sweep.controls:
        if control not in CONTROLS:
            raise ValueError(f"sweep: control {control!r} is not one of {', '.join(CONTROLS)}")
    wanted = points(sweep.ratios, sweep.controls, sweep.control_ratios, sweep.shares)
    rows = [{"id": "mha", "label": "MHA", "experiment": sweep.base, "baseline": True}]
    for point in sorted({*wanted, *recorded}, key=_order):
        rows.append(
            {
                "id": point.id,
                "label": label_of(point),
                "experiment": experiment_of(sweep.base, point),
                "control": point.control,
            }
        )
    return rows


def _order(point: Point) -> tuple[float, float, int]:
    return point.ratio, point.shared or 0.0, ["", *CONTROLS].index(point.control)


def label_of(point: Point) -> str:
    """What a point is called in tables and figures."""
    label = f"MoH-{percent(point.ratio)}"
    if point.shared is not None:
        label += f", {percent(point.shared)} % shared"
    return f"{label}, {_CONTROL_NAMES[point.control]}" if point.control else label


def with_recorded_rows(definition: TableDefinition, records: Records) -> TableDefinition:
    """A sweep's table with a row for every point of it that has a record; others as they are."""
    from moh.reporting.spec import RowSpec

    sweep = definition.spec.sweep
    if sweep is None:
        return definition
    found = {point_of(record.name) for record in records.runs}
    recorded = [
        point
        for base, point in filter(None, found)
        if base == sweep.base and (point.shared is None) == (not sweep.shares)
    ]
    made = sweep_rows(sweep, recorded)
    # Rows that the table lists itself come first.
    own = {row["id"] for row in made}
    rows = [row for row in definition.spec.rows if row.id not in own]
    rows += [RowSpec(**row) for row in made]
    return replace(definition, spec=replace(definition.spec, rows=rows))
