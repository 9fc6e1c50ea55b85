"""A table for the terminal: folded into blocks where it is too wide, never cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from moh.reporting.cells import ABSENT, STATE, Cell, Heading, Row, Table

_STYLES = {"better": "green", "worse": "red", "even": "", "warn": "yellow", "": ""}
_GAP = "  "


def to_terminal(table: Table, width: int = 100) -> Group:
    """A rich renderable; verdicts stay readable without colour.

    Args:
        width: characters of a line. A wider table is folded: its columns continue below, the
            first ones repeated. A column that alone is wider still is left whole.
    """
    parts: list[Text] = [Text(table.title, style="bold")]
    if table.protocol_line:
        parts.append(Text(table.protocol_line, style="yellow"))
    for columns in _blocks(table, width):
        parts.append(Text())
        for line in _block(table, columns):
            line.no_wrap, line.overflow = True, "ignore"
            parts.append(line)
    parts.append(Text())
    parts += [Text(f"[{mark}] {text}", style="dim") for mark, text in table.notes.items()]
    parts += [Text(remark, style="dim") for remark in table.remarks]
    if table.command:
        parts.append(Text(f"Run: {table.command}", style="dim"))
    return Group(*parts)


def _blocks(table: Table, width: int) -> list[list[int]]:
    """Indices of the columns of each block; a group stays together where it fits."""
    columns = list(range(len(table.headings)))
    if _width(table, columns) <= width:
        return [columns]
    pinned, rest = columns[: table.pinned], columns[table.pinned :]
    # The state is the first thing to know of a row: it does not wait for the last block.
    rest.sort(key=lambda index: table.headings[index].text != STATE)
    blocks = [list(pinned)]
    for _, members in itertools.groupby(rest, key=lambda index: _group_key(table, index)):
        together = list(members)
        fits_alone = _width(table, [*pinned, *together]) <= width
        for piece in [together] if fits_alone else [[index] for index in together]:
            if len(blocks[-1]) > len(pinned) and _width(table, [*blocks[-1], *piece]) > width:
                blocks.append(list(pinned))
            blocks[-1] += piece
    return blocks


def _group_key(table: Table, index: int) -> str | int:
    """Columns of one group have one key; each other column its own."""
    return table.headings[index].group or index


def _width(table: Table, columns: Sequence[int]) -> int:
    return sum(_widths(table, columns)) + len(_GAP) * (len(columns) - 1)


def _widths(table: Table, columns: Sequence[int]) -> list[int]:
    """Characters of each column: its widest value with the widest of what follows values, the
    longest word of its heading, and its share of a common heading."""
    widths = []
    for index in columns:
        cells = [row.cells[index] for row in table.rows if row.kind != "section"]
        numeric = table.headings[index].numeric
        whole = [cell_len(cell.text) if numeric else _text(cell).cell_len for cell in cells]
        words = map(cell_len, _heading(table.headings[index]).plain.split(" "))
        widths.append(max(max(whole, default=0) + _behind(table, index), *words))
    for start, size, group in _groups(table, columns):
        members = widths[start : start + size]
        longest = max(map(cell_len, group.split()), default=0)
        short = longest - sum(members) - len(_GAP) * (size - 1)
        widths[start + size - 1] += max(0, short)
    return widths


def _behind(table: Table, index: int) -> int:
    """Characters that spread, verdict and notes take behind the values of a column."""
    cells = [row.cells[index] for row in table.rows if row.kind != "section"]
    if not table.headings[index].numeric:
        return 0
    return max((_text(cell).cell_len - cell_len(cell.text) for cell in cells), default=0)


def _groups(table: Table, columns: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Start, size and heading of each group in a block, single columns included."""
    start = 0
    for _, members in itertools.groupby(columns, key=lambda index: _group_key(table, index)):
        size = len(list(members))
        yield start, size, table.headings[columns[start]].group
        start += size


def _block(table: Table, columns: Sequence[int]) -> list[Text]:
    widths = _widths(table, columns)
    headings = [table.headings[index] for index in columns]
    lines = _group_lines(table, columns, widths)
    wrapped = [
        _wrap(_heading(heading), width) for heading, width in zip(headings, widths, strict=True)
    ]
    height = max(map(len, wrapped))
    for level in range(height):
        line = [texts[level - height + len(texts)] if level >= height - len(texts) else Text()
                for texts in wrapped]  # fmt: skip
        lines.append(_line(line, widths, headings, "bold"))
    total = sum(widths) + len(_GAP) * (len(widths) - 1)
    lines.append(Text("\u2500" * total))
    for row in table.rows:
        lines += _row(table, row, columns, widths, headings)
    return lines


def _group_lines(table: Table, columns: Sequence[int], widths: Sequence[int]) -> list[Text]:
    """Common headings over their columns, underlined; none if the block has no group."""
    names, rules, any_group = [], [], False
    for start, size, group in _groups(table, columns):
        span = sum(widths[start : start + size]) + len(_GAP) * (size - 1)
        any_group = any_group or bool(group)
        names.append((group, span))
        rules.append(("\u2500" * span if group and size > 1 else "", span))
    if not any_group:
        return []
    wrapped = [(_wrap(Text(group), span), span) for group, span in names]
    height = max(len(texts) for texts, _ in wrapped)
    lines = []
    for level in range(height):
        pieces = []
        for texts, span in wrapped:
            below = height - len(texts)
            text = texts[level - below] if level >= below else Text()
            pieces.append(_aligned(text, span, "center"))
        lines.append(Text(_GAP).join(pieces))
    lines.append(Text(_GAP.join(rule.ljust(span) for rule, span in rules)))
    for line in lines[:-1]:
        line.stylize("bold")
    return lines


def _row(
    table: Table,
    row: Row,
    columns: Sequence[int],
    widths: Sequence[int],
    headings: Sequence[Heading],
) -> list[Text]:
    if row.kind == "section":
        return [Text(), Text(row.cells[0].text, style="bold")]
    style = {"reference": "italic", "calibration": "italic"}.get(row.kind, "")
    texts = []
    for index in columns:
        # Values of a column end at the same place, whatever stands behind some of them.
        text = _text(row.cells[index])
        behind = text.cell_len - cell_len(row.cells[index].text)
        text.pad_right(_behind(table, index) - behind)
        texts.append(text)
    # A further line of a row says nothing where a block shows none of its values.
    shown = {row.cells[index].text for index in columns[table.pinned :]}
    if not row.first and shown <= {"", ABSENT}:
        return []
    return [_line(texts, widths, headings, style)]


def _line(
    texts: Sequence[Text], widths: Sequence[int], headings: Sequence[Heading], style: str
) -> Text:
    pieces = [
        _aligned(text, width, "right" if heading.numeric else "left")
        for text, width, heading in zip(texts, widths, headings, strict=True)
    ]
    line = Text(_GAP).join(pieces)
    line.rstrip()
    line.stylize(style, 0, len(line))
    return line


def _aligned(text: Text, width: int, side: str) -> Text:
    padded = text.copy()
    missing = width - padded.cell_len
    left = {"left": 0, "right": missing, "center": missing // 2}[side]
    padded.pad_left(max(0, left))
    padded.pad_right(max(0, missing - left))
    return padded


def _wrap(text: Text, width: int) -> list[Text]:
    """Whole words on lines of ``width``; styles are not kept, notes are part of their word."""
    lines: list[str] = [""]
    for word in text.plain.split(" "):
        joined = f"{lines[-1]} {word}".strip()
        if cell_len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return [Text(line) for line in lines]


def _heading(heading: Heading) -> Text:
    return _text(Cell(heading.text, notes=heading.notes))


def _text(cell: Cell) -> Text:
    text = Text(cell.plain, style=_STYLES[cell.tone])
    if cell.notes:
        text.append(f" [{','.join(cell.notes)}]", style="dim")
    return text
