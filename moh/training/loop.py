"""The training loop: every line of it moves a number."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moh import distribution
from moh.config import Config
from moh.data.order import StepRandom, stable_seed
from moh.errors import RunError, StoppedError
from moh.evaluation.cost import training_flops
from moh.heads import balance_loss, combine, head_load, routers, set_draws, sum_counts
from moh.reporting.wandb_logger import RunLogger
from moh.signals import StopRequest, stop_requests
from moh.tasks.base import Task
from moh.training import checkpoint, parallel
from moh.training.drop_path import draw_for_all_processes
from moh.training.later import Later, sent
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

    An update takes ``trainer.global_batch`` samples in micro-batches. Each of these is shared by
    all processes, process r taking the r-th part: so a run means the same on one GPU and on many.

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
        self.processes = distribution.world_size()
        self.device_batch = trainer.device_batch or trainer.global_batch // self.processes
        self.micro_batch = self.device_batch * self.processes
        self.ema: AveragedModel | None = None
        self._average_of: Callable[..., None] | None = None
        if trainer.ema_decay is not None:
            average = get_ema_multi_avg_fn(trainer.ema_decay)
            self.ema = AveragedModel(model, multi_avg_fn=average)
            self._average_of = average
        if trainer.activation_checkpointing:
            parallel.recompute_activations(model)
        if self.processes > 1:
            draw_for_all_processes(model)
        self.run_model = parallel.wrap(model, self.ema.module if self.ema else None, trainer)
        # Of the model (FSDP has put its own in) and, after a first update here, of its average.
        self._parameters, self._averaged = list(model.parameters()), list[nn.Parameter]()
        self.device = self._parameters[0].device
        self.routers = [router for _, router in routers(model)]
        self.optimizer = AdamW(
            task.param_groups(model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            fused=True,
        )
        half = trainer.precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda") if half else None
        self.samples = 0
        # On a GPU the host reads how an update went while the next one is computed.
        self.reads_late = self.device.type == "cuda"
        self._outcomes: list[tuple[int, Later]] = []

    def autocast(self) -> AbstractContextManager[object]:
        """The precision's autocast; none for fp32."""
        dtype = DTYPES[self.config.trainer.precision]
        # FSDP casts parameters and inputs itself.
        if dtype == torch.float32 or self.config.trainer.parallel == "fsdp":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

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
        with self._curves() as curves, stop_requests(repeated=self.processes > 1) as stop:
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
            row = self._guarded_update(logged, bool(stop))
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
            each = samples_per_second * self._flops_of_sample / self.processes / 1e12
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

    def _guarded_update(self, logged: bool, stop: bool) -> dict[str, Any]:
        try:
            return self._update(logged, stop)
        except torch.OutOfMemoryError:
            smaller = max(1, self.device_batch // 2)
            raise RunError(
                f"{self.config.name}: out of memory with trainer.device_batch="
                f"{self.device_batch}; try trainer.device_batch={smaller}"
            ) from None

    def _update(self, logged: bool, stop: bool) -> dict[str, Any]:
        """One optimiser step over the global batch, and where the device is a GPU no wait for it.

        Args:
            logged: whether the row will be written.
            stop: whether this process was asked to stop.

        Returns:
            The row of the curves; little more than the number of samples where it is not logged.
        """
        config, trainer = self.config, self.config.trainer
        # Dropout and DropPath draw from the global stream: seeded anew for each update, so that
        # a run that was stopped here goes on with the same draws.
        torch.manual_seed(stable_seed(config.seed, "model", self.samples))
        rate = learning_rate(config.optim, self.samples, trainer.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        # Summed over the processes below: task loss, balance loss, processes asked to stop.
        sums = torch.zeros(3, device=self.device)
        sums[2] = float(stop)
        terms = self.task.terms(trainer.global_batch)
        share = self.micro_batch / trainer.global_batch
        for offset, batch in self._micro_batches():
            random = StepRandom(
                config.seed, self.samples, trainer.global_batch, offset, self.device_batch
            )
            more = offset // self.micro_batch + 1 < trainer.global_batch // self.micro_batch
            with parallel.without_sync(self.run_model, wanted=more):
                self._set_draws(offset)
                with self.autocast():
                    loss, _ = self.task.loss(self.run_model, batch, random)
                loss = loss / terms
                sums[0] += loss.detach()
                if self.processes > 1:
                    sum_counts(self.routers, distribution.sum_over_processes)
                aux = balance_loss(self.routers)
                # Before the backward pass, in which a recomputed forward pass counts anew.
                load = {} if more or not logged else _load_spread(self.model)
                if aux is not None:
                    sums[1] += aux.detach() * share
                    loss = loss + config.heads.balance_coef * share * aux
                # Gradients come out as means over the processes; the parts must add up.
                loss = loss * self.processes if self.processes > 1 else loss
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        distribution.sum_over_processes(sums)
        norm, finite = self._step(sums[0] + sums[1])
        self._outcomes.append((self.samples, Later(torch.stack((finite.to(sums.dtype), sums[2])))))
        row: dict[str, Any] = {"samples": self.samples + trainer.global_batch}
        if logged:
            task_loss, balance, _ = sums.tolist()
            row["task_loss"] = task_loss
            row["balance_loss"] = balance if aux is not None else None
            row["loss"] = task_loss + config.heads.balance_coef * balance
            row["lr"] = rate
            row["grad_norm"] = float(norm)
            row.update(load)
        return row

    def _set_draws(self, offset: int) -> None:
        """What the random control draws belongs to the samples, however they are split."""
        first = self.samples + offset
        numbers = torch.arange(first, first + self.device_batch)
        set_draws(self.routers, combine(stable_seed(self.config.seed, "heads"), numbers))

    def _micro_batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """This process's part of each micro-batch, and where in the global batch it begins."""
        own = distribution.rank() * self.device_batch
        for start in range(own, self.config.trainer.global_batch, self.micro_batch):
            batch = self.task.batch(self.samples + start, self.device_batch)
            yield start, {key: sent(value, self.device) for key, value in batch.items()}

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
        self._average()
        return norm, finite

    def _average(self) -> None:
        """``AveragedModel.update_parameters`` without its walk through all modules."""
        if self.ema is None or self._average_of is None:
            return
        if self._averaged:
            with torch.no_grad():
                self._average_of(self._averaged, self._parameters, self.ema.n_averaged)
            self.ema.n_averaged += 1
            return
        self.ema.update_parameters(self.model)
        self._averaged = list(self.ema.module.parameters())

    def _resume(self) -> None:
        path = checkpoint.newest(self.folder / "checkpoints")
        if path is not None:
            self.samples = checkpoint.load(path, self.model, self.optimizer, self.ema, self.scaler)
            self.progress.say(f"{self.config.name}: goes on from sample {self.samples:,}")
        if distribution.is_main():
            _cut_curves(self.folder / "curves.jsonl", self.samples)

    def _save(self) -> None:
        checkpoint.save(
            self.folder / "checkpoints",
            self.samples,
            self.model,
            self.optimizer,
            self.ema,
            self.scaler,
            keep_at=self.config.trainer.keep_at,
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
