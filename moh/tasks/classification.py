"""Images to classes: MoH-ViT's task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from moh.config import Config
from moh.data.folder import FolderImages
from moh.data.images import ImageSet
from moh.data.order import StepRandom, stable_seed
from moh.evaluation.heads import HeadLoad
from moh.tasks.base import Evaluation, Metric, Progress, Task, device_of


class Classification(Task):
    """Cross entropy with label smoothing; top-1 and top-5 on the test images."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data: ImageSet | FolderImages
        if config.data.form == "folder":
            self.data = FolderImages(
                config.data, config.task, config.model.num_classes, config.trainer.global_batch
            )
        else:
            self.data = ImageSet.load(config.data)
        self.mix = _mixing(config)
        self.order = self.data.order(config.seed)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": self.config.data.name,
            "train_images": self.data.num_train,
            "test_images": self.data.num_test,
            "sha256": self.data.fingerprint,
        }

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
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
        device, size = device_of(model), self.config.eval.batch
        load = HeadLoad(self.data.class_names)
        top1 = top5 = n = 0
        loss = 0.0
        with load.watch(model):
            for images, labels in self.data.test_batches(size):
                target = labels.to(device)
                load.groups_B = target
                logits = model(images.to(device)).float()
                ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices.eq(target[:, None])
                top1 += int(ranked[:, :1].sum())
                top5 += int(ranked.sum())
                loss += F.cross_entropy(logits, target, reduction="sum").item()
                n += len(target)
                progress("evaluating", n, self.data.num_test)
        protocol = f"{self.config.data.name}, {n} test images, {self.config.data.size} px"
        return Evaluation(
            metrics={
                "top1": _share(top1, n, protocol),
                "top5": _share(top5, n, protocol),
                "val_loss": Metric(loss / n, "nats", n, False, protocol),
            },
            head_load=load.to_json(),
        )


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


def _share(right: int, n: int, protocol: str) -> Metric:
    """A percentage with its binomial standard error."""
    share = right / n
    stderr = 100 * (share * (1 - share) / n) ** 0.5
    return Metric(100 * share, "%", n, True, protocol, stderr=stderr)
