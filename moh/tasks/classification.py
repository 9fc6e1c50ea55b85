"""Images to classes: MoH-ViT's task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.config import Config
from moh.data.images import ImageSet
from moh.data.order import StepRandom
from moh.evaluation.heads import HeadLoad
from moh.tasks.base import Evaluation, Metric, Progress, Task, device_of


class Classification(Task):
    """Cross entropy with label smoothing; top-1 and top-5 on the test images."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data = ImageSet.load(config.data)
        self.order = self.data.order(config.seed)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": self.config.data.name,
            "train_images": len(self.data.train),
            "test_images": len(self.data.test),
            "sha256": self.data.fingerprint,
        }

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return self.data.train_batch(self.order, first, count)

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], random: StepRandom
    ) -> tuple[Tensor, int]:
        logits = model(batch["images"])
        loss = F.cross_entropy(
            logits.float(),
            batch["labels"],
            label_smoothing=self.config.task.label_smoothing,
            reduction="sum",
        )
        return loss, len(logits)

    def terms(self, samples: int) -> int:
        return samples

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, folder: Path, progress: Progress) -> Evaluation:
        device, size = device_of(model), self.config.eval.batch
        images, labels = self.data.test, self.data.test_labels
        load = HeadLoad(self.data.class_names)
        top1 = top5 = 0
        loss = 0.0
        with load.watch(model):
            for start in range(0, len(images), size):
                batch = self.data.normalise(images[start : start + size]).to(device)
                target = labels[start : start + size].to(device)
                load.groups_B = target
                logits = model(batch).float()
                ranked = logits.topk(5, dim=-1).indices.eq(target[:, None])
                top1 += int(ranked[:, :1].sum())
                top5 += int(ranked.sum())
                loss += F.cross_entropy(logits, target, reduction="sum").item()
                progress("evaluating", min(start + size, len(images)), len(images))
        n = len(images)
        protocol = f"{self.config.data.name}, {n} test images, {self.config.data.size} px"
        return Evaluation(
            metrics={
                "top1": _share(top1, n, protocol),
                "top5": _share(top5, n, protocol),
                "val_loss": Metric(loss / n, "nats", n, False, protocol),
            },
            head_load=load.to_json(),
        )


def _share(right: int, n: int, protocol: str) -> Metric:
    """A percentage with its binomial standard error."""
    share = right / n
    stderr = 100 * (share * (1 - share) / n) ** 0.5
    return Metric(100 * share, "%", n, True, protocol, stderr=stderr)
