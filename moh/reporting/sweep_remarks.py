"""What a sweep's controls say: each against MoH at its own ratio, in a sentence under the table."""

from __future__ import annotations

from collections.abc import Mapping

from moh.reporting.cells import number, spread
from moh.reporting.results import RowResult, compare
from moh.reporting.spec import TableDefinition
from moh.sweeps import point_of


def control_remarks(definition: TableDefinition, results: Mapping[str, RowResult]) -> list[str]:
    """One sentence for each control whose MoH is measured too; empty for other tables.

    The table's own gaps are to MHA; whether the router's choice matters is the gap to MoH with the
    same number of heads.
    """
    column = next((column for column in definition.spec.columns if column.gap), None)
    if column is None or definition.spec.sweep is None:
        return []
    rows = {row.id: row for row in definition.spec.rows}
    remarks = []
    for row in definition.spec.rows:
        found = point_of(row.experiment or "") if row.control else None
        model = rows.get(found[1].without_control.id) if found else None
        if model is None:
            continue
        pair = [results[row.id], results[model.id]]
        score, other = (result.score(column) for result in pair)
        if score is None or other is None or not all(result.state.complete for result in pair):
            continue
        gap = compare(score, other, column)
        around = "" if gap.sd is None else f" {spread(gap.sd, column.decimals)}"
        remarks.append(
            f"{row.label} against {model.label}: {number(gap.value, column.decimals, signed=True)}"
            f"{around} ({gap.n}) {gap.verdict}."
        )
    return remarks
