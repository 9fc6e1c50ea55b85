"""Language benchmarks: lm-eval's own, unmodified tasks, scored one benchmark after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from moh.evaluation.heads import HeadLoad
from moh.evaluation.lm_harness import (
    build_task,
    metric_names,
    prepare,
    quiet,
    run,
    task_manager,
    unchanged,
)
from moh.evaluation.lm_tasks import COMPOSITES, FOLDERS, check_names, score_metric

Report = Callable[[str, int, int], None]  # benchmark, requests done, requests in all


def evaluate_benchmarks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    shots: Mapping[str, int] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    data_root: str | Path | None = None,
    score: Mapping[str, str] | None = None,
    report: Report | None = None,
    load: HeadLoad | None = None,
) -> dict[str, dict[str, Any]]:
    """Score a transformers causal language model.

    Each benchmark's numbers are those of ``lm_eval --tasks NAME`` with the same model, shots and
    batch size. All data are opened before the first request is computed. Leaves the process as
    it was: random streams, current directory, training mode, log levels.

    Args:
        model: on the device where it shall run.
        tokenizer: its tokenizer.
        tasks: lm-eval names, or ``truthfulqa`` (mc1, mc2 and their mean).
        shots: demonstrations by benchmark; 0 for those not named.
        limit: first items of each task (of each subject where it has subjects); None for all.
        batch_size: fixed, since scores depend on it.
        data_root: folder that holds each task's data set under its name on the hub
            (``allenai/sciq``); None for the hub itself.
        score: benchmark -> the metric that stands for it in an average, see
            :func:`moh.evaluation.lm_tasks.score_metric`.
        report: told of progress.
        load: with a group of each benchmark's name; counts the tokens of prompts and scored
            answers, not padding, nor what the model generates.

    Returns:
        Benchmark -> ``metrics`` (all that lm-eval reports, as fractions), ``stderr``,
        ``higher_is_better``, ``metric`` and ``value`` (the score), ``n`` items, ``shots``,
        ``version`` of the task, ``evaluated_demonstrations`` (few-shot rows that are also
        evaluated: anything but 0 is a leak), ``cut_requests`` (prompts that lost their beginning
        to the model's length), ``lm_eval``, ``batch_size``, ``limit``.

    Raises:
        ValueError: an unknown benchmark or metric, data that are missing or incomplete, more
            shots than demonstrations; one line.
    """
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    names, shots, score = list(dict.fromkeys(tasks)), dict(shots or {}), dict(score or {})
    check_names((*shots, *score), [*names, *FOLDERS, *COMPOSITES])
    parts = {name: COMPOSITES.get(name, {"": name}) for name in names}
    lm_eval_tasks = [task for of in parts.values() for task in of.values()]
    context = {"lm_eval": version("lm-eval"), "batch_size": batch_size, "limit": limit}
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        stack.enter_context(unchanged(model))
        stack.enter_context(quiet())
        manager = task_manager(lm_eval_tasks)
        check_names(lm_eval_tasks, manager.all_tasks)
        # datasets tells local folders apart by their README alone: two mirrors would share a cache.
        cache_dir = stack.enter_context(TemporaryDirectory(prefix="moh-benchmarks-"))
        local = None if data_root is None else (Path(data_root).absolute(), cache_dir)
        loaded = {}
        for name, of in parts.items():
            built = [build_task(manager, task, shots.get(name, 0), local) for task in of.values()]
            loaded[name] = manager.load(built)
            known = metric_names(loaded[name]) if len(of) == 1 else [*of, "mean"]
            if known:  # a task in Python tells them only when it has run
                score_metric(known, score.get(name), name)
        leaks = {
            name: {task: prepare(one) for task, one in of["tasks"].items()}
            for name, of in loaded.items()
        }
        for name, of in parts.items():
            if load is not None:
                load.group = load.group_names.index(name)
            raw, cut = run(
                model,
                tokenizer,
                loaded.pop(name),
                limit,
                batch_size,
                _bind(report, name),
                load,
                keep_items=len(of) > 1,
            )
            wanted = score.get(name)
            if len(of) == 1:
                results[name] = _result(raw, of[""], leaks[name], cut, wanted)
            else:
                results[name] = _mean(raw, of, leaks[name], cut, wanted)
    return {name: result | context for name, result in results.items()}


def _bind(report: Report | None, name: str) -> Callable[[int, int], None] | None:
    return None if report is None else lambda done, total: report(name, done, total)


def _result(
    raw: Any, task: str, leaks: Mapping[str, int], cut: Mapping[str, int], wanted: str | None = None
) -> dict[str, Any]:
    """What lm-eval reports of one task or group, in this project's form."""
    metrics: dict[str, float] = {}
    stderr: dict[str, float] = {}
    for key, value in raw["results"][task].items():
        metric, _, filtered = key.partition(",")
        if not filtered or not isinstance(value, int | float):
            continue
        kind = stderr if metric.endswith("_stderr") else metrics
        metric = metric.removesuffix("_stderr")
        kind[metric if filtered == "none" else f"{metric},{filtered}"] = float(value)
    leaves = _leaves(raw, task)
    score = score_metric(list(metrics), wanted, task)
    return {
        "metrics": metrics,
        "stderr": stderr,
        "higher_is_better": raw["higher_is_better"][leaves[0]],
        "metric": score,
        "value": metrics[score],
        "n": sum(raw["n-samples"][leaf]["effective"] for leaf in leaves),
        "shots": raw["n-shot"][leaves[0]],
        "version": str(raw["versions"][task]),
        "evaluated_demonstrations": sum(leaks[leaf] for leaf in leaves),
        "cut_requests": sum(cut[leaf] for leaf in leaves),
    }


def _leaves(raw: Any, task: str) -> list[str]:
    children = raw["group_subtasks"].get(task)
    if not children:
        return [task]
    return [leaf for child in children for leaf in _leaves(raw, child)]


def _mean(
    raw: Any,
    parts: Mapping[str, str],
    leaks: Mapping[str, int],
    cut: Mapping[str, int],
    wanted: str | None,
) -> dict[str, Any]:
    """The mean of several lm-eval tasks on the same items, with each task's score beside it."""
    of = {label: _result(raw, task, leaks, cut) for label, task in parts.items()}
    metrics = {label: part["value"] for label, part in of.items()}
    stderr = {
        label: part["stderr"][part["metric"]]
        for label, part in of.items()
        if part["metric"] in part["stderr"]
    }
    # The tasks' errors go together, item by item, so the mean's is not to be had from theirs.
    items = np.mean([_items(raw, task, of[label]) for label, task in parts.items()], axis=0)
    metrics["mean"] = sum(metrics.values()) / len(metrics)
    if len(items) > 1:
        stderr["mean"] = float(np.std(items, ddof=1) / len(items) ** 0.5)
    score = score_metric(list(metrics), wanted or "mean", "".join(parts))
    return next(iter(of.values())) | {
        "metrics": metrics,
        "stderr": stderr,
        "higher_is_better": dict.fromkeys(metrics, True),
        "metric": score,
        "value": metrics[score],
        "version": {label: part["version"] for label, part in of.items()},
        "cut_requests": sum(part["cut_requests"] for part in of.values()),
    }


def _items(raw: Any, task: str, result: Mapping[str, Any]) -> list[float]:
    """A task's score of each item, in order."""
    samples = sorted(raw["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [float(sample[result["metric"]]) for sample in samples]
