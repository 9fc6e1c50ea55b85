"""The training loop: every line of it moves a number."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from moh import distribution
from moh.config import Config
from moh.errors import RunError, StoppedError
from moh.evaluation.cost import training_flops
from moh.reporting.wandb_logger import RunLogger
from moh.signals import StopRequest, stop_requests
from moh.tasks.base import Task
from moh.training import checkpoint, parallel
from moh.training.averaging import ModelAverage
from moh.training.batch_norm import average_statistics, has_batch_norm
from moh.training.gradients import Gradients
from moh.training.later import Later
from moh.training.progress import RunProgress
from moh.training.schedule import learning_rate

Result = TypeVar("Result")


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
        model: equal on every process; on its device already, unless FSDP is to put it there.
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
        trainer, optim = config.trainer, config.optim
        self.ema = ModelAverage(model, trainer.ema_decay) if trainer.ema_decay else None
        if trainer.activation_checkpointing:
            parallel.recompute_activations(model)
        run_model = parallel.wrap(model, self.ema.module if self.ema else None, trainer)
        self._parameters = list(model.parameters())  # FSDP has put its own in
        self.device = self._parameters[0].device
        self.optimizer = AdamW(
            task.param_groups(model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            fused=True,
        )
        half = trainer.precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda") if half else None
        self.gradients = Gradients(config, model, run_model, task, self.scaler)
        self.origin = {
            "device_batch": self.gradients.device_batch,
            "data_sha256": task.fingerprint().get("sha256"),
        }
        self.samples = 0
        # On a GPU the host reads how an update went while the next one is computed.
        self.reads_late = self.device.type == "cuda"
        self._outcomes: list[tuple[int, Later]] = []

    def fit(self) -> Trained:
        """Train up to the budget, from the newest whole checkpoint if there is one.

        Raises:
            StoppedError: a signal asked for it; a checkpoint was written.
            RunError: a loss that is not finite (the last good checkpoint stays), no memory, or
                a checkpoint that cannot be read or written.
        """
        self._resume()
        start, begun = self.samples, time.monotonic()
        self.model.train()
        # Ctrl-C reaches every process of a terminal, and the launcher repeats it to them.
        with (
            self._curves() as curves,
            stop_requests(repeated=distribution.world_size() > 1) as stop,
        ):
            if self.samples < self.config.trainer.samples:
                self._in_memory(self._probe)
            self._train(curves, stop)
        seconds = time.monotonic() - begun if self.samples > start else 0.0
        return Trained(self.ema.module if self.ema else None, self.samples, seconds)

    def _train(self, curves: IO[str], stop: StopRequest) -> None:
        total, batch = self.config.trainer.samples, self.config.trainer.global_batch
        every = self.config.trainer.checkpoint_every or total
        wanted = {total, *self.config.trainer.keep_at}
        marked, since = time.monotonic(), self.samples
        while self.samples < total:
            step = self.samples // batch
            logged = step % self.config.trainer.log_every == 0 or self.samples + batch >= total
            row = self._in_memory(partial(self._update, logged, bool(stop)))
            after = self.samples + batch
            saved = after % every == 0 or after in wanted
            stopping = self._outcome(late=self.reads_late and not (logged or saved))
            self.samples = after
            if logged:
                now = time.monotonic()
                row |= self._speed((self.samples - since) / max(now - marked, 1e-9))
                marked, since = now, self.samples
                curves.write(json.dumps(row) + "\n")
                curves.flush()
                self.logger.log(row, step=step)
                self._show(row)
            else:
                self.progress("training", self.samples, total, self._note)
            if saved or stopping:
                self._outcome(late=False)
                self._save()
            if stopping and self.samples < total:
                raise StoppedError(
                    f"stopped by {stop.name} at sample {self.samples:,} of "
                    f"{total:,}; a checkpoint is written, the same command goes on from it"
                )

    def _speed(self, samples_per_second: float) -> dict[str, float]:
        """Throughput; on a GPU also how well it is used, and its memory."""
        row = {"samples_per_second": samples_per_second}
        if self.device.type == "cuda":
            each = samples_per_second * self._flops_of_sample / distribution.world_size() / 1e12
            row["tflops_per_gpu"] = each
            row["model_flops_utilisation"] = each / self.config.launcher.peak_tflops
            row["peak_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        return row

    @cached_property
    def _flops_of_sample(self) -> float:
        return training_flops(self.config)

    def _curves(self) -> IO[str]:
        path = self.folder / "curves.jsonl" if distribution.is_main() else Path(os.devnull)
        return open(path, "a")

    _note = ""

    def _show(self, row: dict[str, Any]) -> None:
        note = f"loss {row['task_loss']:.3f}"
        if row["balance_loss"] is not None:
            note += f"  balance {row['balance_loss']:.2f}"
        rate = row["samples_per_second"]
        self._note = f"{note}  {rate:.0f}/s" if rate >= 10 else f"{note}  {rate:.2g}/s"
        self.progress("training", self.samples, self.config.trainer.samples, self._note)

    def _outcome(self, late: bool) -> bool:
        """Read how the updates went that were not read yet; True if any process is to stop.

        Args:
            late: leave the newest one for the next call, while the device works on it.

        Raises:
            RunError: a loss or gradient that was not finite.
        """
        stopping = False
        while len(self._outcomes) > late:
            samples, outcome = self._outcomes.pop(0)
            finite, asked = outcome.read()
            if not finite:
                kept = checkpoint.newest(self.folder / "checkpoints")
                good = f"last good checkpoint: {kept}" if kept else "no checkpoint was written yet"
                raise RunError(
                    f"{self.config.name}: loss or gradient is not finite at step "
                    f"{samples // self.config.trainer.global_batch} (sample {samples}); {good}"
                )
            stopping |= bool(asked)
        return stopping

    def _in_memory(self, work: Callable[[], Result]) -> Result:
        """Do something, and say what to change where the device has no memory for it."""
        try:
            return work()
        except torch.OutOfMemoryError:
            batch = self.gradients.device_batch
            raise RunError(
                f"{self.config.name}: out of memory with trainer.device_batch={batch}; try "
                f"trainer.device_batch={max(1, batch // 2)}, which goes on with this run"
            ) from None

    def _probe(self) -> None:
        self.gradients.probe(self.samples)
        if self.gradients.split and has_batch_norm(self.model):
            self.progress.say(
                f"{self.config.name}: batch norm normalises over {self.gradients.device_batch} "
                "samples at a time; another trainer.device_batch gives other numbers"
            )

    def _update(self, logged: bool, stop: bool) -> dict[str, Any]:
        """One optimiser step over the global batch, and where the device is a GPU no wait for it.

        Args:
            logged: whether the row will be written.
            stop: whether this process was asked to stop.

        Returns:
            The row of the curves; little more than the number of samples where it is not logged.
        """
        config, trainer = self.config, self.config.trainer
        rate = learning_rate(config.optim, self.samples, trainer.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        losses, load = self.gradients.compute(self.samples, logged)
        # Summed over the processes: task loss, balance loss, processes asked to stop.
        sums = torch.cat((losses, losses.new_full((1,), float(stop))))
        distribution.sum_over_processes(sums)
        norm, finite = self._step(sums[0] + sums[1])
        self._outcomes.append((self.samples, Later(torch.stack((finite.to(sums.dtype), sums[2])))))
        row: dict[str, Any] = {"samples": self.samples + trainer.global_batch}
        if logged:
            task_loss, balance, _ = sums.tolist()
            row["task_loss"] = task_loss
            row["balance_loss"] = balance if self.gradients.has_balance_loss else None
            row["loss"] = task_loss + config.heads.balance_coef * balance
            row["lr"] = rate
            row["grad_norm"] = float(norm)
            row.update({f"head_load/{name}": heads for name, heads in load.items()})
        return row

    def _step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, check, step, average.

        Weights that are not finite are never saved: the outcome is read before.

        Returns:
            The gradient norm before clipping, and whether loss and norm are finite; a scaler
            skips updates with infinite gradients, so that its norm does not count.
        """
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.optim.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        finite = loss.isfinite() if self.scaler else loss.isfinite() & norm.isfinite()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return norm, finite

    def _resume(self) -> None:
        path = checkpoint.newest(self.folder / "checkpoints")
        if path is not None:
            self.samples = checkpoint.load(path, self.model, self.optimizer, self.ema, self.scaler)
            self._check_origin(checkpoint.origin(path))
            self.progress.say(f"{self.config.name}: goes on from sample {self.samples:,}")
        if distribution.is_main():
            _cut_curves(self.folder / "curves.jsonl", self.samples)

    def _check_origin(self, before: Mapping[str, Any]) -> None:
        """Refuse to go on where the numbers would be those of no run."""
        name, now = self.config.name, self.origin
        if before.get("data_sha256", now["data_sha256"]) != now["data_sha256"]:
            raise RunError(
                f"{name}: data.root={self.config.data.root} holds other data than those that this "
                "run was trained on; take them, or another name=NAME"
            )
        batch = before.get("device_batch", now["device_batch"])
        if batch != now["device_batch"] and has_batch_norm(self.model):
            raise RunError(
                f"{name}: trainer.device_batch {now['device_batch']}: batch norm has normalised "
                f"over {batch} samples at a time so far; go on with trainer.device_batch={batch}"
            )

    def _save(self) -> None:
        average_statistics(self.model)
        if self.ema is not None:
            self.ema.copy_buffers(self.model)
        checkpoint.save(
            self.folder / "checkpoints",
            self.samples,
            self.model,
            self.optimizer,
            self.ema,
            self.scaler,
            self.origin,
            keep_at=self.config.trainer.keep_at,
        )


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
