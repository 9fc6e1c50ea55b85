"""Language benchmarks: lm-eval's name for each, its score, and averages of scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moh.errors import nearest

# Benchmark -> folder of its definition in lm-eval. Reading these instead of all 14,000 task
# definitions saves seconds at each evaluation.
FOLDERS = {
    "arc_challenge": "arc",
    "arc_easy": "arc",
    "boolq": "super_glue/boolq",
    "ceval-valid": "ceval",
    "cmmlu": "cmmlu",
    "gsm8k": "gsm8k",
    "hellaswag": "hellaswag",
    "lambada_openai": "lambada",
    "logiqa": "logiqa",
    "mmlu": "mmlu/default",
    "nq_open": "nq_open",
    "openbookqa": "openbookqa",
    "piqa": "piqa",
    "sciq": "sciq",
    "truthfulqa_mc1": "truthfulqa",
    "truthfulqa_mc2": "truthfulqa",
    "winogrande": "winogrande",
}

# One benchmark of ours -> the lm-eval tasks whose scores it averages.
COMPOSITES = {"truthfulqa": {"mc1": "truthfulqa_mc1", "mc2": "truthfulqa_mc2"}}

# The score of a benchmark for which a configuration names none (``eval.score``): the first of these
# that its task reports. All that it reports is recorded in any case.
_SCORES = ("acc_norm", "acc", "exact_match")


def folder_of(task: str) -> str | None:
    """Folder in lm-eval that defines a benchmark or one of its subjects (``mmlu_anatomy``)."""
    parents = [name for name in FOLDERS if task == name or task.startswith(f"{name}_")]
    return FOLDERS[max(parents, key=len)] if parents else None


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names of no benchmark.

    Raises:
        ValueError: the first unknown name and what it may have meant.
    """
    for name in names:
        if name not in known:
            close = nearest(name, [*COMPOSITES, *known])
            raise ValueError(f"{name!r} is not a benchmark of lm-eval{close}")


def score_metric(metrics: Sequence[str], wanted: str | None = None, benchmark: str = "") -> str:
    """The metric that stands for a benchmark in an average.

    Args:
        metrics: names of all that its task reports (``acc``, ``exact_match,strict-match``).
        wanted: one of them by name, the part before the comma where that is enough; None for
            the first of ``acc_norm``, ``acc``, ``exact_match``.
        benchmark: for the message.

    Raises:
        ValueError: there is no such metric.
    """
    if wanted is not None:
        for metric in metrics:
            if wanted in (metric, metric.split(",")[0]):
                return metric
        raise ValueError(
            f"eval.score.{benchmark} {wanted!r} is not a metric of {benchmark}; it has "
            f"{'; '.join(metrics)}"
        )
    for known in _SCORES:
        for metric in metrics:
            if metric.split(",")[0] == known:
                return metric
    return metrics[0]


@dataclass(frozen=True)
class Average:
    """Mean of benchmarks' scores, each with the same weight, as the paper's last columns.

    Attributes:
        value: a fraction.
        stderr: over items, the benchmarks independent; None if one of them has none.
        members: benchmark -> metric that entered.
        absent: benchmarks that should have entered and were not evaluated.
    """

    value: float
    stderr: float | None
    n: int
    members: dict[str, str]
    absent: tuple[str, ...] = ()


def average(
    results: Mapping[str, Mapping[str, Any]],
    of: Sequence[str] = (),
    prefer: str | None = None,
) -> Average:
    """Average benchmark results.

    Args:
        results: of :func:`moh.evaluation.language.evaluate_benchmarks`.
        of: the benchmarks that enter; empty for all.
        prefer: a metric that enters instead of the score wherever a benchmark has it.

    Raises:
        ValueError: none of them was evaluated.
    """
    names = [name for name in of or results if name in results]
    if not names:
        raise ValueError("no benchmark to average")
    members = {name: str(results[name]["metric"]) for name in names}
    if prefer is not None:
        members |= {name: prefer for name in names if prefer in results[name]["metrics"]}
    values = [results[name]["metrics"][metric] for name, metric in members.items()]
    errors = [results[name]["stderr"].get(metric) for name, metric in members.items()]
    stderr = None
    if all(error is not None for error in errors):
        stderr = sum(error**2 for error in errors) ** 0.5 / len(errors)
    return Average(
        sum(values) / len(values),
        stderr,
        sum(results[name]["n"] for name in names),
        members,
        tuple(name for name in of if name not in results),
    )
