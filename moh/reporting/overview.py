"""What has been run of each table, counted from the records: the front page of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moh.reporting.cells import ABSENT, Cell, Heading, Row, Table
from moh.reporting.records import Records
from moh.reporting.results import collect
from moh.reporting.spec import TableDefinition, in_order
from moh.reporting.sweep_rows import with_recorded_rows

BEGIN = "<!-- overview: written by make tables -->"
END = "<!-- end of overview -->"
_HEADINGS = (
    "In the paper",
    "Table",
    "Rows",
    "Run",
    "Partial",
    "Not run",
    "Published",
)


@dataclass(frozen=True)
class Standing:
    """Rows of one table by what can be said of them; published weights are counted apart.

    Attributes:
        judged: ``matched`` and ``off`` among those that were run.
    """

    definition: TableDefinition
    rows: int
    run: int
    judged: tuple[int, int]
    incomplete: int
    not_run: int
    blocked: int
    calibrated: tuple[int, int]

    @property
    def texts(self) -> tuple[str, ...]:
        """One cell a heading."""
        run = str(self.run)
        matched, off = self.judged
        if matched or off:
            run += f" ({matched} matched, {off} off)"
        spec = self.definition.spec
        paper = spec.paper or ("demo" if spec.protocol == "demo" else "beyond it")
        idle = str(self.not_run + self.blocked)
        if self.blocked:
            idle += f" ({self.blocked} blocked)"
        done, of = self.calibrated
        calibration = f"{done} of {of}" if of else ABSENT
        return (
            paper,
            self.definition.name,
            str(self.rows),
            run,
            str(self.incomplete),
            idle,
            calibration,
        )


def standings(definitions: Sequence[TableDefinition], records: Records) -> list[Standing]:
    """What was run of each table, in the order of the paper."""
    found = []
    for definition in in_order(with_recorded_rows(each, records) for each in definitions):
        results = collect(definition, records).values()
        states = [result.state for result in results if not result.row.calibration]
        published = [result.state.complete for result in results if result.row.calibration]
        words = [state.word for state in states]
        complete = sum(state.complete for state in states)
        idle = words.count("not run") + words.count("blocked")
        found.append(
            Standing(
                definition,
                rows=len(states),
                run=complete,
                judged=(words.count("matched"), words.count("off")),
                incomplete=len(states) - complete - idle,
                not_run=words.count("not run"),
                blocked=words.count("blocked"),
                calibrated=(sum(published), len(published)),
            )
        )
    return found


def overview(found: Sequence[Standing]) -> Table:
    """The standings as a table."""
    headings = [Heading(text, numeric=index > 1) for index, text in enumerate(_HEADINGS)]
    rows = [Row(item.definition.name, "model", tuple(map(Cell, item.texts))) for item in found]
    return Table(
        name="overview",
        title="What has been run",
        caption="",
        demo=False,
        headings=tuple(headings),
        rows=tuple(rows),
    )


def overview_markdown(found: Sequence[Standing]) -> str:
    """The standings as Markdown, each table linked."""
    lines = [
        "| " + " | ".join(_HEADINGS) + " |",
        "| :--- | :--- | " + " | ".join("---:" for _ in _HEADINGS[2:]) + " |",
    ]
    for item in found:
        paper, name, *counts = item.texts
        lines.append("| " + " | ".join([paper, f"[{name}](tables/{name}.md)", *counts]) + " |")
    return "\n".join(lines)


def with_overview(text: str, found: Sequence[Standing]) -> str:
    """A page with what stands between its two marks replaced.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"results/README.md lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{overview_markdown(found)}\n{end}{after}"


def write_overview(page: Path, found: Sequence[Standing]) -> None:
    """Write the standings into a page that has a place for them; an absent page is left so."""
    if page.is_file():
        page.write_text(with_overview(page.read_text(encoding="utf-8"), found), encoding="utf-8")
