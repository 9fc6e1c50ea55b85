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
# make smollm2: a lane a model, each evaluating its own kept checkpoints after its training.
TUNING = "demo_smollm2"
TUNING_LANES: tuple[Lane, ...] = tuple(
    (
        (
            TUNING,
            "experiment=" + ",".join(f"demo/smollm2/{model}{at}" for at in ("_at_0", "", "_at_80")),
        ),
    )
    for model in ("mha", "moh_75")
)
# What a run of the demo is: its lanes, and what is said of their time on two cores.
KINDS = {
    "demo": (LANES, "about 20 minutes"),
    "sweep": (SWEEP_LANES, "about seven minutes"),
    "smollm2": (TUNING_LANES, "about 50 minutes"),
}


def run(*arguments: str) -> bool:
    """Run a Python command in the project; True if it succeeded."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode == 0


def run_lane(lane: Lane, overrides: Sequence[str], failed: list[str]) -> None:
    """Run tables one after the other; the names of those with a failed run go to ``failed``."""
    for table, *own in lane:
        if not run("-m", "moh", f"table={table}", *own, *overrides):
            failed.append(table)


def recorded(table: str) -> bool:
    """True if a row that no table of ``make demo`` has was run."""
    records = load_records(ROOT / "results")
    rows, others = (
        {
            row.experiment
            for name in names
            for row in load_table(name, ROOT / "experiments").spec.rows
        }
        for names in ((table,), TABLES)
    )
    return any(records.of(experiment) for experiment in rows - others if experiment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report-only", action="store_true", help="render what is recorded")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--sweep", dest="kind", action="store_const", const="sweep", help="run the controls instead"
    )
    kinds.add_argument(
        "--smollm2", dest="kind", action="store_const", const="smollm2", help="tune SmolLM2 instead"
    )
    parser.set_defaults(kind="demo")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    begun = time.monotonic()
    failed: list[str] = []
    if not options.report_only:
        mirror = ROOT / "runs" / "benchmarks"
        needed = options.kind != "sweep" and not mirror.is_dir()
        if needed and not run("scripts/make_benchmark_mirror.py", str(mirror)):
            return 1
        # Two live bars would write over each other: the runs print a line now and then.
        os.environ["MOH_PLAIN_PROGRESS"] = "1"
        lanes, minutes = KINDS[options.kind]
        print(f"Two lanes of runs, a line each half minute; {minutes} on two cores.", flush=True)
        if (os.cpu_count() or 1) == 1:
            lanes = (tuple(chain.from_iterable(lanes)),)
        with ThreadPoolExecutor(len(lanes)) as pool:
            for lane in lanes:
                pool.submit(run_lane, lane, options.overrides, failed)
        took = (time.monotonic() - begun) / 60
        print(f"All runs: {took:.1f} minutes.\n", flush=True)
    tables = [*TABLES, *(table for table in (SWEEP, TUNING) if recorded(table))]
    rendered = run("scripts/render.py", *tables, "--figures", "--report", "results/demo.html")
    if failed:
        names = ", ".join(dict.fromkeys(failed))
        print(f"demo: not all runs finished in {names}; the report says which")
    return int(bool(failed) or not rendered)


if __name__ == "__main__":
    sys.exit(main())
