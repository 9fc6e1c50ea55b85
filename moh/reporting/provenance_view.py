"""How the shown runs were made, gathered from their records for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moh.reporting.cells import ABSENT, number
from moh.reporting.records import Record


@dataclass(frozen=True)
class RunLine:
    """One run in the list of runs, as text."""

    run_id: str
    seed: str
    status: str
    samples: str
    training: str
    evaluation: str
    memory: str
    commit: str
    dirty: bool
    wandb: str


@dataclass(frozen=True)
class Provenance:
    """What was run, where and with what; values that differ between runs are all listed."""

    runs: tuple[RunLine, ...]
    commands: tuple[str, ...]
    machines: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    code: tuple[str, ...]
    data: tuple[str, ...]
    total: str
    last: str


def provenance(runs: Sequence[Record]) -> Provenance:
    """Gather provenance; absent entries are left out or shown as a dash."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for package, version in (run.get("versions") or {}).items():
            versions.setdefault(str(package), []).append(str(version))
    seconds = sum(float(run.get("seconds.total") or 0) for run in runs)
    return Provenance(
        runs=tuple(map(_line, runs)),
        commands=_unique(str(run.get("command")) for run in runs if run.get("command")),
        machines=_unique(_machine(run.get("hardware")) for run in runs if run.get("hardware")),
        versions=tuple((package, ", ".join(_unique(found))) for package, found in versions.items()),
        code=_unique(_code(run) for run in runs if run.get("commit")),
        data=_unique(_data(run.get("data")) for run in runs if run.get("data")),
        total=_duration(seconds),
        last=max((run.ended for run in runs), default=""),
    )


def _line(run: Record) -> RunLine:
    share = "" if run.finished else f", {100 * run.share:.0f} %"
    return RunLine(
        run_id=run.run_id,
        seed=str(run.seed),
        status=f"{run.get('status') or 'unknown'}{share}",
        samples=_count(run.get("samples")),
        training=_count(run.get("seconds.train")),
        evaluation=_count(run.get("seconds.eval")),
        memory=_count(run.get("peak_memory_mib")),
        commit=str(run.get("commit") or ABSENT)[:8],
        dirty=bool(run.get("dirty")),
        wandb=_wandb(run.get("wandb")),
    )


def _unique(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _count(value: Any) -> str:
    return ABSENT if value is None else number(float(value), 0)


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{number(seconds / 3600, 1)} h"
    return f"{number(seconds / 60, 0)} min" if seconds >= 120 else f"{number(seconds, 0)} s"


def _machine(hardware: Mapping[str, Any]) -> str:
    parts = [str(hardware.get("cpu") or "unknown processor")]
    for key, unit in (("cores", "cores"), ("threads", "threads"), ("memory_gib", "GiB memory")):
        if hardware.get(key) is not None:
            parts.append(f"{hardware[key]} {unit}")
    parts.append(str(hardware.get("gpu") or "no GPU"))
    if (hardware.get("world_size") or 1) != 1:
        parts.append(f"{hardware['world_size']} processes")
    return ", ".join(parts)


def _code(run: Record) -> str:
    return f"{run.get('commit')}{' with uncommitted changes' if run.get('dirty') else ''}"


def _data(data: Mapping[str, Any]) -> str:
    facts = [
        f"{key.replace('_', ' ')} {_fact(value)}" for key, value in data.items() if key != "name"
    ]
    return ", ".join([str(data.get("name") or "unnamed"), *facts])


def _fact(value: Any) -> str:
    """A count with separators; a long hash by its beginning."""
    if isinstance(value, int | float):
        return number(float(value), 0)
    text = str(value)
    return f"{text[:16]}..." if len(text) > 32 else text


def _wandb(wandb: Any) -> str:
    if not isinstance(wandb, Mapping):
        return ABSENT
    return str(wandb.get("path") or wandb.get("mode") or ABSENT)
