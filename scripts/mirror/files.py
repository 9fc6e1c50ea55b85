"""Benchmarks from files that a user has: JSON lines or parquet, found by name and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror.benchmarks import BENCHMARKS, Benchmark
from mirror.layout import Part, Row

SUFFIXES = (".jsonl", ".json", ".parquet")
# Folders between a benchmark's and its files that mean nothing.
NEUTRAL = ("data", "default", "all")
# Shards of one split, as the hub names them.
SHARD = re.compile(r"-\d{5}-of-\d{5}.*$")
SUBJECT = "subject"
SHOWN = 5  # names in one message; the rest are counted

LAYOUT = (
    "name files or their folders after the benchmark and the split, such as "
    "hellaswag/validation.jsonl, mmlu/anatomy/test.parquet or piqa_train.jsonl"
)


@dataclass(frozen=True)
class Found:
    """A file, and what its name says it is.

    Attributes:
        config: the benchmark's own, or the subject that the file's folder names; None where the
            rows must say (a column ``subject``).
    """

    path: Path
    benchmark: Benchmark
    split: str
    config: str | None


def parts_of_files(sources: Sequence[Path]) -> tuple[list[Part], list[Path]]:
    """Checked splits from files and folders.

    Returns:
        The splits, and data files that are no part of any benchmark here.

    Raises:
        ValueError: nothing recognised, a file that does not fit, a split or a subject without
            which lm-eval cannot open a benchmark; one line.
    """
    found, unused = [], []
    for source in sources:
        if not source.exists():
            raise ValueError(f"--from {source} does not exist")
        for path, names in _data_files(source):
            (found if (one := _recognise(path, names)) else unused).append(one or path)
    if not found:
        where = ", ".join(map(str, sources))
        raise ValueError(f"no benchmark recognised in {where}: {LAYOUT}")
    parts = []
    for benchmark in BENCHMARKS:
        own = [one for one in found if one.benchmark is benchmark]
        if own:
            parts += _assemble(benchmark, own)
    return parts, unused


def _data_files(source: Path) -> Iterator[tuple[Path, list[str]]]:
    """Files with the names that may say what they are: folders, outermost first, then its own."""
    if source.is_file():
        yield source, [source.absolute().parent.name, source.stem]
        return
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        hidden = any(name.startswith(".") for name in inner.parts)
        if path.is_file() and path.suffix in SUFFIXES and not hidden:
            yield path, [source.absolute().name, *inner.parts[:-1], path.stem]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def _recognise(path: Path, names: list[str]) -> Found | None:
    stem = _plain(SHARD.sub("", names[-1]))
    folders = [_plain(name) for name in names[:-1]]
    for benchmark, depth in _candidates(stem, folders):
        splits = benchmark.known_splits
        split = next((splits[word] for word in reversed(stem.split("_")) if word in splits), None)
        if split is None:
            continue
        between = names[depth + 1 : -1]
        if benchmark.subjects is None:
            allowed = (*NEUTRAL, *map(_plain, (benchmark.config, benchmark.name)))
            if all(_plain(name) in allowed for name in between):
                return Found(path, benchmark, split, benchmark.config)
            continue
        inner = [name for name in between if _plain(name) not in NEUTRAL]
        if not inner:
            return Found(path, benchmark, split, None)
        if len(inner) == 1 and inner[0] in benchmark.subject_names:
            return Found(path, benchmark, split, inner[0])
    return None


def _candidates(stem: str, folders: list[str]) -> Iterator[tuple[Benchmark, int]]:
    """Benchmarks that a file's own name or its folders name, the innermost name first."""
    aliases = [
        (alias, benchmark)
        for benchmark in BENCHMARKS
        for alias in {
            _plain(name) for name in (benchmark.name, benchmark.config, *benchmark.called)
        }
        if alias and alias not in NEUTRAL and alias != "main"
    ]
    aliases.sort(key=lambda pair: -len(pair[0]))
    for alias, benchmark in aliases:
        if stem == alias or stem.startswith(f"{alias}_"):
            yield benchmark, len(folders)
    for depth in range(len(folders) - 1, -1, -1):
        for alias, benchmark in aliases:
            if folders[depth] == alias:
                yield benchmark, depth


def _assemble(benchmark: Benchmark, found: list[Found]) -> list[Part]:
    """Parts of one benchmark, all that lm-eval needs among them."""
    if any(one.config is not None for one in found):
        # A hub's copy holds its subjects twice: each by itself, and all together.
        found = [one for one in found if one.config is not None]
    groups: dict[tuple[str | None, str], list[Path]] = {}
    for one in found:
        groups.setdefault((one.config, one.split), []).append(one.path)
    parts = []
    for (config, split), paths in groups.items():
        if len({SHARD.sub("", str(path)) for path in paths}) > 1:
            raise ValueError(
                f"{benchmark.name}: both {paths[0]} and {paths[1]} are its {split} split; "
                "keep one, or name the files one by one"
            )
        rows = [row for path in paths for row in checked_rows(path, benchmark, config is None)]
        source = f"{paths[0].parent.name}/{paths[0].name}"
        source += f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        if config is not None:
            parts.append(Part(benchmark.dataset, config, split, rows, source))
            continue
        by_subject: dict[str, list[Row]] = {}
        for row in rows:
            by_subject.setdefault(row.pop(SUBJECT), []).append(row)
        parts += [
            Part(benchmark.dataset, subject, split, of, source)
            for subject, of in sorted(by_subject.items())
        ]
    _check_whole(benchmark, parts)
    return parts


def _check_whole(benchmark: Benchmark, parts: list[Part]) -> None:
    for split in benchmark.required:
        have = {part.config for part in parts if part.split == split}
        if not have:
            why = ""
            if split == benchmark.demonstrations:
                why = "; lm-eval opens it even for no demonstrations, where one row is enough"
            raise ValueError(f"{benchmark.name}: no {split} split among the files{why}")
        if missing := [name for name in benchmark.subject_names if name not in have]:
            raise ValueError(
                f"{benchmark.name}: the {split} split lacks {len(missing)} of "
                f"{len(benchmark.subject_names)} subjects: {_listed(missing)}"
            )


def checked_rows(path: Path, benchmark: Benchmark, with_subject: bool = False) -> list[Row]:
    """The rows of a file with the columns that the benchmark's task reads, in the hub's form.

    Raises:
        ValueError: the first thing that does not fit: file, row, column, what is needed.
    """
    wanted = [*benchmark.columns, *((SUBJECT,) if with_subject else ())]
    needs = f"{benchmark.name} needs {', '.join(wanted)}"
    raw = _read(path)
    if not raw:
        raise ValueError(f"{path} has no rows; {needs}")
    rows = []
    for number, row in enumerate(raw, 1):
        if missing := [name for name in wanted if name not in row]:
            hint = " (or a folder for each subject)" if SUBJECT in missing else ""
            where = "" if number == 1 else f" in row {number}"
            raise ValueError(f"{path} has no column {_listed(missing)}{where}; {needs}{hint}")
        kept: Row = {}
        for name, column in benchmark.columns.items():
            kept[name] = column.convert(row[name])
            if kept[name] is None:
                raise ValueError(
                    f"{path}, row {number}: column {name} is {_shown(row[name])}; "
                    f"needed: {column.needed}"
                )
        if with_subject:
            kept[SUBJECT] = _subject(path, number, row[SUBJECT], benchmark)
        rows.append(kept)
    return rows


def _subject(path: Path, number: int, value: Any, benchmark: Benchmark) -> str:
    name = str(value).strip().replace(" ", "_")
    if name not in benchmark.subject_names:
        raise ValueError(
            f"{path}, row {number}: column {SUBJECT} is {_shown(value)}; needed: one of "
            f"{_listed(benchmark.subject_names)}"
        )
    return name


def _read(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no parquet file: {_first_line(error)}") from None
        return list(table.to_pylist())
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    if path.suffix == ".json" and content.lstrip().startswith("["):
        rows = _parse(path, 1, content)
    else:
        lines = enumerate(content.splitlines(), 1)
        rows = [_parse(path, number, line) for number, line in lines if line.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number} is {_shown(row)}; needed: a row of columns")
    return rows


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no JSON: {_first_line(error)}") from None


def _shown(value: Any) -> str:
    plain = json.dumps(value, ensure_ascii=False, default=str)
    return plain if len(plain) <= 60 else f"{plain[:57]}..."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
