"""The command behind ``scripts/render.py`` and the ``table-NAME`` targets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement

from moh.reporting.figures import samples_figure, sweep_figure
from moh.reporting.records import Records, load_records
from moh.reporting.render import RENDERERS, to_markdown, to_terminal
from moh.reporting.report import build_report, sample_grids
from moh.reporting.results import collect
from moh.reporting.spec import EXPERIMENTS_DIR, TableDefinition, load_table, table_names
from moh.reporting.style import save_png
from moh.reporting.tables import build_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Render what the arguments name.

    Returns:
        Exit status: 0; 1 where a file cannot be written; 2 for a mistake of the user.
    """
    options = _parser().parse_args(arguments)
    experiments: Path = options.experiments_dir
    try:
        names = options.tables or table_names(experiments)
        definitions = [load_table(name, experiments) for name in names]
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="render", description="Render tables and the report from the run records."
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="folders of experiments/; all")
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--experiments-dir", type=Path, default=EXPERIMENTS_DIR)
    parser.add_argument("--format", choices=("terminal", *RENDERERS), default="terminal")
    parser.add_argument(
        "--no-write", action="store_true", help="print only; write no Markdown to results/tables"
    )
    parser.add_argument("--report", type=Path, metavar="HTML", help="write the report there")
    parser.add_argument(
        "--figures", action="store_true", help="write the README's figures to results/figures"
    )
    return parser


def _render(definitions: Sequence[TableDefinition], options: argparse.Namespace) -> None:
    results_dir: Path = options.results_dir
    records = load_records(results_dir)
    console = Console()
    for definition in definitions:
        table = build_table(definition, records)
        if options.format == "terminal":
            drawn = to_terminal(table)
            wide = console.options.update(max_width=10_000)
            console.width = max(console.width, Measurement.get(console, wide, drawn).minimum)
            console.print(drawn)
        else:
            print(RENDERERS[options.format](table))
        if not options.no_write:
            path = results_dir / "tables" / f"{definition.name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_markdown(table), encoding="utf-8")
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
        The files written: ``<protocol>_sweep.png`` and ``<protocol>_samples.png``.
    """
    written = []
    for definition in definitions:
        results = collect(definition, records)
        spec = definition.spec
        drawn = {}
        if "sweep" in spec.figures:
            drawn["sweep"] = sweep_figure(definition, results)
        if "samples" in spec.figures and (grids := sample_grids(definition, results)):
            drawn["samples"] = samples_figure(definition, grids)
        for kind, figure in drawn.items():
            if figure is not None:
                path = folder / f"{spec.protocol}_{kind}.png"
                save_png(figure, path)
                written.append(path)
    return written
