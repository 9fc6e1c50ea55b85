"""A table as Markdown, HTML, LaTeX (booktabs) or for the terminal (rich)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache

from jinja2 import Environment, PackageLoader
from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from moh.reporting.cells import Cell, Heading, Table

_MARKDOWN_SPECIAL = "\\`*_{}[]<>#|~$&"
_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "\u2212": r"$-$",
    "\u2013": "--",
    "\u00b1": r"$\pm$",
    "\u00d7": r"$\times$",
    "\u2191": r"$\uparrow$",
    "\u2193": r"$\downarrow$",
}
_TERMINAL_STYLES = {"better": "green", "worse": "red", "even": "", "warn": "yellow", "": ""}


@cache
def environment() -> Environment:
    """The templates of the report; every inserted value is escaped."""
    return Environment(
        loader=PackageLoader("moh.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line, also inside a table."""
    return "".join(f"\\{c}" if c in _MARKDOWN_SPECIAL else c for c in " ".join(text.split()))


def escape_latex(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)


def to_markdown(table: Table) -> str:
    """A section of Markdown: title, caption, protocol, table, notes and how to rerun it."""

    def cell(item: Cell) -> str:
        return escape_markdown(item.plain) + sup(item.notes)

    def heading(item: Heading) -> str:
        text = "<br>".join(escape_markdown(text) for text in (item.group, item.text) if text)
        return text + sup(item.notes)

    def sup(notes: tuple[str, ...]) -> str:
        return f" <sup>{', '.join(notes)}</sup>" if notes else ""

    lines = [f"# {escape_markdown(table.title)}", ""]
    if table.protocol_line:
        lines += [f"**{table.protocol_line}**", ""]
    if table.caption:
        lines += [escape_markdown(table.caption), ""]
    lines += [
        _pipes(heading(item) for item in table.headings),
        _pipes("---:" if item.numeric else ":---" for item in table.headings),
    ]
    lines += [_pipes(cell(item) for item in row.cells) for row in table.rows]
    for mark, text in table.notes.items():
        lines += ["", f"<sup>{mark}</sup> {escape_markdown(text)}"]
    for remark in table.remarks:
        lines += ["", escape_markdown(remark)]
    lines += [
        "",
        f"Run: `python -m moh table={table.name}`. Render: `make table-{table.name}`.",
        "",
    ]
    return "\n".join(lines)


def to_html(table: Table) -> str:
    """A ``<figure>`` with the table and its notes, for the report or any other page."""
    template = environment().get_template("table.html.j2")
    return template.render(table=table, groups=list(_groups(table)))


def to_latex(table: Table) -> str:
    """A ``table`` environment for booktabs; protocol and notes stand in it."""

    def cell(item: Cell | Heading) -> str:
        marks = rf"\textsuperscript{{{','.join(item.notes)}}}" if item.notes else ""
        return escape_latex(item.plain if isinstance(item, Cell) else item.text) + marks

    align = "".join("r" if item.numeric else "l" for item in table.headings)
    first, rules, start = [], [], 1
    for group, size in _groups(table):
        if group:
            first.append(rf"\multicolumn{{{size}}}{{c}}{{{escape_latex(group)}}}")
            rules.append(rf"\cmidrule(lr){{{start}-{start + size - 1}}}")
        else:
            first.append(" & " * (size - 1))
        start += size
    lines = [
        "% Needs \\usepackage{booktabs}.",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(_caption(table))}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
    ]
    if rules:
        lines += [" & ".join(first) + r" \\", "".join(rules)]
    lines += [" & ".join(map(cell, table.headings)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(cell, row.cells)) + r" \\" for row in table.rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    for mark, text in table.notes.items():
        lines += ["", rf"\footnotesize \textsuperscript{{{mark}}} {escape_latex(text)}"]
    for remark in table.remarks:
        lines += ["", rf"\footnotesize {escape_latex(remark)}"]
    return "\n".join([*lines, r"\end{table}", ""])


def to_terminal(table: Table) -> Group:
    """A rich renderable; verdicts stay readable without colour."""
    heads = [
        Text(f"{heading.group}\n" if heading.group else "").append(
            _terminal_cell(Cell(heading.text, notes=heading.notes))
        )
        for heading in table.headings
    ]
    body = [[_terminal_cell(cell) for cell in row.cells] for row in table.rows]
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading, *column in zip(heads, *body, strict=True):
        # A number cut to fit a narrow terminal would be another number.
        widest = max(line.cell_len for text in (heading, *column) for line in text.split())
        drawn.add_column(heading, min_width=widest, no_wrap=True)
    for heading, drawn_column in zip(table.headings, drawn.columns, strict=True):
        drawn_column.justify = "right" if heading.numeric else "left"
    for row, texts in zip(table.rows, body, strict=True):
        drawn.add_row(*texts, style="italic" if row.kind == "reference" else None)
    parts: list[Text | RichTable] = [Text(table.title, style="bold")]
    if table.protocol_line:
        parts.append(Text(table.protocol_line, style="yellow"))
    parts.append(drawn)
    parts += [Text(f"[{mark}] {text}", style="dim") for mark, text in table.notes.items()]
    parts += [Text(remark, style="dim") for remark in table.remarks]
    return Group(*parts)


def _terminal_cell(cell: Cell) -> Text:
    text = Text(cell.plain, style=_TERMINAL_STYLES[cell.tone])
    if cell.notes:
        text.append(f" [{','.join(cell.notes)}]", style="dim")
    return text


RENDERERS: dict[str, Callable[[Table], str]] = {
    "markdown": to_markdown,
    "html": to_html,
    "latex": to_latex,
}


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _caption(table: Table) -> str:
    return " ".join(
        part for part in (f"{table.title}.", table.protocol_line, table.caption) if part
    )


def _groups(table: Table) -> Iterable[tuple[str, int]]:
    """Runs of headings under one common head, with their widths."""
    for group, members in itertools.groupby(table.headings, key=lambda item: item.group):
        yield group, len(list(members))
