"""Language models: benchmarks through lm-eval, and bits per byte of held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.data.text import Tokens
from moh.evaluation.lm_harness import build_task, prepare, quiet, run, task_manager, unchanged
from moh.evaluation.lm_tasks import COMPOSITES, FOLDERS, check_names, expand, score_metric


def evaluate_benchmarks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    shots: Mapping[str, int] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    data_root: str | Path | None = None,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Score a transformers causal language model with lm-eval's own, unmodified tasks.

    Leaves the process as it was: random streams, current directory, training mode, log levels.

    Args:
        model: on the device where it shall run.
        tokenizer: its tokenizer.
        tasks: lm-eval names, ``truthfulqa`` (mc1, mc2 and their mean) or groups of
            :data:`moh.evaluation.lm_tasks.GROUPS`.
        shots: demonstrations by benchmark; 0 for those not named.
        limit: first items of each task (of each subject where it has subjects); None for all.
        batch_size: fixed, since scores depend on it.
        data_root: folder that holds each task's data set under its name on the hub
            (``allenai/sciq``); None for the hub itself.
        progress: whether lm-eval shows its bars.

    Returns:
        Benchmark -> ``metrics`` (all that lm-eval reports, as fractions), ``stderr``,
        ``higher_is_better``, ``metric`` and ``value`` (the score in the paper's average),
        ``n`` items, ``shots``, ``version`` of the task, ``evaluated_demonstrations`` (few-shot
        rows that are also evaluated: anything but 0 is a leak), ``cut_requests`` (prompts with
        an answer that lost their beginning to the model's length), ``lm_eval``, ``batch_size``,
        ``limit``.

    Raises:
        ValueError: an unknown benchmark, data that are missing or incomplete, more shots than
            demonstrations; one line.
    """
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    names, shots = expand(tasks), dict(shots or {})
    check_names(shots, [*names, *FOLDERS, *COMPOSITES])
    lm_eval_tasks = {name: COMPOSITES.get(name, {"": name}) for name in names}
    wanted = {
        task: shots.get(name, 0) for name, of in lm_eval_tasks.items() for task in of.values()
    }
    with ExitStack() as stack:
        stack.enter_context(unchanged(model))
        if not progress:
            stack.enter_context(quiet())
        manager = task_manager(list(wanted))
        check_names(wanted, manager.all_tasks)
        # datasets tells local folders apart by their README alone: two mirrors would share a cache.
        cache_dir = stack.enter_context(TemporaryDirectory(prefix="moh-benchmarks-"))
        local = None if data_root is None else (Path(data_root).absolute(), cache_dir)
        loaded = manager.load(
            [build_task(manager, task, count, local) for task, count in wanted.items()]
        )
        leaks = {task: prepare(loaded["tasks"][task]) for task in loaded["tasks"]}
        raw, cut = run(model, tokenizer, loaded, limit, batch_size, silent=not progress)
    context = {"lm_eval": version("lm-eval"), "batch_size": batch_size, "limit": limit}
    results = {task: _result(raw, task, leaks, cut) | context for task in wanted}
    return {name: _compose(of, results) for name, of in lm_eval_tasks.items()}


def _result(
    raw: Any, task: str, leaks: Mapping[str, int], cut: Mapping[str, int]
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
    score = score_metric(metrics)
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


def _compose(parts: Mapping[str, str], results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One benchmark from its lm-eval tasks: itself, or the mean of several with each beside it."""
    of = {label: results[task] for label, task in parts.items()}
    first = next(iter(of.values()))
    if len(of) == 1:
        return first
    metrics = {label: part["value"] for label, part in of.items()}
    mean = sum(metrics.values()) / len(metrics)
    return first | {
        "metrics": {**metrics, "mean": mean},
        "stderr": {
            label: part["stderr"][part["metric"]]
            for label, part in of.items()
            if part["metric"] in part["stderr"]
        },
        "higher_is_better": dict.fromkeys((*metrics, "mean"), True),
        "metric": "mean",
        "value": mean,
        "version": {label: part["version"] for label, part in of.items()},
    }


@torch.inference_mode()
def bits_per_byte(
    model: nn.Module,
    tokens: Tokens,
    num_bytes: int,
    seq_len: int,
    stride: int | None = None,
    batch_size: int = 8,
) -> float:
    """Bits that a model needs for each byte of a text.

    Windows of ``seq_len`` tokens begin every ``stride`` tokens, and each scores the tokens that
    no earlier one scored. So every token but the first counts once, and has at least
    ``seq_len - stride`` tokens of context (those of the first window all that there are).

    Args:
        model: transformers causal language model.
        tokens: (T,), see :func:`moh.data.text.encode_documents`. Its first token is the boundary
            before the first document, which is nobody's to predict.
        num_bytes: UTF-8 bytes of the text behind the tokens.
        seq_len: tokens.
        stride: tokens; default half of ``seq_len``.
        batch_size: windows computed together.

    Raises:
        ValueError: a stride that would leave tokens out, or fewer than two tokens.
    """
    total = len(tokens)
    if stride is None:
        stride = max(1, seq_len // 2)
    if total < 2 or not 0 < stride < seq_len:
        raise ValueError(
            f"bits per byte of {total} tokens with seq_len {seq_len} and stride {stride}: "
            "needs two tokens and a stride below seq_len"
        )
    seq_len = min(seq_len, total)
    starts = [*range(0, total - seq_len, stride), total - seq_len]
    scored_from = [1, *(start + seq_len for start in starts[:-1])]
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    nats = 0.0
    try:
        for first in range(0, len(starts), batch_size):
            chunk = starts[first : first + batch_size]
            windows = np.stack([tokens[start : start + seq_len] for start in chunk])
            ids_BN = torch.from_numpy(windows.astype(np.int64)).to(device)
            loss_BN = _next_token_loss(model, ids_BN)
            new_from = torch.tensor(scored_from[first : first + batch_size], device=device)
            position_BN = torch.tensor(chunk, device=device)[:, None] + torch.arange(
                1, seq_len, device=device
            )
            nats += float(loss_BN.double()[position_BN >= new_from[:, None]].sum())
    finally:
        model.train(training)
    return float(nats / np.log(2) / num_bytes)


def _next_token_loss(model: nn.Module, ids_BN: Tensor) -> Tensor:
    """Cross entropy in nats of tokens 1 to N-1: float32 (B, N-1)."""
    logits = model(input_ids=ids_BN, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids_BN[:, 1:], reduction="none")


def unigram_bits_per_byte(
    train: Tokens, validation: Tokens, num_bytes: int, vocab_size: int
) -> float:
    """Bits per byte of a model that knows only how frequent each token is.

    Frequencies are of the training tokens, each count plus one; the tokens scored are those that
    :func:`bits_per_byte` scores. A model that has learned anything is below.

    Args:
        num_bytes: UTF-8 bytes of the text behind ``validation``.
    """
    counts = np.bincount(train, minlength=vocab_size)
    return bits_per_byte_of_counts(counts, validation, num_bytes)


def bits_per_byte_of_counts(counts: npt.NDArray[Any], validation: Tokens, num_bytes: int) -> float:
    """:func:`unigram_bits_per_byte` of counts made before: one a token of the vocabulary."""
    bits = -np.log2((counts + 1.0) / (counts + 1.0).sum())
    return float(bits[np.asarray(validation[1:], dtype=np.int64)].sum() / num_bytes)
