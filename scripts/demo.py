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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("demo_vit", "demo_head_ratio", "demo_dit", "demo_llm")
# Every run takes one thread, so two lanes of runs fit on two cores. A lane keeps its order: the
# head-ratio table shares rows with the ViT table and finds them finished.
LANES = (("demo_vit", "demo_head_ratio", "demo_llm"), ("demo_dit",))


def run(*arguments: str) -> bool:
    """Run a Python command in the project; True if it succeeded."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode == 0


def run_lane(tables: Sequence[str], overrides: Sequence[str], failed: list[str]) -> None:
    """Run tables one after the other; the names of those with a failed run go to ``failed``."""
    for table in tables:
        if not run("-m", "moh", f"table={table}", *overrides):
            failed.append(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report-only", action="store_true", help="render what is recorded")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    begun = time.monotonic()
    failed: list[str] = []
    if not options.report_only:
        mirror = ROOT / "runs" / "benchmarks"
        if not mirror.is_dir() and not run("scripts/make_benchmark_mirror.py", str(mirror)):
            return 1
        # Two live bars would write over each other: the runs print a line now and then.
        os.environ["MOH_PLAIN_PROGRESS"] = "1"
        print(
            "Two lanes of runs, a line each half minute; about 20 minutes on two cores.", flush=True
        )
        lanes = LANES if (os.cpu_count() or 1) > 1 else (TABLES,)
        with ThreadPoolExecutor(len(lanes)) as pool:
            for lane in lanes:
                pool.submit(run_lane, lane, options.overrides, failed)
        minutes = (time.monotonic() - begun) / 60
        print(f"All runs: {minutes:.1f} minutes.\n", flush=True)
    rendered = run("scripts/render.py", *TABLES, "--figures", "--report", "results/demo.html")
    if failed:
        print(f"demo: not all runs finished in {', '.join(failed)}; the report says which")
    return int(bool(failed) or not rendered)


if __name__ == "__main__":
    sys.exit(main())
