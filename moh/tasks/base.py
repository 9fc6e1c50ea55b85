"""What the training loop asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from moh.data.order import StepRandom


class Progress(Protocol):
    """Shows that ``done`` of ``total`` are through in a phase, and a note beside it."""

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None: ...


@dataclass
class Metric:
    """One score.

    Attributes:
        value: in ``unit``.
        n: images, tokens or items behind it.
        higher_is_better: None where neither is.
        protocol: data, preprocessing and pipeline, in words.
        marks: what must be said beside the number ("limit 100 items").
    """

    value: float
    unit: str
    n: int
    higher_is_better: bool | None
    protocol: str
    stderr: float | None = None
    marks: list[str] = field(default_factory=list)


@dataclass
class Evaluation:
    """Scores of a model, and what was seen on the way.

    Attributes:
        metrics: name -> score.
        head_load: JSON data of :class:`moh.evaluation.heads.HeadLoad`, None for MHA.
        head_similarity: JSON data of :class:`moh.evaluation.similarity.HeadSimilarity`, None
            where it was not measured.
        images: name -> picture file in the run folder.
        benchmarks: what :func:`moh.evaluation.benchmarks.evaluate_benchmarks` gives.
        table: shown when the run ends, a rich renderable.
    """

    metrics: dict[str, Metric]
    head_load: dict[str, Any] | None = None
    head_similarity: dict[str, Any] | None = None
    images: dict[str, Path] = field(default_factory=dict)
    benchmarks: dict[str, dict[str, Any]] | None = None
    table: Any = None


@dataclass
class Look:
    """A model run over some samples without a score.

    Attributes:
        samples: what was run, in words.
        head_load: as in :class:`Evaluation`.
    """

    samples: str
    head_load: dict[str, Any] | None


class Task(ABC):
    """Batch to loss, and model to scores.

    Attributes:
        evaluates_together: whether all processes of a run take part in :meth:`evaluate`; else
            the main one is left to do it alone.
        look_samples: evaluation samples for :meth:`look` where the configuration names no number.
    """

    evaluates_together = True
    look_samples: int

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What data this is: name, sizes, hash."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes in order of label; None where the data state none."""
        return None

    def take_classes(self, names: Sequence[str]) -> None:  # noqa: B027
        """Evaluate weights that were trained on these classes, in this order.

        Raises:
            RunError: the data are of other classes; one line.
        """

    @abstractmethod
    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Training samples ``first`` to ``first + count - 1`` in this run's order, on the CPU."""

    @abstractmethod
    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], random: StepRandom
    ) -> tuple[Tensor, int]:
        """Summed loss of a batch and the number of terms in it (images or tokens)."""

    @abstractmethod
    def terms(self, samples: int) -> int:
        """Loss terms in ``samples`` samples; the loop divides by those of the global batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, folder: Path, progress: Progress) -> Evaluation:
        """Score a model in evaluation mode; pictures go to ``folder``."""

    def check_evaluation(self) -> None:  # noqa: B027
        """Find what :meth:`evaluate` would miss, before a run spends weeks on training.

        Raises:
            RunError: something is missing; one line.
        """

    @abstractmethod
    def look(self, model: nn.Module, samples: int, progress: Progress) -> Look | None:
        """Run a model in evaluation mode over evaluation samples, for whoever watches it.

        Nothing is scored, and nobody else takes part: of several processes the main one is enough.

        Args:
            samples: how many, spread over the evaluation set.

        Returns:
            None where there is nothing to run it on.
        """

    def param_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """AdamW groups: no decay for one-dimensional parameters and what the model names."""
        names: Callable[[], set[str]] | None = getattr(model, "no_weight_decay", None)
        skip = names() if names is not None else set()
        return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=skip)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device


LOOK_BATCH = 8  # samples whose attention patterns are computed together


def spread_over(size: int, count: int) -> list[int]:
    """``count`` numbers spread evenly over 0..size-1; all of them where there are no more."""
    count = min(count, size)
    return [index * size // count for index in range(count)]
