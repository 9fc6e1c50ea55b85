"""The paper's language benchmarks: lm-eval's name for each, and the sets that it averages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

_FOURTEEN = (
    "mmlu",
    "cmmlu",
    "nq_open",
    "gsm8k",
    "truthfulqa",
    "hellaswag",
    "logiqa",
    "boolq",
    "lambada_openai",
    "sciq",
    "piqa",
    "winogrande",
    "arc_challenge",
)
GROUPS = {
    # Table 3, models from scratch.
    "moh_six": ("sciq", "piqa", "winogrande", "openbookqa", "logiqa", "truthfulqa"),
    # Table 4, continue-tuned against the untouched LLaMA3.
    "moh_fourteen": (*_FOURTEEN, "ceval-valid"),
    # Table G, continue-tuned against the model at the end of stage 1.
    "moh_fourteen_stage1": (*_FOURTEEN, "arc_easy"),
}

# Which of a task's metrics is its score. The paper does not say; its numbers of HellaSwag, ARC-C
# and PIQA look like the length-normalised accuracy, and only some tasks have one. All metrics are
# recorded.
_SCORES = ("acc_norm", "acc", "exact_match")


def expand(names: Iterable[str]) -> list[str]:
    """Benchmark names with the groups of :data:`GROUPS` replaced by their members, once each."""
    members = [member for name in names for member in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(members))


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names of no benchmark.

    Raises:
        ValueError: the first unknown name and what it may have meant.
    """
    for name in names:
        if name not in known:
            close = nearest(name, [*GROUPS, *COMPOSITES, *known])
            raise ValueError(f"{name!r} is not a benchmark of lm-eval{close}")


def score_metric(metrics: Mapping[str, float]) -> str:
    """The metric that stands for a task in an average."""
    for wanted in _SCORES:
        for metric in metrics:
            if metric.split(",")[0] == wanted:
                return metric
    return next(iter(metrics))


def average(results: Mapping[str, Mapping[str, Any]], without: Sequence[str] = ()) -> float:
    """Mean of the benchmarks' scores, each with the same weight, as the paper's last columns.

    Args:
        results: of :func:`moh.evaluation.language.evaluate_benchmarks`.
        without: benchmarks left out, for the comparisons that one benchmark decides.

    Raises:
        ValueError: nothing is left.
    """
    values = [result["value"] for name, result in results.items() if name not in without]
    if not values:
        raise ValueError("no benchmark to average")
    return sum(values) / len(values)
