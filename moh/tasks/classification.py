"""Images to classes: MoH-ViT's task."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from moh.config import Config
from moh.data.classes import relabelling
from moh.data.folder import FolderImages
from moh.data.images import ImageSet
from moh.data.order import ShuffledOrder, StepRandom, stable_seed
from moh.data.readers import READERS
from moh.data.validation_images import ValidationImages
from moh.distribution import gather_to_main, is_main, rank, sum_over_processes, world_size
from moh.errors import RunError
from moh.evaluation.heads import HeadLoad
from moh.evaluation.precision import precision, precision_marks
from moh.heads import combine, set_draws
from moh.tasks.base import (
    LOOK_BATCH,
    Evaluation,
    Look,
    Metric,
    Progress,
    Task,
    device_of,
    spread_over,
)


class Classification(Task):
    """Cross entropy with label smoothing; top-1 and top-5 on the test images."""

    look_samples = 64

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data = _open(config)
        self.class_names = self.data.class_names  # in the order of the model's outputs
        self._relabelled: Tensor | None = None
        self.mix = _mixing(config)
        self.order: ShuffledOrder | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": self.config.data.name,
            "train_images": self.data.num_train,
            "test_images": self.data.num_test,
            "sha256": self.data.fingerprint,
            **self.data.summary,
        }

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.data.known_names

    def take_classes(self, names: Sequence[str]) -> None:
        own = self.data.known_names
        if own is None:
            self.class_names = tuple(names)
            return
        where = f"data.root={self.config.data.root}"
        self._relabelled = relabelling(names, own, where)
        if self._relabelled is None:
            return
        self.class_names = tuple(names)
        if is_main():
            print(f"{where}: labels in the order of the weights' classes, matched by name")

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        assert isinstance(self.data, ImageSet | FolderImages)
        self.order = self.order or self.data.order(self.config.seed)
        batch = self.data.train_batch(self.order, first, count)
        if self.mix is None:
            return batch
        size = self.config.task.mix_batch
        mixed = []
        for start in range(0, count, size):
            # timm draws from NumPy's global stream.
            np.random.seed(stable_seed(self.config.seed, "mix", first + start) % 2**32)
            part = slice(start, start + size)
            mixed.append(self.mix(batch["images"][part], batch["labels"][part]))
        images, labels = zip(*mixed, strict=True)
        return {"images": torch.cat(images), "labels": torch.cat(labels)}

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], random: StepRandom
    ) -> tuple[Tensor, int]:
        logits = model(batch["images"])
        # Mixed labels are distributions, smoothed already.
        smoothing = self.config.task.label_smoothing if self.mix is None else 0.0
        loss = F.cross_entropy(
            logits.float(), batch["labels"], label_smoothing=smoothing, reduction="sum"
        )
        return loss, len(logits)

    def terms(self, samples: int) -> int:
        return samples

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, folder: Path, progress: Progress) -> Evaluation:
        config = self.config.eval
        device = device_of(model)
        load = HeadLoad(self.class_names)
        right = torch.zeros(3, dtype=torch.int64)  # top-1, top-5, images
        losses: list[float] = []
        begun = time.monotonic()
        watched = load.watch(model) if config.head_load else nullcontext()
        with watched, precision(config.precision, device):
            for index, (images, labels) in enumerate(self.data.test_batches(config.batch)):
                target = self._of_model(labels).to(device)
                load.groups_B = target
                # Of several processes each takes whole batches in turn.
                first = (rank() + index * world_size()) * config.batch
                set_draws(model, self._draws(range(first, first + len(target))))
                logits = self._logits(model, images.to(device))
                ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices.eq(target[:, None])
                right[:2] += torch.stack([ranked[:, 0].sum(), ranked.sum()]).cpu()
                right[2] += len(target)
                losses.append(F.cross_entropy(logits, target, reduction="sum").item())
                if not math.isfinite(losses[-1]):
                    raise RunError(
                        f"{self.config.name}: logits are not finite in eval.precision="
                        f"{config.precision}"
                    )
                # Of several processes each sees its share; all go at about the same pace.
                done = min(int(right[2]) * world_size(), self.data.num_test)
                rate = done / (time.monotonic() - begun)
                progress("evaluating", done, self.data.num_test, f"{rate:.0f} images/s")
        set_draws(model, None)
        sum_over_processes(right)
        load.sum_over_processes()
        gathered = gather_to_main(losses) or [losses]
        top1, top5, n = right.tolist()
        # Correctly rounded, so that the order of the batches does not matter.
        loss = math.fsum(value for part in gathered for value in part)
        protocol = (
            f"{self.config.data.name}, {n} test images, {self.data.preparation}, {config.precision}"
        )
        marks = [*self.data.marks, *precision_marks(config.precision)]
        if self._relabelled is not None:
            marks.append("classes matched by name")
        return Evaluation(
            metrics={
                "top1": _share(top1, n, protocol, marks),
                "top5": _share(top5, n, protocol, marks),
                "val_loss": Metric(loss / n, "nats", n, False, protocol, marks=marks),
            },
            head_load=load.to_json(),
        )

    @torch.inference_mode()
    def look(self, model: nn.Module, samples: int, progress: Progress) -> Look:
        device = device_of(model)
        load = HeadLoad(self.class_names)
        numbers = spread_over(self.data.num_test, samples)
        with load.watch(model):
            for start in range(0, len(numbers), LOOK_BATCH):
                part = numbers[start : start + LOOK_BATCH]
                images, labels = self.data.test_samples(part)
                load.groups_B = self._of_model(labels).to(device)
                set_draws(model, self._draws(part))
                self._logits(model, images.to(device))
                progress("looking at heads", start + len(part), len(numbers))
        set_draws(model, None)
        return Look(f"{len(numbers)} test images of {self.config.data.name}", load.to_json())

    def _draws(self, numbers: Sequence[int]) -> Tensor:
        """Keys of test images, for the random control."""
        return combine(stable_seed(self.config.seed, "heads", "test"), torch.tensor(numbers))

    def _of_model(self, labels: Tensor) -> Tensor:
        """The data's labels as the model numbers its classes."""
        return labels if self._relabelled is None else self._relabelled[labels]

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        try:
            return model(images).float()
        except torch.OutOfMemoryError:
            batch = self.config.eval.batch
            raise RunError(
                f"{self.config.name}: out of memory with eval.batch={batch}; "
                f"try eval.batch={max(1, batch // 2)}"
            ) from None


def _open(config: Config) -> ImageSet | ValidationImages:
    """The images that a run needs: to score given weights, those of the validation part alone."""
    data, classes = config.data, config.model.num_classes
    if data.form not in READERS:
        return ImageSet.load(data, classes)
    given = config.mode == "eval" and config.checkpoint is not None
    trains = config.mode != "eval" or (not given and (Path(data.root or "") / "train").is_dir())
    if trains:
        return FolderImages(data, config.task, classes, config.trainer.global_batch)
    return ValidationImages(data, classes)


def _mixing(config: Config) -> Mixup | None:
    """timm's Mixup and CutMix, None if the task uses neither."""
    task = config.task
    if not task.mixup and not task.cutmix:
        return None
    return Mixup(
        mixup_alpha=task.mixup,
        cutmix_alpha=task.cutmix,
        switch_prob=task.mixup_switch,
        label_smoothing=task.label_smoothing,
        num_classes=config.model.num_classes,
    )


def _share(right: int, n: int, protocol: str, marks: list[str]) -> Metric:
    """A percentage with its binomial standard error."""
    share = right / n
    stderr = 100 * (share * (1 - share) / n) ** 0.5
    return Metric(100 * share, "%", n, True, protocol, stderr=stderr, marks=marks)
