"""The training loop: every line of it moves a number."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moh.config import Config
from moh.data.order import StepRandom, stable_seed
from moh.errors import RunError
from moh.heads import balance_loss, head_load
from moh.reporting.wandb_logger import RunLogger
from moh.tasks.base import Task
from moh.training import checkpoint
from moh.training.progress import RunProgress
from moh.training.schedule import learning_rate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trained:
    """What training leaves behind.

    Attributes:
        ema: averaged model, None without averaging.
        samples: trained in all, earlier starts included.
        seconds: of this start.
    """

    ema: nn.Module | None
    samples: int
    seconds: float


class Trainer:
    """Trains one model on one task. State is counted in samples.

    Args:
        model: on its device already.
        folder: run folder; checkpoints and curves go there.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        task: Task,
        folder: Path,
        logger: RunLogger,
        progress: RunProgress,
    ) -> None:
        self.config, self.model, self.task = config, model, task
        self.folder, self.logger, self.progress = folder, logger, progress
        self.device = next(model.parameters()).device
        trainer, optim = config.trainer, config.optim
        self.device_batch = trainer.device_batch or trainer.global_batch
        self.optimizer = AdamW(
            task.param_groups(model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            fused=True,
        )
        self.ema: AveragedModel | None = None
        if trainer.ema_decay is not None:
            average = get_ema_multi_avg_fn(trainer.ema_decay)
            self.ema = AveragedModel(model, multi_avg_fn=average)
        half = trainer.precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda") if half else None
        self.run_model = cast(nn.Module, torch.compile(model)) if trainer.compile else model
        if trainer.activation_checkpointing:
            recompute_activations(model)
        self.samples = 0

    def autocast(self) -> AbstractContextManager[object]:
        """The precision's autocast; none for fp32."""
        dtype = DTYPES[self.config.trainer.precision]
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def fit(self) -> Trained:
        """Train up to the budget, from the newest whole checkpoint if there is one.

        Raises:
            RunError: a loss that is not finite (the last good checkpoint stays), no memory, or
                a checkpoint that cannot be read or written.
        """
        total, batch = self.config.trainer.samples, self.config.trainer.global_batch
        every = self.config.trainer.checkpoint_every or total
        self._resume()
        start, begun = self.samples, time.monotonic()
        self.model.train()
        with open(self.folder / "curves.jsonl", "a") as curves:
            marked, since = time.monotonic(), self.samples
            while self.samples < total:
                step = self.samples // batch
                logged = step % self.config.trainer.log_every == 0 or self.samples + batch >= total
                row = self._guarded_update(logged)
                self.samples += batch
                if logged:
                    now = time.monotonic()
                    row["samples_per_second"] = (self.samples - since) / max(now - marked, 1e-9)
                    marked, since = now, self.samples
                    curves.write(json.dumps(row) + "\n")
                    curves.flush()
                    self.logger.log(row, step=step)
                    self._show(row)
                else:
                    self.progress("training", self.samples, total, self._note)
                if self.samples % every == 0 or self.samples >= total:
                    self._save()
        seconds = time.monotonic() - begun if self.samples > start else 0.0
        return Trained(self.ema.module if self.ema else None, self.samples, seconds)

    _note = ""

    def _show(self, row: dict[str, Any]) -> None:
        note = f"loss {row['task_loss']:.3f}"
        if row["balance_loss"] is not None:
            note += f"  balance {row['balance_loss']:.2f}"
        self._note = f"{note}  {row['samples_per_second']:.0f}/s"
        self.progress("training", self.samples, self.config.trainer.samples, self._note)

    def _guarded_update(self, logged: bool) -> dict[str, Any]:
        try:
            return self._update(logged)
        except torch.OutOfMemoryError:
            smaller = max(1, self.device_batch // 2)
            raise RunError(
                f"{self.config.name}: out of memory with trainer.device_batch="
                f"{self.device_batch}; try trainer.device_batch={smaller}"
            ) from None

    def _update(self, logged: bool) -> dict[str, Any]:
        """One optimiser step over the global batch."""
        config, trainer = self.config, self.config.trainer
        # Dropout and DropPath draw from the global stream: seeded anew for each update, so that
        # a run that was stopped here goes on with the same draws.
        torch.manual_seed(stable_seed(config.seed, "model", self.samples))
        rate = learning_rate(config.optim, self.samples, trainer.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        task_loss = torch.zeros((), device=self.device)
        balance = torch.zeros((), device=self.device)
        routed = False
        terms = self.task.terms(trainer.global_batch)
        for offset, batch in self._micro_batches():
            random = StepRandom(
                config.seed, self.samples, trainer.global_batch, offset, self.device_batch
            )
            with self.autocast():
                loss, _ = self.task.loss(self.run_model, batch, random)
            loss = loss / terms
            task_loss += loss.detach()
            aux = balance_loss(self.model)
            if aux is not None:
                routed = True
                share = self.device_batch / trainer.global_batch
                balance += aux.detach() * share
                loss = loss + config.heads.balance_coef * share * aux
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        norm = self._step(task_loss + balance)
        row: dict[str, Any] = {"samples": self.samples + trainer.global_batch}
        if logged:
            row["task_loss"] = task_loss.item()
            row["balance_loss"] = balance.item() if routed else None
            row["loss"] = row["task_loss"] + config.heads.balance_coef * (balance.item())
            row["lr"] = rate
            row["grad_norm"] = norm
            if routed:
                row.update(_load_spread(self.model))
        return row

    def _micro_batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for offset in range(0, self.config.trainer.global_batch, self.device_batch):
            batch = self.task.batch(self.samples + offset, self.device_batch)
            yield offset, {key: value.to(self.device) for key, value in batch.items()}

    def _step(self, loss: Tensor) -> float:
        """Clip, check, step, average. Returns the gradient norm before clipping."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.optim.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        finite = bool(torch.isfinite(loss)) and (self.scaler is not None or bool(norm.isfinite()))
        if not finite:
            kept = checkpoint.newest(self.folder / "checkpoints")
            raise RunError(
                f"{self.config.name}: loss or gradient is not finite at step "
                f"{self.samples // self.config.trainer.global_batch} (sample {self.samples}); "
                f"{f'last good checkpoint: {kept}' if kept else 'no checkpoint was written yet'}"
            )
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return float(norm)

    def _resume(self) -> None:
        path = checkpoint.newest(self.folder / "checkpoints")
        if path is not None:
            self.samples = checkpoint.load(path, self.model, self.optimizer, self.ema, self.scaler)
            self.progress.say(f"{self.config.name}: goes on from sample {self.samples:,}")
        _cut_curves(self.folder / "curves.jsonl", self.samples)

    def _save(self) -> None:
        checkpoint.save(
            self.folder / "checkpoints",
            self.samples,
            self.model,
            self.optimizer,
            self.ema,
            self.scaler,
        )


def recompute_activations(model: nn.Module) -> None:
    """Switch activation checkpointing on, each library's own way; none of them reentrant.

    Raises:
        RunError: the model has no such switch.
    """
    # transformers, diffusers, timm
    for name in (
        "activation_checkpointing_enable",
        "enable_gradient_checkpointing",
        "set_grad_checkpointing",
    ):
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise RunError(
        f"{type(model).__name__} cannot recompute: trainer.activation_checkpointing=false"
    )


def _load_spread(model: nn.Module) -> dict[str, Any]:
    """Head load of the last micro-batch: a histogram a layer for wandb."""
    return {f"head_load/{name}": load.tolist() for name, load in head_load(model).items()}


def _cut_curves(path: Path, samples: int) -> None:
    """Drop the rows after ``samples``: they belong to a start that did not reach a checkpoint."""
    if not path.is_file():
        return
    rows = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["samples"] <= samples:
                rows.append(line)
        except (ValueError, KeyError):
            break
    path.write_text("".join(row + "\n" for row in rows))
