"""Class-conditional diffusion: MoH-DiT's task."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moh.config import Config
from moh.data.encoding import EncodedFolder
from moh.data.images import ImageSet
from moh.data.latents import CachedLatents
from moh.data.order import StepRandom, stable_seed
from moh.errors import RunError
from moh.evaluation.features import FeatureExtractor, load_features
from moh.evaluation.frechet import FeatureStatistics, frechet_distance
from moh.evaluation.heads import HeadLoad
from moh.evaluation.sampling import class_labels, sample, to_uint8
from moh.reporting.grid import save_class_grid
from moh.tasks.base import Evaluation, Metric, Progress, Task, device_of
from moh.tasks.diffusion import GaussianDiffusion, Model

FULL_SET = 50_000  # images behind a quotable Frechet distance


class Generation(Task):
    """Noise prediction with learned variance; Frechet distance of samples to test images."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data = _open(config)
        self.order = self.data.order(config.seed)
        self.diffusion = GaussianDiffusion(config.task.diffusion_steps)
        self.num_classes = config.model.num_classes

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": self.config.data.name,
            "train_images": self.data.num_train,
            "test_images": self.data.num_test,
            "sha256": self.data.fingerprint,
        }

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return self.data.train_batch(self.order, first, count)

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], random: StepRandom
    ) -> tuple[Tensor, int]:
        if isinstance(self.data, EncodedFolder):
            batch["images"] = self.data.encode(batch)
        images, labels = batch["images"], batch["labels"]
        t_B = random.integers(self.diffusion.num_steps).to(images.device)
        noise = random.normal(*images.shape[1:]).to(images.device)
        # Once a sample, for the whole model: dropped labels become the null class.
        dropped_B = random.uniform().to(images.device) < self.config.task.label_dropout
        labels_B = torch.where(dropped_B, self.num_classes, labels)
        losses = self.diffusion.training_losses(model, images, t_B, labels_B, noise)
        return losses.loss.sum(), len(images)

    def terms(self, samples: int) -> int:
        return samples

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, folder: Path, progress: Progress) -> Evaluation:
        evaluation = self.config.eval
        load = HeadLoad(self.data.class_names[: self.num_classes])
        distance, images = self._distance(model, progress, load)
        names = self.data.class_names[: self.num_classes]
        save_class_grid(images, names, folder / "samples.png")
        name = self.extractor.metric.lower().replace("-", "_")
        count = self.num_samples
        marks = [f"{count:,} samples"] if count < FULL_SET else []
        protocol = (
            f"{self.extractor.metric}, {count} samples against {self.data.num_test} test "
            f"images of {self.config.data.name} at {self.config.data.size} px, "
            f"{evaluation.sampling_steps} DDPM steps, guidance {evaluation.guidance:g}"
        )
        metrics = {
            name: Metric(distance, "", count, False, protocol, marks=marks),
            f"{name}_untrained": self.untrained(progress),
        }
        return Evaluation(metrics, load.to_json(), {"samples": folder / "samples.png"})

    @property
    def num_samples(self) -> int:
        """Images to generate."""
        return self.config.eval.samples or FULL_SET

    def untrained(self, progress: Progress) -> Metric:
        """The same distance before training: what a score must be seen against.

        DiT's output layer starts at zero, so an untrained model predicts zero whatever its heads
        are: one number serves MHA and MoH alike.
        """

        def zero(x: Tensor, t_B: Tensor, labels_B: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(x)] * 2, dim=1)

        evaluation = self.config.eval
        key = (
            "untrained",
            self.config.seed,
            evaluation.sampling_steps,
            self.num_samples,
            *self.config.data.std,
        )
        statistics = self._cached(key, lambda: self._features(self._generate(zero, progress)))
        distance = frechet_distance(self.reference, statistics)
        protocol = "the same protocol before training"
        return Metric(distance, "", self.num_samples, False, protocol)

    def _distance(
        self, model: nn.Module, progress: Progress, load: HeadLoad
    ) -> tuple[float, Tensor]:
        with load.watch(model):
            images = self._generate(model, progress, load)
        return frechet_distance(self.reference, self._features(images, progress)), images

    def _features(self, images: Tensor, progress: Progress | None = None) -> FeatureStatistics:
        statistics = FeatureStatistics(self.extractor.dim)
        size = self.config.eval.batch
        for start in range(0, len(images), size):
            statistics.update(self.extractor(images[start : start + size]).pooled_BD)
            if progress is not None:
                progress("features", min(start + size, len(images)), len(images))
        return statistics

    def _cached(
        self, key: tuple[str | int | float, ...], build: Callable[[], FeatureStatistics]
    ) -> FeatureStatistics:
        """Feature statistics that no weight of the model enters, kept between runs."""
        data, extractor = self.config.data, self.extractor
        what = (*key, self.data.fingerprint, data.size, extractor.weights_sha256)
        path = (
            Path(self.config.runs_dir) / "cache" / f"features-{stable_seed(*what):016x}.safetensors"
        )
        if path.is_file():
            return _load_statistics(path)
        statistics = build()
        _save_statistics(statistics, path)
        return statistics

    def _generate(self, model: Model, progress: Progress, load: HeadLoad | None = None) -> Tensor:
        evaluation, data = self.config.eval, self.config.data
        diffusion = self.diffusion.respace(evaluation.sampling_steps)
        labels = class_labels(range(self.num_samples), self.num_classes)
        device = device_of(model) if isinstance(model, nn.Module) else torch.device("cpu")
        pieces = []
        for start in range(0, self.num_samples, evaluation.batch):
            numbers = range(start, min(start + evaluation.batch, self.num_samples))
            labels_B = labels[start : numbers.stop].to(device)
            if load is not None:
                load.groups_B = labels_B
            x = sample(
                model,
                diffusion,
                numbers,
                labels_B,
                (data.channels, data.size, data.size),
                guidance=evaluation.guidance,
                seed=self.config.seed,
                null_label=self.num_classes,
                clip=self._bound,
            )
            pieces.append(to_uint8(self._to_unit(x)).cpu())
            progress("sampling", numbers.stop, self.num_samples, *self.config.data.std)
        return torch.cat(pieces)

    @property
    def _bound(self) -> float | None:
        """Largest absolute value of a normalised pixel; latents have none."""
        if self.config.task.latent:
            return None
        ends = [abs((end - m) / s) for end in (0, 1) for m, s in self._scales]
        return max(ends)

    @property
    def _scales(self) -> list[tuple[float, float]]:
        return list(zip(self.config.data.mean, self.config.data.std, strict=True))

    def _to_unit(self, x_BCHW: Tensor) -> Tensor:
        """Normalised pixels to [-1, 1]."""
        mean, std = torch.tensor(self._scales, device=x_BCHW.device).T[:, None, :, None, None]
        return 2 * (x_BCHW * std + mean) - 1

    @cached_property
    def extractor(self) -> FeatureExtractor:
        """The feature network that the configuration names."""
        return load_features(self.config.eval.features, self.config.eval.features_path)

    @cached_property
    def reference(self) -> FeatureStatistics:
        """Features of the test images."""
        assert isinstance(self.data, ImageSet)
        test = self.data.test
        return self._cached(("test",), lambda: self._features(test))


def _open(config: Config) -> ImageSet | CachedLatents | EncodedFolder:
    if config.data.form != "npz" and config.mode != "train":
        # Told before days of training, not after them.
        raise RunError(
            f"data.form {config.data.form}: this version trains on latents and cannot evaluate "
            "them yet: mode=train"
        )
    if config.data.form == "latents":
        return CachedLatents(config.data, config.model.num_classes)
    if config.data.form == "folder_vae":
        return EncodedFolder(config.data, config.model.num_classes)
    return ImageSet.load(config.data)


def _save_statistics(statistics: FeatureStatistics, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file(
        {"count": statistics.count, "total": statistics.total, "outer": statistics.outer}, aside
    )
    os.replace(aside, path)


def _load_statistics(path: Path) -> FeatureStatistics:
    stored = load_file(path)
    statistics = FeatureStatistics(len(stored["total"]))
    statistics.count, statistics.total = stored["count"], stored["total"]
    statistics.outer = stored["outer"]
    return statistics
