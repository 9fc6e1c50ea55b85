"""What is stored beside a table: the paper's values, and sizes of models that need no run."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PAPER_FIELDS = ("row_id", "metric", "value", "source", "note")
_MODEL_FIELDS = ("experiment", "parameters", "active", "heads", "shared", "routed_layers", "layers")


@dataclass(frozen=True)
class PaperValue:
    """A value that the paper prints, or None where it prints none.

    Attributes:
        decimals: that it is printed with.
        approximate: read off a figure by eye; its text in the file begins with ``~``.
    """

    value: float | None
    source: str
    note: str
    decimals: int = 0
    approximate: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model and sums of its head plan over layers.

    Attributes:
        active, heads, shared: heads a token, all, and shared; of MHA all heads are active and none
            is shared.
        routed_layers, layers: layers that route, and all.
    """

    parameters: int
    active: int
    heads: int
    shared: int
    routed_layers: int
    layers: int

    @property
    def activated_ratio(self) -> float:
        """Active heads over all heads."""
        return self.active / self.heads

    @property
    def shared_share(self) -> float | None:
        """Shared heads over active heads; None for MHA."""
        return self.shared / self.active if self.shared or self.routed_layers else None


def load_models(path: Path) -> dict[str, ModelFacts]:
    """Read ``models.csv``; an absent file is empty.

    Raises:
        ValueError: a missing column, a repeated experiment, or a value that is no whole number.
    """
    models: dict[str, ModelFacts] = {}
    for where, line in _lines(path, _MODEL_FIELDS):
        name = line["experiment"]
        if name in models:
            raise ValueError(f"{where}: {name} appears more than once")
        try:
            models[name] = ModelFacts(*(int(line[key]) for key in _MODEL_FIELDS[1:]))
        except ValueError as error:
            raise ValueError(f"{where}: {name}: {error}") from None
    return models


def load_paper(
    path: Path, rows: Collection[str], units: Mapping[str, str]
) -> dict[tuple[str, str], PaperValue]:
    """Read ``paper.csv``; an absent file is empty.

    Args:
        rows: row ids of the table.
        units: metric or field of each column -> its unit.

    Raises:
        ValueError: a missing column, a value for no row or column of the table, a repeated one,
            one in another unit, or one that is no number.
    """
    values: dict[tuple[str, str], PaperValue] = {}
    for where, line in _lines(path, _PAPER_FIELDS):
        key = row, metric = line["row_id"], line["metric"]
        if row not in rows or metric not in units:
            raise ValueError(f"{where}: {row}, {metric} is no row and metric of the table")
        if key in values:
            raise ValueError(f"{where}: {row}, {metric} appears more than once")
        unit = line.get("unit") or units[metric]
        if unit != units[metric]:
            raise ValueError(f"{where}: {row}, {metric} is in {unit!r}, not {units[metric]!r}")
        text = line["value"].strip()
        digits = text.removeprefix("~")
        try:
            number = float(digits) if digits else None
        except ValueError:
            raise ValueError(f"{where}: {line['value']!r} of {row} is no number") from None
        values[key] = PaperValue(
            number,
            line["source"],
            line["note"],
            decimals=len(digits.partition(".")[2]),
            approximate=text != digits,
        )
    return values


def _lines(path: Path, fields: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Lines of a CSV file with the name that messages give it; absent cells are empty."""
    if not path.is_file():
        return
    where = f"{path.parent.name}/{path.name}"
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in fields if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{where}: no column {', '.join(missing)}")
        for line in reader:
            yield where, {key: value or "" for key, value in line.items() if key is not None}
