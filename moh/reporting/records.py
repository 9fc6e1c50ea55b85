"""Run records: what a run left under ``results/runs/``, read and never written here.

A record may be incomplete (a run stopped half-way, an evaluation not done yet). Whatever is absent
reads as None or empty; whatever is unreadable becomes a line in :attr:`Records.problems`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# Settings that move no number of the protocol: where a run lies, how it is watched and split.
_NEUTRAL_KEYS = (
    "experiment",
    "seed",
    "name",
    "protocol",
    "mode",
    "dry_run",
    "table",
    "runs_dir",
    "results_dir",
    "logger",
    "launcher",
    "hydra",
    *("family", "base", "ratios", "controls", "control_ratios", "shares", "seeds"),  # of a sweep
    "data.root",
    "eval.data_root",
    "eval.features_path",
    "eval.reference",
    "eval.save_samples",
    "eval.vae",
    "eval.similarity_samples",
    "trainer.threads",
    "trainer.device",
    "trainer.device_batch",
    "trainer.checkpoint_every",
    "trainer.keep_at",
    "trainer.log_every",
)


@dataclass(frozen=True)
class Metric:
    """One measured number.

    Attributes:
        value: in ``unit``; an empty unit is a plain number (a share between 0 and 1, a distance).
        stderr: standard error over the evaluated items, where the metric has one.
        marks: restrictions of the protocol that must be shown beside the value.
    """

    value: float
    unit: str = ""
    n: int | None = None
    stderr: float | None = None
    higher_is_better: bool | None = None
    protocol: str = ""
    marks: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Metric:
        """Read one entry of ``metrics.json``; keys that are absent keep their defaults."""
        stderr = data.get("stderr")
        return cls(
            value=float(data["value"]),
            unit=str(data.get("unit") or ""),
            n=data.get("n"),
            stderr=None if stderr is None else float(stderr),
            higher_is_better=data.get("higher_is_better"),
            protocol=str(data.get("protocol") or ""),
            marks=tuple(data.get("marks") or ()),
        )


@dataclass(frozen=True)
class HeadLoad:
    """Share of tokens that select each routed head, layer by layer.

    Attributes:
        layers: module name of each routed layer, first layer first.
        overall: one list a layer, one load a routed head.
        groups: class or task name -> the same for its items alone.
        axis: what else the tokens were counted by ("noise level"); empty for nothing.
        axis_groups: its groups, as ``groups``.
    """

    layers: tuple[str, ...]
    top_k: tuple[int, ...]
    num_routed: tuple[int, ...]
    overall: tuple[tuple[float, ...], ...]
    groups: Mapping[str, tuple[tuple[float, ...], ...]]
    axis: str = ""
    axis_groups: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    def uniform(self, layer: int) -> float:
        """Load of every head of a layer if the router balanced perfectly: ``top_k / E``."""
        return self.top_k[layer] / self.num_routed[layer]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadLoad | None:
        """Read ``head_load.json``; layers without routed heads are left out, None if all are."""

        def rows(loads: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(map(float, loads[index])) for index in kept)

        kept = [index for index, routed in enumerate(data["num_routed"]) if routed > 0]
        if not kept:
            return None
        return cls(
            layers=tuple(str(data["layers"][index]) for index in kept),
            top_k=tuple(int(data["top_k"][index]) for index in kept),
            num_routed=tuple(int(data["num_routed"][index]) for index in kept),
            overall=rows(data["overall"]),
            groups={str(name): rows(loads) for name, loads in data.get("groups", {}).items()},
            axis=str(data.get("axis") or ""),
            axis_groups={
                str(name): rows(loads) for name, loads in data.get("axis_groups", {}).items()
            },
        )


@dataclass(frozen=True)
class HeadSimilarity:
    """How alike the heads of each layer are.

    Attributes:
        layers: module name of each attention layer, first layer first.
        matrices: ``pattern``, ``output`` and ``gated_output`` -> [layer][head][head].
        samples: what was evaluated, in words.
    """

    layers: tuple[str, ...]
    matrices: Mapping[str, Sequence[Sequence[Sequence[float]]]]
    samples: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadSimilarity:
        """Read ``head_similarity.json``."""
        layers = tuple(str(name) for name in data["layers"])
        matrices = {kind: data[kind] for kind in ("pattern", "output", "gated_output")}
        for matrix in matrices.values():
            if len(matrix) != len(layers):
                raise ValueError("a matrix for each layer is needed")
        return cls(layers, matrices, str(data.get("samples") or ""))


@dataclass(frozen=True)
class Record:
    """One run folder: ``run.json`` plus whatever else the run has left."""

    folder: Path
    run: Mapping[str, Any]
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """Path of the run below ``runs/``."""
        return str(self.run["run_id"])

    @property
    def name(self) -> str:
        """Experiment that the run belongs to, seeds aside."""
        return str(self.run["name"])

    @property
    def protocol(self) -> str:
        """``paper``, ``demo`` or ``smoke``."""
        return str(self.run.get("protocol", "smoke"))

    @property
    def seed(self) -> int:
        """Seed of initialisation, data order and noise."""
        return int(self.run.get("seed", 0))

    @property
    def finished(self) -> bool:
        """True where the whole sample budget was trained, or given weights were scored."""
        return self.run.get("status") in ("finished", "evaluated")

    @property
    def share(self) -> float:
        """Trained share of the sample budget, 0..1."""
        return float(self.run.get("share", 1.0 if self.finished else 0.0))

    @property
    def ended(self) -> str:
        """ISO time of the last word of the run; empty if unknown."""
        return str(self.run.get("finished") or self.run.get("started") or "")

    def get(self, path: str) -> Any:
        """Value of ``run.json`` by dotted path (``seconds.train``); None where absent."""
        value: Any = self.run
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        return value

    def changes(self, needed: Sequence[str] = ()) -> tuple[str, ...]:
        """Overrides that make this another protocol than the experiment's own.

        Heads count as a change unless the run took a name of its own from them.

        Args:
            needed: keys that the experiment cannot do without.
        """
        overrides = [str(item) for item in self.run.get("overrides") or ()]
        pairs = {item.lstrip("+~").partition("=")[0]: item for item in overrides}
        experiment = pairs.get("experiment", "").partition("=")[2]
        neutral = (*_NEUTRAL_KEYS, *needed, *([] if experiment == self.name else ["heads"]))
        return tuple(
            item
            for key, item in pairs.items()
            if not any(key == name or key.startswith((f"{name}.", f"{name}/")) for name in neutral)
        )

    @property
    def configuration(self) -> str:
        """Equal for runs that differ in nothing but the seed."""
        return str(self.run.get("config_hash") or f"{self.protocol} {self.changes()}")

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """Logged training steps in order of samples; a torn last line is left out."""
        path = self.folder / "curves.jsonl"
        if not path.is_file():
            return []
        steps: dict[int, dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                step = json.loads(line)
                steps[int(step["samples"])] = step
            except (ValueError, KeyError, TypeError):
                continue
        return [steps[samples] for samples in sorted(steps)]

    @cached_property
    def head_load(self) -> HeadLoad | None:
        """Head load by layer and group; None for MHA and for runs not evaluated."""
        path = self.folder / "head_load.json"
        try:
            return HeadLoad.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None

    @cached_property
    def head_similarity(self) -> HeadSimilarity | None:
        """Similarity of the heads by layer; None where it was not measured."""
        path = self.folder / "head_similarity.json"
        try:
            return HeadSimilarity.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def samples_image(self) -> Path | None:
        """Grid of generated images; None where the run has none."""
        path = self.folder / "samples.png"
        return path if path.is_file() else None


@dataclass(frozen=True)
class Records:
    """All run records of a results folder.

    Attributes:
        problems: one line for each folder that could not be read.
    """

    runs: tuple[Record, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, name: str) -> list[Record]:
        """Runs of one experiment."""
        return [record for record in self.runs if record.name == name]


def load_records(results_dir: Path) -> Records:
    """Read every run below ``results_dir/runs``; an absent folder is an empty set."""
    runs: list[Record] = []
    problems: list[str] = []
    root = results_dir / "runs"
    for path in sorted(root.glob("**/run.json")):
        where = path.parent.relative_to(root)
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(run, dict) or "name" not in run:
                raise ValueError("no run name in it")
            run.setdefault("run_id", where.as_posix())
            record = Record(path.parent, run, _read_metrics(path.with_name("metrics.json")))
            _ = record.seed, record.share, record.configuration
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{where}: unreadable record left out ({_one_line(error)})")
        else:
            runs.append(record)
    times: list[Record] = []
    for path in sorted((results_dir / "benchmarks").glob("*/benchmark.json")):
        try:
            times += attention_times(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = path.parent.relative_to(results_dir)
            problems.append(f"{where}: unreadable record left out ({_one_line(error)})")
    # Of several machines, a GPU stands for the others.
    runs += sorted(times, key=lambda record: record.get("gpu") is None)
    return Records(tuple(runs), tuple(problems))


def attention_times(path: Path) -> list[Record]:
    """Times of attention at the shapes of the paper's Table 7, a record a method.

    Args:
        path: what ``make benchmark`` wrote on one machine.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    where = data["environment"]
    machine = where["gpu"] or f"{where['cpu']}, {where['threads']} threads"
    found: dict[str, dict[str, Metric]] = {}
    for item in data["measurements"]:
        if item["section"] != "table7" or item["load"] != "even":
            continue
        marks = (f"{machine}, {item['dtype']}, batch {item['batch']}",)
        tokens, moh = item["tokens"], f"moh_{round(100 * item['ratio'])}"
        times = {"mha": (item["mha_ms"], 1.0), moh: (item["auto_ms"], 1 / item["auto_over_mha"])}
        for method, (milliseconds, speedup) in times.items():
            metrics = found.setdefault(method, {})
            metrics[f"attention_{tokens}_ms"] = Metric(milliseconds, "ms", marks=marks)
            metrics[f"attention_{tokens}_speedup"] = Metric(speedup, "", marks=marks)
    run = {"protocol": "paper", "status": "finished", "config_hash": path.parent.name}
    return [
        Record(
            path.parent,
            {**run, "name": f"benchmark/{method}", "run_id": f"benchmark/{method}", **where},
            metrics,
        )
        for method, metrics in found.items()
    ]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _read_metrics(path: Path) -> dict[str, Metric]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return {name: Metric.from_dict(item) for name, item in data["metrics"].items()}
