"""Benchmark results as recorded metrics, their averages, and the table that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moh.config import EvalConfig
from moh.evaluation.lm_tasks import Average, average
from moh.tasks.base import Metric

_NAMED = 3  # absent benchmarks that a mark names; more are counted

Results = Mapping[str, Mapping[str, Any]]


def benchmark_metrics(results: Results, evaluation: EvalConfig) -> dict[str, Metric]:
    """Every metric of every benchmark, as ``benchmark/metric``, shares in percent."""
    return {
        f"{name}/{key}": _as_metric(name, key, result, evaluation)
        for name, result in results.items()
        for key in result["metrics"]
    }


def average_metrics(results: Results, evaluation: EvalConfig) -> dict[str, Metric]:
    """The configuration's averages; without any, ``average`` over all that was evaluated.

    Each average of the configuration has the variants ``NAME/acc`` and ``NAME/acc_norm``, with
    that metric of every benchmark that has it, where they are not what the average is already.
    """
    if not results:
        return {}
    if not evaluation.averages:
        return {"average": _as_average(average(results), results, evaluation, plain=True)}
    metrics = {}
    for name, of in evaluation.averages.items():
        if not any(member in results for member in of):
            continue
        chosen = average(results, of)
        metrics[name] = _as_average(chosen, results, evaluation)
        for prefer in ("acc", "acc_norm"):
            variant = average(results, of, prefer)
            if variant.members != chosen.members:
                metrics[f"{name}/{prefer}"] = _as_average(variant, results, evaluation)
    return metrics


def _as_average(
    mean: Average, results: Results, evaluation: EvalConfig, plain: bool = False
) -> Metric:
    marks = [] if evaluation.limit is None else [f"limit {evaluation.limit} items"]
    if mean.absent:
        of = len(mean.absent) + len(mean.members)
        some = f"{len(mean.absent)} of its {of} benchmarks"
        names = ", ".join(mean.absent) if len(mean.absent) <= _NAMED else some
        marks.append(f"without {names}: not evaluated")
    if marked := [name for name in mean.members if _marks(name, results[name], evaluation, False)]:
        marks.append(f"see the marks of {', '.join(marked)}")
    members = [name if plain else f"{name} {metric}" for name, metric in mean.members.items()]
    return Metric(
        100 * mean.value,
        "%",
        mean.n,
        True,
        f"mean of {', '.join(members)}",
        stderr=None if mean.stderr is None else 100 * mean.stderr,
        marks=marks,
    )


def _as_metric(name: str, key: str, result: Mapping[str, Any], evaluation: EvalConfig) -> Metric:
    stderr = result["stderr"].get(key)
    protocol = (
        f"{name} {key}, {result['shots']}-shot, task version {result['version']}, "
        f"lm-eval {result['lm_eval']}, batch {result['batch_size']}"
    )
    if evaluation.precision != "fp32":
        protocol += f", {evaluation.precision}"
    scale, unit = (100, "%") if _is_share(key) else (1, "")
    return Metric(
        scale * result["metrics"][key],
        unit,
        result["n"],
        bool(result["higher_is_better"].get(key.split(",")[0], True)),
        protocol,
        stderr=None if stderr is None else scale * stderr,
        marks=_marks(name, result, evaluation),
    )


def _is_share(metric: str) -> bool:
    return metric.split(",")[0].startswith(("acc", "exact_match", "mc", "mean"))


def _marks(
    name: str, result: Mapping[str, Any], evaluation: EvalConfig, limit: bool = True
) -> list[str]:
    """What must be said beside a benchmark's scores."""
    marks = []
    items = evaluation.items.get(name)
    if result["limit"] is not None:
        marks += [f"limit {result['limit']} items"] if limit else []
    elif items is not None and result["n"] != items:
        marks.append(f"{result['n']:,} of {items:,} items")
    if leaked := result["evaluated_demonstrations"]:
        marks.append(f"{leaked} demonstrations are evaluated rows")
    if cut := result["cut_requests"]:
        marks.append(f"{cut} prompts cut to the model's length")
    return marks


def benchmark_table(
    results: Results, averages: Mapping[str, Metric], evaluation: EvalConfig
) -> Group:
    """Benchmark, shots, metric, score with its standard error and items; then the averages.

    What restricts a number is said below it, for those that are marked with a star.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("benchmark", "shots", "metric", "score", "items"):
        table.add_column(header, justify="left" if header in ("benchmark", "metric") else "right")
    notes: dict[str, list[str]] = {}
    for number, (name, result) in enumerate(results.items(), 1):
        metric = _as_metric(name, result["metric"], result, evaluation)
        table.add_row(
            name,
            str(result["shots"]),
            _short(result["metric"]),
            _score(metric),
            f"{result['n']:,}",
            end_section=number == len(results),
        )
        for mark in metric.marks:
            notes.setdefault(mark, []).append(name)
    for name, metric in averages.items():
        chosen, _, variant = name.partition("/")
        members = metric.protocol.removeprefix("mean of ").split(", ")
        about = f"with {variant}" if variant else f"of {len(members)}"
        label = "" if variant else chosen.replace("_", " ")
        table.add_row(label, "", about, _score(metric), f"{metric.n:,}")
        for mark in metric.marks:
            if mark.startswith("without") and not variant:
                notes.setdefault(mark, []).append(label)
    lines = [f"* {', '.join(names)}: {mark}" for mark, names in notes.items()]
    return Group(table, *(Text(line, style="yellow") for line in lines))


def _short(metric: str) -> str:
    """``exact_match, strict`` for ``exact_match,strict-match``."""
    name, _, filtered = metric.partition(",")
    return f"{name}, {filtered.split('-')[0]}" if filtered else name


def _score(metric: Metric) -> str:
    """``61.25 ± 0.40``, in percent where it is a share; with a star where marks go with it."""
    error = "" if metric.stderr is None else f" ± {metric.stderr:.2f}"
    return f"[bold]{metric.value:.2f}[/]{error}{'*' if metric.marks else ' '}"
