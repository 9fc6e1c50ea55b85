"""A folder of data sets under their names on the hub, as ``datasets`` opens it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror.benchmarks import BENCHMARKS, Benchmark

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One split of one data set.

    Attributes:
        dataset: name on the hub.
        config: configuration of the data set: its variant, or a subject.
        split: as lm-eval calls it.
        rows: in the hub's form.
        source: where they come from, for the folder's README.
    """

    dataset: str
    config: str
    split: str
    rows: list[Row]
    source: str


@dataclass(frozen=True)
class Line:
    """One split of one benchmark, its subjects together: a line of the summary."""

    benchmark: Benchmark
    split: str
    subjects: int
    rows: int
    source: str


def summary(parts: Sequence[Part]) -> list[Line]:
    """What was laid out, a line a split."""
    lines = []
    for benchmark in BENCHMARKS:
        own = [part for part in parts if benchmark.has(part.dataset, part.config)]
        for split in dict.fromkeys(part.split for part in own):
            of = [part for part in own if part.split == split]
            sources = {part.source for part in of}
            source = of[0].source if len(sources) == 1 else f"{len(sources)} files"
            rows = sum(len(part.rows) for part in of)
            lines.append(Line(benchmark, split, len({p.config for p in of}), rows, source))
    return lines


def absent(parts: Sequence[Part]) -> list[Benchmark]:
    """Benchmarks that the parts do not have."""
    return [one for one in BENCHMARKS if not any(one.has(p.dataset, p.config) for p in parts)]


def make_mirror(parts: Sequence[Part], out: Path) -> None:
    """Write the mirror aside and rename it to ``out``.

    Raises:
        ValueError: ``out`` is in use.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(parts, aside)
        aside.chmod(0o755)
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_free(out: Path) -> None:
    """Refuse a folder that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; remove it or choose another")


def _write(parts: Sequence[Part], root: Path) -> None:
    """All splits under ``root``, each data set with the README that ``datasets`` reads."""
    for name in dict.fromkeys(part.dataset for part in parts):
        own = [part for part in parts if part.dataset == name]
        front = ["---", "configs:"]
        for config in dict.fromkeys(part.config for part in own):
            front += [f"- config_name: {config}", "  data_files:"]
            for part in (part for part in own if part.config == config):
                path = f"{config}/{part.split}.jsonl"
                (root / name / config).mkdir(parents=True, exist_ok=True)
                lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part.rows]
                (root / name / path).write_text("".join(lines), encoding="utf-8")
                front += [f"  - split: {part.split}", f"    path: {path}"]
        (root / name / "README.md").write_text("\n".join([*front, "---", ""]), encoding="utf-8")
    (root / "README.md").write_text(_describe(parts), encoding="utf-8")


def _describe(parts: Sequence[Part]) -> str:
    """The mirror's own README: which split came from where, under which licence."""
    missing = ", ".join(one.name for one in absent(parts)) or "none"
    lines = [
        "# Language benchmarks",
        "",
        "Made by `scripts/make_benchmark_mirror.py`. The licences are those of the data sets; do "
        "not redistribute this folder.",
        "",
        "There are only as many demonstrations as the table says: with more shots the evaluation "
        "refuses. It counts those that are evaluated rows themselves.",
        "",
        f"Absent: {missing}.",
        "",
        "| benchmark | data set | split | rows | source | licence |",
        "|---|---|---|---|---|---|",
    ]
    for line in summary(parts):
        rows = f"{line.rows} of {line.subjects} subjects" if line.subjects > 1 else str(line.rows)
        one = line.benchmark
        columns = (one.name, one.dataset, line.split, rows, line.source, one.licence)
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*lines, ""])
