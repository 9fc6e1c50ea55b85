"""What the training loop costs beside a bare one, MoH beside MHA, and the data of a step."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.timing import interleave, middle, ratio
from moh.backbones.build import build_model
from moh.cli import compose_config
from moh.config import Config, HeadsConfig
from moh.data.order import StepRandom
from moh.reporting.wandb_logger import RunLogger
from moh.tasks.base import Task
from moh.training.loop import Trainer
from moh.training.progress import RunProgress
from moh.training.schedule import learning_rate
from moh.validation import validate
from moh.worker import build_task

EXPERIMENTS = ("demo/vit/moh_75", "demo/dit/moh_75", "demo/llm/moh_75")
STEPS = 20  # of a turn
SETTINGS: tuple[str, ...] = ()  # further settings


class _Unsaved(Trainer):
    """The loop without its checkpoint, which a run writes once in minutes."""

    def _save(self) -> None:
        pass


def measure_overheads(experiment: str, device: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Seconds of a training step in four ways, taken in turns in one process.

    The bare loop is what anybody would write: batch, loss, backward, clipping, AdamW, EMA, for the
    same MHA model on the same data. The loops train MHA and MoH with all that a run does: seeds,
    finite check, curves, progress. A fourth contender gets a step's data and nothing more.

    Args:
        experiment: one with MoH; its MHA baseline has the same settings.
        seconds, rounds: see :func:`benchmarks.timing.interleave`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, task = prepared(experiment, device, folder, *SETTINGS)
        plain = copy.deepcopy(config)
        plain.heads = HeadsConfig()
        contenders = {
            "bare": bare_loop(plain, task, device, folder).run,
            "mha": loop(plain, task, device, folder).run,
            "moh": loop(config, task, device, folder).run,
            "data": lambda: _get_data(config, task),
        }
        times = interleave(contenders, seconds, rounds, device)
    found: dict[str, Any] = {"experiment": experiment, "rounds": len(times["mha"])}
    for name, taken in times.items():
        found[f"{name}_ms"] = round(1e3 * middle(taken)[0] / STEPS, 4)
    for name, one, other in (
        ("loop_over_bare", "mha", "bare"),
        ("moh_over_mha", "moh", "mha"),
        ("data_share", "data", "mha"),
    ):
        ratios = middle(ratio(times, one, other))
        found[name] = round(ratios[0], 4)
        found[f"quartiles_{name}"] = [round(value, 4) for value in ratios[1:]]
    return found


def prepared(experiment: str, device: str, folder: Path, *more: str) -> tuple[Config, Task]:
    """An experiment with its own settings, but for its length."""
    # Nothing is evaluated: the benchmarks need not be there.
    overrides = [f"experiment={experiment}", "mode=train"]
    overrides += [f"trainer.device={device}", f"runs_dir={folder}"]
    config = validate(compose_config([*overrides, *more]), paths=False)
    config.logger.wandb, config.logger.progress = "disabled", False
    config.trainer.samples = STEPS * config.trainer.global_batch
    config.trainer.checkpoint_every, config.trainer.keep_at = 0, []
    return config, build_task(config)


@dataclass
class Loop:
    """A few updates, to be called again and again.

    Attributes:
        run: carries them out; the weights go on from where they are.
        model: what it trains.
    """

    run: Callable[[], object]
    model: nn.Module

    def __call__(self) -> None:
        self.run()


def loop(config: Config, task: Task, device: str, folder: Path) -> Loop:
    """The training loop of every run."""
    model = build_model(config.model, config.heads, config.seed).to(device)
    logger = RunLogger(config.logger, folder, {}, "overheads")
    trainer = _Unsaved(config, model, task, folder, logger, RunProgress("overheads", False))

    def run() -> None:
        trainer.samples = 0
        trainer.fit()

    return Loop(run, model)


def bare_loop(config: Config, task: Task, device: str, folder: Path) -> Loop:
    """The same updates of the same weights, without what makes a run one that can be trusted."""
    model = build_model(config.model, config.heads, config.seed).to(device)
    trainer, optim = config.trainer, config.optim
    optimizer = AdamW(
        task.param_groups(model, optim.weight_decay),
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        fused=True,
    )
    decay = trainer.ema_decay
    averaged = None if decay is None else copy.deepcopy(model)
    parameters, batch_size = list(model.parameters()), trainer.global_batch
    terms = task.terms(batch_size)

    def run() -> None:
        model.train()
        for first in range(0, trainer.samples, batch_size):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(optim, first, trainer.samples)
            batch = {name: part.to(device) for name, part in task.batch(first, batch_size).items()}
            random = StepRandom(config.seed, first, batch_size, 0, batch_size)
            loss, _ = task.loss(model, batch, random)
            optimizer.zero_grad()
            (loss / terms).backward()
            if optim.clip_norm:
                nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
            optimizer.step()
            if averaged is not None and decay is not None:
                with torch.no_grad():
                    for mean, weight in zip(averaged.parameters(), parameters, strict=True):
                        mean.lerp_(weight, 1 - decay)

    return Loop(run, model)


def _get_data(config: Config, task: Task) -> None:
    batch = config.trainer.global_batch
    for first in range(0, config.trainer.samples, batch):
        task.batch(first, batch)
