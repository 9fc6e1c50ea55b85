"""The paper in miniature: every run of the demo, then its tables, figures and report.

Each table is one ``python -m moh table=NAME``, the command that the full tables take too. What is
finished is skipped, what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from moh.reporting.records import load_records
from moh.reporting.spec import load_table

Lane = tuple[tuple[str, ...], ...]  # tables one after the other, each with its own overrides

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("demo_vit", "demo_head_ratio", "demo_dit", "demo_llm", "demo_head_similarity")
# Every run takes one thread, so two lanes of runs fit on two cores. A lane keeps its order: the
# head-ratio table shares rows with the ViT table and finds them finished.
LANES: tuple[Lane, ...] = (
    (("demo_vit",), ("demo_head_ratio",), ("demo_llm",)),
    (("demo_dit",),),
)
# make demo-sweep: a seed a lane. Its table joins the report once it has been run.
SWEEP = "demo_controls"
SWEEP_LANES: tuple[Lane, ...] = (((SWEEP, "seed=0"),), ((SWEEP, "seed=1"),))


def run(*arguments: str) -> bool:
    """Run a Python command in the project; True if it succeeded."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode == 0


def run_lane(lane: Lane, overrides: Sequence[str], failed: list[str]) -> None:
    """Run tables one after the other; the names of those with a failed run go to ``failed``."""
    for table, *own in lane:
        if not run("-m", "moh", f"table={table}", *own, *overrides):
            failed.append(table)


def recorded(table: str) -> bool:
    """True if a control of a sweep, which no other table has, was run."""
    records = load_records(ROOT / "results")
    rows = load_table(table, ROOT / "experiments").spec.rows
    return any(records.of(row.experiment) for row in rows if row.control)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report-only", action="store_true", help="render what is recorded")
    parser.add_argument("--sweep", action="store_true", help="run the controls instead")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    begun = time.monotonic()
    failed: list[str] = []
    if not options.report_only:
        mirror = ROOT / "runs" / "benchmarks"
        needed = not options.sweep and not mirror.is_dir()
        if needed and not run("scripts/make_benchmark_mirror.py", str(mirror)):
            return 1
        # Two live bars would write over each other: the runs print a line now and then.
        os.environ["MOH_PLAIN_PROGRESS"] = "1"
        minutes = "ten" if options.sweep else "20"
        print(
            f"Two lanes of runs, a line each half minute; about {minutes} minutes on two cores.",
            flush=True,
        )
        lanes = SWEEP_LANES if options.sweep else LANES
        if (os.cpu_count() or 1) == 1:
            lanes = (tuple(chain.from_iterable(lanes)),)
        with ThreadPoolExecutor(len(lanes)) as pool:
            for lane in lanes:
                pool.submit(run_lane, lane, options.overrides, failed)
        took = (time.monotonic() - begun) / 60
        print(f"All runs: {took:.1f} minutes.\n", flush=True)
    tables = [*TABLES, SWEEP] if recorded(SWEEP) else TABLES
    rendered = run("scripts/render.py", *tables, "--figures", "--report", "results/demo.html")
    if failed:
        names = ", ".join(dict.fromkeys(failed))
        print(f"demo: not all runs finished in {names}; the report says which")
    return int(bool(failed) or not rendered)


if __name__ == "__main__":
    sys.exit(main())
