"""A table as Markdown, HTML or LaTeX (booktabs); for the terminal see ``terminal.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache

from jinja2 import Environment, PackageLoader

from moh.reporting.cells import Cell, Heading, Row, Table

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
    "\u2248": r"$\approx$",
    "\u25b2": r"$\bigtriangleup$",
    "\u25bc": r"$\bigtriangledown$",
    "\u25cb": r"$\circ$",
}
_FULL_PAGE = 8  # columns of LaTeX from which a table takes the width of both columns of a page


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
    for row in table.rows:
        if row.kind == "section":
            first, *others = row.cells
            lines.append(_pipes([f"**{escape_markdown(first.text)}**", *("" for _ in others)]))
        else:
            lines.append(_pipes(cell(item) for item in row.cells))
    for mark, text in table.notes.items():
        lines += ["", f"<sup>{mark}</sup> {escape_markdown(text)}"]
    for remark in table.remarks:
        lines += ["", escape_markdown(remark)]
    lines += ["", f"Run: `{table.command}`. Render: `make table-{table.name}`.", ""]
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
    wide = len(table.headings) > _FULL_PAGE
    environment = "table*" if wide else "table"
    lines = [
        f"% {table.name}; needs \\usepackage{{booktabs}}{' and {graphicx}' if wide else ''}.",
        rf"\begin{{{environment}}}",
        r"\centering",
        rf"\caption{{{escape_latex(_caption(table))}}}",
        rf"\label{{tab:{table.name}}}",
        *([r"\resizebox{\textwidth}{!}{%"] if wide else []),
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
    ]
    if rules:
        lines += [" & ".join(first) + r" \\", "".join(rules)]
    lines += [" & ".join(map(cell, table.headings)) + r" \\", r"\midrule"]
    for index, row in enumerate(table.rows):
        lines += _latex_row(row, table.rows[index - 1] if index else None, cell)
    lines += [r"\bottomrule", r"\end{tabular}" + ("}" if wide else "")]
    for mark, text in table.notes.items():
        lines += ["", rf"\footnotesize \textsuperscript{{{mark}}} {escape_latex(text)}"]
    for remark in table.remarks:
        lines += ["", rf"\footnotesize {escape_latex(remark)}"]
    return "\n".join([*lines, rf"\end{{{environment}}}", ""])


def _latex_row(row: Row, above: Row | None, cell: Callable[[Cell], str]) -> list[str]:
    """A line of the table, with what sets it apart from the one above."""
    if row.kind == "section":
        title = escape_latex(row.cells[0].text)
        title = rf"\multicolumn{{{len(row.cells)}}}{{l}}{{\textit{{{title}}}}}"
        return [*([r"\midrule"] if above else []), title + r" \\"]
    stacked = row.first and above is not None and not above.first
    return [*([r"\addlinespace"] if stacked else []), " & ".join(map(cell, row.cells)) + r" \\"]


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
