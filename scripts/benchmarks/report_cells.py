"""Cells of the page's tables, and its table of generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Record = dict[str, Any]

GENERATION = (
    ("context", True),
    ("batch", True),
    ("heads, key heads", True),
    ("active", True),
    ("", False),
    ("MHA ms", True),
    ("tokens a second", True),
    ("MHA, room ms", True),
    ("dense", True),
    ("sparse", True),
    ("limit", True),
    ("auto", True),
    ("auto over MHA", True),
    ("auto over MHA, room", True),
    ("auto, tokens a second", True),
)


def time_cell(milliseconds: float) -> str:
    """Milliseconds with three digits or so."""
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:,.{digits}f}"


def spread_cell(record: Record, name: str) -> str:
    """Ratio with half the distance of its quartiles."""
    low, high = record["quartiles_over_mha"][name]
    return f"{record[f'{name}_over_mha']:.2f} ± {(high - low) / 2:.2f}"


def generation_table(rows: Sequence[Record]) -> Iterator[str]:
    """The page's table of generation."""
    yield "| " + " | ".join(name for name, _ in GENERATION) + " |"
    yield "|" + "|".join("---:" if is_number else "---" for _, is_number in GENERATION) + "|"
    for record in rows:
        yield "| " + " | ".join(generation_cells(record)) + " |"


def generation_cells(record: Record) -> list[str]:
    """A row of that table."""
    said = ["static cache"] * (record["cache"] == "static") + ["first token"] * record["first"]
    roomy = record.get("reserved_ms")
    return [
        f"{record['context']:,}",
        str(record["batch"]),
        f"{record['heads']}, {record['key_heads']}",
        f"{100 * record['activated_ratio']:.0f} %",
        ", ".join(said),
        time_cell(record["mha_ms"]),
        _rate(record, "mha"),
        "–" if roomy is None else time_cell(roomy),
        f"{record['dense_over_mha']:.2f}",
        spread_cell(record, "sparse"),
        f"{record['limit']:.2f}",
        record["auto"],
        spread_cell(record, "auto"),
        "–" if roomy is None else f"{record['auto_over_reserved']:.2f}",
        _rate(record, "auto"),
    ]


def _rate(record: Record, name: str) -> str:
    """Tokens a second of all sequences; none where the prompt's time is in it."""
    if record["first"]:
        return "–"
    rate = 1e3 * record["batch"] / record[f"{name}_ms"]
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
