"""Loss and gradients of one global batch, however it is split over processes and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moh import distribution
from moh.config import Config
from moh.data.order import StepRandom, stable_seed
from moh.errors import RunError
from moh.heads import (
    balance_loss,
    combine,
    head_load,
    routers,
    selection_counts,
    set_draws,
    set_selection_counts,
    sum_counts,
)
from moh.tasks.base import Task
from moh.training import parallel
from moh.training.batch_norm import unchanged_statistics
from moh.training.later import sent
from moh.training.sample_draws import OtherDraws, SampleDraws, backward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Batch = dict[str, Tensor]


class Gradients:
    """Runs a model forward and backward over the samples of an update.

    An update takes ``trainer.global_batch`` samples in micro-batches. Each of these is shared by
    all processes, process r taking the r-th part. Losses, balance loss and random numbers are
    those of the global batch, so that a run means the same however it is split; batch norm alone
    normalises over what one process has at a time.

    Args:
        model: as built, or sharded.
        run_model: what to call in its place, see :func:`moh.training.parallel.wrap`.
        scaler: of fp16 losses.

    Attributes:
        device_batch: samples that a process holds at a time.
        pieces: micro-batches of an update.
        draws_at_random: whether the model draws random numbers in training; see :meth:`probe`.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        run_model: nn.Module,
        task: Task,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.config, self.model, self.run_model, self.task = config, model, run_model, task
        self.scaler = scaler
        self.processes = distribution.world_size()
        trainer = config.trainer
        self.device_batch = trainer.device_batch or trainer.global_batch // self.processes
        self.micro_batch = self.device_batch * self.processes
        self.pieces = trainer.global_batch // self.micro_batch
        self.device = next(model.parameters()).device
        self.routers = [router for _, router in routers(model)]
        self.draws_at_random = False

    @property
    def split(self) -> bool:
        """Whether no process holds the global batch at once."""
        return self.processes > 1 or self.pieces > 1

    def probe(self, samples: int) -> None:
        """Find out, in a forward pass without gradients, what the model draws at random.

        Args:
            samples: trained so far.

        Raises:
            RunError: it draws what cannot be the same however the global batch is split, which it
                is.
        """
        offset, batch = next(iter(self._micro_batches(samples)))
        draws = SampleDraws(offset, self.device_batch)
        others = OtherDraws(draws)
        eager = torch.compiler.set_stance("force_eager")
        with torch.no_grad(), unchanged_statistics(self.model), eager, draws, others:
            self._forward(self.model, samples, offset, batch)
        self.draws_at_random = draws.used
        if others.found and self.split:
            raise RunError(
                f"{self.config.name}: the model draws random numbers ({others.found[0]}) that "
                "would depend on how the global batch is split; train it in one process with "
                "trainer.device_batch=null, or switch them off"
            )

    def compute(self, samples: int, logged: bool) -> tuple[Tensor, dict[str, Any]]:
        """Leave the gradients of an update in the parameters.

        Args:
            samples: trained so far.
            logged: whether head load is wanted.

        Returns:
            Task loss and balance loss (0 without one) of the global batch, this process's part,
            (2,): sums over the processes give the whole. And head load, a list for each layer.
        """
        config = self.config
        parts = torch.zeros(2, device=self.device)
        terms = self.task.terms(config.trainer.global_batch)
        batches: Iterable[tuple[int, Batch]] = self._micro_batches(samples)
        counts = None
        if self._must_count_ahead(logged):
            batches = list(batches)
            counts = self._count_ahead(samples, batches)
        load: dict[str, Any] = {}
        for index, (offset, batch) in enumerate(batches, start=1):
            last = index == self.pieces
            with (
                parallel.without_sync(self.run_model, wanted=not last),
                self._sample_draws(offset),
            ):
                loss = self._forward(self.run_model, samples, offset, batch) / terms
                parts[0] += loss.detach()
                if counts is not None:
                    set_selection_counts(self.routers, counts)
                elif self.processes > 1:
                    sum_counts(self.routers, distribution.sum_over_processes)
                # Before the backward pass, in which a recomputed forward pass counts anew.
                if last and logged:
                    load = {name: heads.tolist() for name, heads in head_load(self.model).items()}
                balance = balance_loss(self.routers)
                # Without the counts of all micro-batches nobody asked for it.
                if balance is not None and (counts is not None or self.pieces == 1):
                    parts[1] += balance.detach()
                    loss = loss + config.heads.balance_coef * balance
                # Gradients come out as means over the processes; the parts must add up.
                loss = loss * self.processes if self.processes > 1 else loss
                backward(self.scaler.scale(loss) if self.scaler else loss)
        return parts, load

    @property
    def has_balance_loss(self) -> bool:
        """Whether the model has routers whose selection is learned."""
        return any(router.options.selection == "learned" for router in self.routers)

    def _must_count_ahead(self, logged: bool) -> bool:
        trained = self.has_balance_loss and self.config.heads.balance_coef != 0
        return self.pieces > 1 and bool(self.routers) and (logged or trained)

    def _count_ahead(self, samples: int, batches: Iterable[tuple[int, Batch]]) -> Tensor:
        """How often each routed head is selected in the global batch.

        The balance loss is a product of two means over the global batch: the gradient that one
        micro-batch gives it needs the selections of all. So accumulation costs such a model one
        more forward pass. It is run with gradients, so that it rounds and selects as the pass
        that follows.
        """
        total: Tensor | None = None
        with unchanged_statistics(self.model):
            for offset, batch in batches:
                with (
                    parallel.without_sync(self.run_model, wanted=True),
                    self._sample_draws(offset),
                ):
                    self._forward(self.run_model, samples, offset, batch)
                counts = selection_counts(self.routers)
                total = counts if total is None else total + counts
        assert total is not None
        distribution.sum_over_processes(total)
        return total

    def _forward(self, model: nn.Module, samples: int, offset: int, batch: Batch) -> Tensor:
        """Summed task loss of this process's part of a micro-batch."""
        config = self.config
        # The global stream is seeded anew for each part of each update: a run that was stopped
        # goes on with the same draws, and all parts have the same keys.
        torch.manual_seed(stable_seed(config.seed, "model", samples))
        self._set_draws(samples + offset)
        random = StepRandom(
            config.seed, samples, config.trainer.global_batch, offset, self.device_batch
        )
        batch = {key: sent(value, self.device) for key, value in batch.items()}
        with self._autocast():
            loss, _ = self.task.loss(model, batch, random)
        return loss

    def _autocast(self) -> AbstractContextManager[object]:
        """The precision's autocast; none for fp32."""
        dtype = DTYPES[self.config.trainer.precision]
        # FSDP casts parameters and inputs itself.
        if dtype == torch.float32 or self.config.trainer.parallel == "fsdp":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def _sample_draws(self, offset: int) -> AbstractContextManager[object]:
        return SampleDraws(offset, self.device_batch) if self.draws_at_random else nullcontext()

    def _set_draws(self, first: int) -> None:
        """What the random control draws belongs to the samples, however they are split."""
        numbers = torch.arange(first, first + self.device_batch)
        set_draws(self.routers, combine(stable_seed(self.config.seed, "heads"), numbers))

    def _micro_batches(self, samples: int) -> Iterator[tuple[int, Batch]]:
        """This process's part of each micro-batch, and where in the global batch it begins."""
        own = distribution.rank() * self.device_batch
        for start in range(own, self.config.trainer.global_batch, self.micro_batch):
            yield start, self.task.batch(samples + start, self.device_batch)
