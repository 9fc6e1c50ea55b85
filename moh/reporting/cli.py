"""The command behind ``scripts/render.py`` and the ``table-NAME`` targets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moh.reporting.figures import samples_figure
from moh.reporting.overview import overview, standings, write_overview
from moh.reporting.progress_figure import progress_figure
from moh.reporting.records import Records, load_records
from moh.reporting.render import RENDERERS, to_markdown
from moh.reporting.report import build_report, sample_grids
from moh.reporting.results import collect
from moh.reporting.spec import (
    EXPERIMENTS_DIR,
    TableDefinition,
    in_order,
    load_table,
    table_names,
)
from moh.reporting.style import save_png
from moh.reporting.sweep_figure import sweep_figure
from moh.reporting.sweep_rows import with_recorded_rows
from moh.reporting.tables import build_table
from moh.reporting.terminal import to_terminal
from moh.runner import write_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Render what the arguments name.

    Returns:
        Exit status: 0; 1 where a file cannot be written; 2 for a mistake of the user.
    """
    options = _parser().parse_args(arguments)
    experiments: Path = options.experiments_dir
    try:
        _check_results(options.results_dir, writes=not options.no_write)
        names = options.tables or table_names(experiments)
        definitions = [load_table(name, experiments) for name in names]
        if not options.tables:
            definitions = in_order(definitions)
        _render(definitions, options)
    except ValueError as error:
        print(f"render: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"render: {error.filename or options.results_dir}: {error.strerror or error}",
            file=sys.stderr,
        )
        return 1
    return 0


def _check_results(folder: Path, writes: bool) -> None:
    """Refuse, before any work, a folder without results or one that nothing can be written to."""
    if not folder.is_dir():
        raise ValueError(f"--results-dir {folder} is not a folder")
    if writes and not os.access(folder, os.W_OK):
        raise ValueError(f"--results-dir {folder}: no permission to write; --no-write prints only")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="render", description="Render tables and the report from the run records."
    )
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="folders of experiments/; without names all are written and a summary is shown",
    )
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--experiments-dir", type=Path, default=EXPERIMENTS_DIR)
    parser.add_argument("--format", choices=("terminal", *RENDERERS), default="terminal")
    parser.add_argument(
        "--no-write",
        action="store_true",
        help="print only; the terminal's format else writes Markdown to results/tables too",
    )
    parser.add_argument("--report", type=Path, metavar="HTML", help="write the report there")
    parser.add_argument(
        "--figures", action="store_true", help="write the README's figures to results/figures"
    )
    return parser


def _render(definitions: Sequence[TableDefinition], options: argparse.Namespace) -> None:
    results_dir: Path = options.results_dir
    records = load_records(results_dir)
    definitions = [with_recorded_rows(definition, records) for definition in definitions]
    console = Console()
    tables = [build_table(definition, records) for definition in definitions]
    if not options.tables and options.format == "terminal":
        found = standings(definitions, records)
        console.print(to_terminal(overview(found), console.width), crop=False)
        if not options.no_write:
            write_overview(results_dir / "README.md", found)
    for table in tables:
        if options.format != "terminal":
            print(RENDERERS[options.format](table))
        elif options.tables:
            console.print(to_terminal(table, console.width), crop=False)
            console.print()
    if options.format == "terminal" and not options.no_write:
        folder = results_dir / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        for table in tables:
            write_text(folder / f"{table.name}.md", to_markdown(table))
    for problem in records.problems:
        print(f"render: {problem}", file=sys.stderr)
    if options.figures:
        for path in write_figures(definitions, records, results_dir / "figures"):
            print(path)
    if options.report is not None:
        names = [definition.name for definition in definitions]
        print(build_report(results_dir, options.report, names, options.experiments_dir))


def write_figures(
    definitions: Sequence[TableDefinition], records: Records, folder: Path
) -> list[Path]:
    """Write the figures that stand in the README, those with records behind them.

    Returns:
        The files written: ``<protocol>_sweep.png`` and ``<protocol>_samples.png``, and
        ``<table>.png`` for a table that is a sweep by itself or shows scores along training.
    """
    written = []
    for definition in definitions:
        results = collect(definition, records)
        spec = definition.spec
        drawn = {}
        if "sweep" in spec.figures:
            drawn["sweep"] = sweep_figure(definition, results)
        if "progress" in spec.figures:
            drawn["progress"] = progress_figure(definition, results)
        if "samples" in spec.figures and (grids := sample_grids(definition, results)):
            drawn["samples"] = samples_figure(definition, grids)
        for kind, figure in drawn.items():
            if figure is not None:
                own = spec.sweep is not None or kind == "progress"
                name = definition.name if own else f"{spec.protocol}_{kind}"
                path = folder / f"{name}.png"
                save_png(figure, path)
                written.append(path)
    return written
