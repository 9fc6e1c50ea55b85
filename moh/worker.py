"""What a run does once its configuration is frozen: train, evaluate, record.

``python -m moh.worker FOLDER [ARGUMENT...]`` starts from the frozen file alone, as a launcher
does; the arguments are those of the user's command, for the record.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import moh
from moh import distribution, weights
from moh.backbones.build import build_model, is_mha, without_pretrained
from moh.backbones.convert import head_plan
from moh.config import PRETRAINED, Config, LlamaConfig
from moh.errors import RunError, StoppedError
from moh.evaluation.similarity import HeadSimilarity, similarity_metrics
from moh.heads import routers
from moh.memory import keep_freed_memory
from moh.reporting import provenance
from moh.reporting.wandb_logger import RunLogger
from moh.runner import (
    EVALUATED,
    load_config,
    record_name,
    scores_given_weights,
    write_json,
)
from moh.signals import stop_at_once
from moh.tasks.base import Evaluation, Task
from moh.training.gradients import DTYPES
from moh.training.loop import Trainer
from moh.training.parallel import gathered
from moh.training.progress import RunProgress


def execute(folder: Path, arguments: Sequence[str]) -> None:
    """Carry out the run whose configuration lies in ``folder``.

    Of several processes the main one alone writes, logs and shows progress.

    Args:
        folder: with its frozen configuration.
        arguments: of the user's command.

    Raises:
        RunError: see :class:`moh.training.loop.Trainer` and the evaluators.
    """
    begun, started = time.monotonic(), _now()
    config = load_config(folder)
    device = set_up(config)
    provenance.reset_peak_memory()
    plain: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    identity = str(folder.relative_to(config.runs_dir))
    task = build_task(config)
    if config.mode == "both":
        task.check_evaluation()
    if config.mode == "eval":
        config.trainer.parallel = "ddp"  # there is nothing to shard
    sharded = config.trainer.parallel == "fsdp"
    given = scores_given_weights(config)
    bare = config.checkpoint not in (None, PRETRAINED)
    built = without_pretrained(config.model) if bare else config.model
    dtype = DTYPES[config.eval.precision] if config.mode == "eval" else torch.float32
    model = build_model(built, config.heads, config.seed, dtype)
    # A model that is to be sharded may not fit on one device: FSDP moves it block by block.
    model = model.to("cpu" if sharded else device)
    # Before anything is written, since what does not fit leaves nothing.
    samples = load_weights(config, folder, model) if config.mode == "eval" else None
    if config.mode == "eval":
        task.check_evaluation()
    classes = weights.settle_classes(config, folder, task)
    budget = config.weights_at or config.trainer.samples or 1
    record: dict[str, Any] = {
        "run_id": identity,
        "name": record_name(config),
        "protocol": config.protocol,
        "status": "partial",
        "share": (samples or 0) / budget,
        "seed": config.seed,
        **describe(config, model),
        "data": task.fingerprint(),
        "command": shlex.join(["python", "-m", "moh", *arguments]),
        "overrides": [argument for argument in arguments if "=" in argument],
        "config_hash": folder.name.partition("-")[2],
        **provenance.code(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "processes": distribution.world_size(),
        "seconds": _earlier_seconds(folder),
        "started": started,
    }
    if classes:
        record["classes"] = classes
    if given:
        # Not a training of ours: no share of a budget, no batch of an optimiser.
        del record["share"], record["global_batch"]
    if config.mode == "eval" and config.checkpoint is not None:
        record["checkpoint"] = weights.describe(str(config.checkpoint), model)
        record["weights_of"] = config.weights_of
    if not distribution.is_main():
        config.logger.wandb, config.logger.progress = "disabled", False
    logger = RunLogger(config.logger, folder, plain, identity)
    record["wandb"] = {"id": logger.id, "mode": logger.mode, "path": _wandb_path(folder)}
    # A run that is killed leaves this; what it says is true at that moment.
    if distribution.is_main():
        write_json(folder / "run.json", record)
    failed, trainer = True, None
    try:
        with RunProgress(identity, config.logger.progress) as progress:
            scored = model
            if config.mode in ("train", "both"):
                trainer = Trainer(config, model, task, folder, logger, progress)
                trained = trainer.fit()
                record["seconds"]["train"] += trained.seconds
                samples = trained.samples
                scored = trained.ema if trained.ema and config.eval.ema else model
            if sharded:
                empty = build_model(config.model, config.heads, config.seed).to(device)
                scored = gathered(scored, empty)
            record["samples"] = samples
            if not given:
                record["share"] = (samples or 0) / budget
            evaluation: Evaluation | None = None
            takes_part = task.evaluates_together or distribution.is_main()
            if config.mode in ("eval", "both") and takes_part:
                evaluated = time.monotonic()
                scored.eval()
                evaluation = task.evaluate(scored, folder, progress)
                if config.eval.similarity_samples != 0 and distribution.is_main():
                    measure_similarity(evaluation, task, scored, config, progress)
                record["seconds"]["eval"] = time.monotonic() - evaluated
        if not distribution.is_main():
            failed = False
            return
        done = given or (samples or 0) >= budget
        if done and evaluation is not None:
            record["status"] = EVALUATED if given else "finished"
        record["seconds"]["total"] += time.monotonic() - begun
        record["seconds"] = {key: round(value, 2) for key, value in record["seconds"].items()}
        record["peak_memory_mib"] = round(provenance.peak_memory_mib(), 1)
        record["finished"] = _now()
        if evaluation is not None:
            _record_scores(folder, evaluation)
            logger.finish(
                {name: metric.value for name, metric in evaluation.metrics.items()},
                evaluation.images,
                evaluation.head_load,
            )
            _say_scores(progress, identity, evaluation, record)
        write_json(folder / "run.json", record)
        failed = False
    except StoppedError:
        if trainer is not None:
            record["samples"] = trainer.samples
            record["share"] = trainer.samples / config.trainer.samples
        record["seconds"]["total"] += time.monotonic() - begun
        if distribution.is_main():
            write_json(folder / "run.json", record)
        failed = False
        raise
    finally:
        logger.close(failed)


def set_up(config: Config) -> torch.device:
    """Threads, determinism, device and process group of a run."""
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor with NaN is a debugging aid that costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return distribution.initialise(device)


def build_task(config: Config) -> Task:
    """The task of a configuration, with its data."""
    if config.task.name == "classification":
        from moh.tasks.classification import Classification

        return Classification(config)
    if config.task.name == "generation":
        from moh.tasks.generation import Generation

        return Generation(config)
    from moh.tasks.language import Language

    return Language(config)


def describe(config: Config, model: nn.Module) -> dict[str, Any]:
    """Heads and sizes of a model as ``run.json`` holds them."""
    plan = head_plan(model)
    return {
        "model": config.model.name,
        # A folder may bring heads of its own.
        "heads": "own" if plan and is_mha(config.heads) else config.heads.name,
        "head_plan": plan.to_dict() if plan else None,
        "activated_ratio": plan.activated_ratio if plan else 1.0,
        "shared_share": plan.shared_share if plan else None,
        "routed_layers": plan.routed_layers if plan else 0,
        "parameters": sum(p.numel() for p in model.parameters()),
        "router_parameters": sum(
            p.numel() for _, router in routers(model) for p in router.parameters()
        ),
        "global_batch": config.trainer.global_batch,
        "moh_version": moh.__version__,
    } | _pretrained(config)


def _pretrained(config: Config) -> dict[str, Any]:
    """Which weights a language model started from."""
    folder = _pretrained_folder(config)
    if folder is None:
        return {}
    from moh.backbones.llama_folder import fingerprint

    return {"pretrained": {"folder": folder, "sha256": fingerprint(folder)}}


def _pretrained_folder(config: Config) -> str | None:
    return config.model.pretrained if isinstance(config.model, LlamaConfig) else None


def load_weights(config: Config, folder: Path, model: nn.Module) -> int | None:
    """Weights for ``mode=eval``: ``checkpoint=`` or the run's own newest checkpoint.

    Returns:
        Samples that they were trained on; None where nobody says.

    Raises:
        RunError: nothing to load, or it does not fit.
    """
    if config.checkpoint == PRETRAINED:
        return None  # the model was built with them
    source = weights.locate(config.checkpoint or folder)
    return source.load_into(model, config.model.family, config.eval.ema)


def measure_similarity(
    evaluation: Evaluation, task: Task, model: nn.Module, config: Config, progress: RunProgress
) -> None:
    """Add the similarity of the model's heads to what was measured."""
    similarity = HeadSimilarity()
    with similarity.watch(model):
        look = task.look(model, config.eval.similarity_samples or task.look_samples, progress)
    if look is not None:
        evaluation.head_similarity = similarity.to_json(look.samples)
        evaluation.metrics |= similarity_metrics(similarity, look.samples)


def _record_scores(folder: Path, evaluation: Evaluation) -> None:
    metrics = {name: dataclasses.asdict(metric) for name, metric in evaluation.metrics.items()}
    scores: dict[str, Any] = {"metrics": metrics}
    if evaluation.benchmarks is not None:
        scores["benchmarks"] = evaluation.benchmarks
    write_json(folder / "metrics.json", scores)
    if evaluation.head_load is not None:
        write_json(folder / "head_load.json", evaluation.head_load)
    if evaluation.head_similarity is not None:
        write_json(folder / "head_similarity.json", evaluation.head_similarity)


def _say_scores(
    progress: RunProgress, identity: str, evaluation: Evaluation, record: dict[str, Any]
) -> None:
    if evaluation.table is not None:
        progress.say(evaluation.table)
    seconds, given = record["seconds"], record["status"] == EVALUATED
    # The first is the task's own score.
    first = next(iter(evaluation.metrics))
    shown = [(name, m) for name, m in evaluation.metrics.items() if name in (first, "top5")]
    scores = ", ".join(f"[bold]{name} {m.value:.2f}[/] {m.unit}".rstrip() for name, m in shown)
    marks = "".join(f"; {mark}" for mark in shown[0][1].marks)
    training = "" if given else f"{seconds['train']:.0f} s training, "
    progress.say(f"{identity}: {scores}  ({training}{seconds['eval']:.0f} s evaluation{marks})")


def _earlier_seconds(folder: Path) -> dict[str, float]:
    """Seconds of earlier starts of this run; an evaluation alone must not lose them."""
    try:
        seconds = json.loads((folder / "run.json").read_text())["seconds"]
        return {key: float(seconds.get(key, 0)) for key in ("train", "eval", "total")}
    except (OSError, ValueError, KeyError):
        return {"train": 0.0, "eval": 0.0, "total": 0.0}


def _wandb_path(folder: Path) -> str | None:
    return str(folder / "wandb") if (folder / "wandb").is_dir() else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _die_with_the_launcher() -> None:
    """A launcher that is killed cannot stop its processes; they would write on beside the next."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main() -> None:
    """One process of a launched run; a failure reaches the launcher as one line."""
    _die_with_the_launcher()
    try:
        with stop_at_once(sys.argv[1]):
            execute(Path(sys.argv[1]), sys.argv[2:])
    except Exception as error:
        if not isinstance(error, RunError):
            traceback.print_exc()
        get_error_handler().record_exception(error)
        sys.exit(StoppedError.EXIT_STATUS if isinstance(error, StoppedError) else 1)
    finally:
        distribution.shut_down()


if __name__ == "__main__":
    main()
