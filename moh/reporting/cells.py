"""The one in-memory form of a table, from which every rendering is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MINUS = "\u2212"
ABSENT = "\u2013"
PLUS_MINUS = "\u00b1"
STATE = "State"  # heading of the column that says what was run


@dataclass(frozen=True)
class Heading:
    """Head of one column; columns of one ``group`` stand under a common head."""

    text: str
    group: str = ""
    numeric: bool = True
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Both levels in one line."""
        return f"{self.group} {self.text}".strip()


@dataclass(frozen=True)
class Cell:
    """One cell, in parts so that a rendering may set them apart.

    Attributes:
        text: the value.
        spread: its spread with the sign, e.g. ``± 0.3``.
        count: seeds behind it, e.g. ``(3)``.
        word: a verdict or a warning in words, e.g. ``worse`` or ``partial (40 %)``.
        tone: ``better``, ``worse``, ``even`` or ``warn``; colours only, never the message.
        notes: marks of the footnotes that belong to it.
    """

    text: str = ABSENT
    spread: str = ""
    count: str = ""
    word: str = ""
    tone: str = ""
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> str:
        """All parts but the notes, in one line."""
        return " ".join(part for part in (self.text, self.spread, self.count, self.word) if part)


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        kind: ``baseline``, ``model``, ``calibration``, ``reference`` or ``section``; of a section
            the first cell alone is filled, and spans the line.
        first: False for the further lines of a row that has several.
    """

    id: str
    kind: str
    cells: tuple[Cell, ...]
    first: bool = True


@dataclass(frozen=True)
class Table:
    """A table ready to be rendered.

    Attributes:
        demo: True where the protocol is not the paper's; every rendering says so.
        notes: mark -> footnote; unmarked remarks follow in ``remarks``.
        command: that runs the table.
        pinned: columns that are repeated where a narrow terminal folds the table.
    """

    name: str
    title: str
    caption: str
    demo: bool
    headings: tuple[Heading, ...]
    rows: tuple[Row, ...]
    notes: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    command: str = ""
    pinned: int = 1

    @property
    def protocol_line(self) -> str:
        """The sentence without which a demo number must never be shown."""
        return "Demo protocol, not the paper's." if self.demo else ""


def number(value: float, decimals: int, signed: bool = False) -> str:
    """A number with thousands separators and a true minus; never a negative zero."""
    if not math.isfinite(value):
        return "not finite"
    rounded = round(value, decimals)
    sign = MINUS if rounded < 0 else "+" if signed and rounded > 0 else ""
    return f"{sign}{abs(rounded):,.{decimals}f}"


def spread(value: float, decimals: int) -> str:
    """A spread; one that rounds to nothing is shown as smaller than the last digit."""
    if value and round(value, decimals) == 0:
        return f"{PLUS_MINUS} <{number(10.0**-decimals, decimals)}"
    return f"{PLUS_MINUS} {number(value, decimals)}"
