"""The paper in miniature: every run of the demo, then its tables, figures and report.

Each table is one ``python -m moh table=NAME``, the command that the full tables take too. What is
finished is skipped, what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("demo_vit", "demo_head_ratio", "demo_dit", "demo_llm")


def run(*arguments: str) -> bool:
    """Run a Python command in the project; True if it succeeded."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report-only", action="store_true", help="render what is recorded")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    begun, failed = time.monotonic(), []
    if not options.report_only:
        mirror = ROOT / "runs" / "benchmarks"
        if not mirror.is_dir() and not run("scripts/make_benchmark_mirror.py", str(mirror)):
            return 1
        for table in TABLES:
            print(f"\n== {table}", flush=True)
            if not run("-m", "moh", f"table={table}", *options.overrides):
                failed.append(table)
        minutes = (time.monotonic() - begun) / 60
        print(f"\n== all runs: {minutes:.1f} minutes", flush=True)
    rendered = run("scripts/render.py", *TABLES, "--figures", "--report", "results/demo.html")
    if failed:
        print(f"demo: not all runs finished in {', '.join(failed)}; the report says which")
    return int(bool(failed) or not rendered)


if __name__ == "__main__":
    sys.exit(main())
