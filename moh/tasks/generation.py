"""Class-conditional diffusion: MoH-DiT's task."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moh import distribution
from moh.backbones.convert import head_plan
from moh.config import Config
from moh.data.classes import relabelling
from moh.data.encoding import EncodedFolder
from moh.data.images import ImageSet
from moh.data.latents import CachedLatents
from moh.data.order import ShuffledOrder, StepRandom
from moh.errors import RunError
from moh.evaluation.drawing import FULL_SET, Drawing, UntrainedImages, load_decoder
from moh.evaluation.extraction import SetFeatures, cached_features, extract
from moh.evaluation.features import EXTRACTORS, FeatureExtractor, load_features
from moh.evaluation.frechet import frechet_distance
from moh.evaluation.image_sets import TensorImages
from moh.evaluation.noise_levels import SamplingLoad, load_of_images, sampling_of
from moh.evaluation.precision import precision_marks
from moh.evaluation.reference import Reference
from moh.evaluation.sample_set import SampleSet, weights_hash
from moh.evaluation.scores import scores
from moh.reporting.grid import ROWS, save_class_grid
from moh.tasks.base import Evaluation, Look, Metric, Progress, Task, device_of
from moh.tasks.diffusion import GaussianDiffusion
from moh.training.later import sent

SHOWN = 10  # classes in the picture of samples


class Generation(Task):
    """Noise prediction with learned variance; samples scored against a reference."""

    look_samples = 20

    def __init__(self, config: Config) -> None:
        self.config = config
        self.diffusion = GaussianDiffusion(config.task.diffusion_steps)
        self.num_classes = config.model.num_classes
        self._trained_on: tuple[str, ...] | None = None
        if config.task.latent != (config.data.form != "npz"):
            kind = "latents" if config.data.form != "npz" else "pixels"
            raise RunError(
                f"task.latent={str(config.task.latent).lower()}: data.form={config.data.form} "
                f"holds {kind}"
            )

    @cached_property
    def data(self) -> ImageSet | CachedLatents | EncodedFolder:
        """What to train on; images also to compare with where no reference is named."""
        config, classes = self.config.data, self.num_classes
        if config.form == "latents":
            return CachedLatents(config, classes)
        if config.form == "folder_vae":
            return EncodedFolder(config, classes)
        return ImageSet.load(config, classes)

    @cached_property
    def order(self) -> ShuffledOrder:
        """Order of the training images."""
        return self.data.order(self.config.seed)

    @property
    def _needs_data(self) -> bool:
        return self.config.mode != "eval" or self.config.eval.reference is None

    def fingerprint(self) -> dict[str, Any]:
        if not self._needs_data:
            reference = self.reference
            found = {"name": self.config.data.name, "reference": reference.label}
            if reference.images is not None:
                found["sha256"] = reference.images.fingerprint()
            return found
        return {
            "name": self.config.data.name,
            "train_images": self.data.num_train,
            "test_images": self.data.num_test,
            "sha256": self.data.fingerprint,
        }

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.data.known_names if self._opens_data else None

    def take_classes(self, names: Sequence[str]) -> None:
        own = self.classes
        if own is not None:
            # Labels of the data are not used: the order may be another one.
            relabelling(names, own, f"data.root={self.config.data.root}")
        self._trained_on = tuple(names)

    @property
    def _opens_data(self) -> bool:
        """Whether the run reads the data at all: latents hold nothing that an evaluation needs."""
        return self._needs_data and not (self.config.mode == "eval" and self.config.task.latent)

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return self.data.train_batch(self.order, first, count)

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], random: StepRandom
    ) -> tuple[Tensor, int]:
        if isinstance(self.data, EncodedFolder):
            batch["images"] = self.data.encode(batch)
        images, labels = batch["images"], batch["labels"]
        t_B = sent(random.integers(self.diffusion.num_steps), images.device)
        noise = sent(random.normal(*images.shape[1:]), images.device)
        # Once a sample, for the whole model: dropped labels become the null class.
        dropped_B = sent(random.uniform(), images.device) < self.config.task.label_dropout
        labels_B = torch.where(dropped_B, self.num_classes, labels)
        losses = self.diffusion.training_losses(model, images, t_B, labels_B, noise)
        return losses.loss.sum(), len(images)

    def terms(self, samples: int) -> int:
        return samples

    def check_evaluation(self) -> None:
        """Open decoder, feature network and reference, so that what is missing shows now.

        Raises:
            RunError: one of them is not to be had.
        """
        _ = self.drawing, self.extractor, self.reference

    @cached_property
    def drawing(self) -> Drawing:
        """How samples come about."""
        return Drawing(self.config, load_decoder(self.config))

    @cached_property
    def extractor(self) -> FeatureExtractor:
        """The feature network that the configuration names."""
        try:
            return load_features(self.config.eval.features, self.config.eval.features_path)
        except (ValueError, FileNotFoundError) as error:
            raise RunError(str(error)) from None

    @cached_property
    def reference(self) -> Reference:
        """What the configuration compares samples with: the test images by default."""
        evaluation, data = self.config.eval, self.config.data
        if evaluation.reference is not None:
            return Reference.open(Path(evaluation.reference), EXTRACTORS[evaluation.features])
        if self.config.task.latent:
            raise RunError(
                "eval.reference is not set: latents hold no pictures to compare with; name ADM's "
                "reference .npz (VIRTUAL_imagenet256_labeled.npz) or a folder of images"
            )
        assert isinstance(self.data, ImageSet)
        test, label = self.data.test, f"{len(self.data.test)} test images of {data.name}"
        fingerprint = f"{self.data.fingerprint} test {data.size}"
        return Reference.of(
            TensorImages(test, data.name, fingerprint), f"{label} at {data.size} px"
        )

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, folder: Path, progress: Progress) -> Evaluation:
        evaluation, device = self.config.eval, device_of(model)
        self.extractor.to(device)
        if self.drawing.decoder is not None:
            self.drawing.decoder.to(device)
        samples = self._samples(model, folder)
        self._draw(model, samples, progress)
        size, cache = evaluation.batch, Path(self.config.runs_dir) / "cache"
        generated = extract(samples, self.extractor, size, progress, with_probs=True)
        reference = self.reference.features(self.extractor, size, cache, progress)
        untrained = self._untrained(progress, cache)
        if not distribution.is_main():
            return Evaluation({})
        metrics = self._metrics(reference, generated, len(samples))
        if untrained is not None:
            name = next(iter(metrics))
            distance = frechet_distance(reference.pooled, untrained.pooled)
            protocol = "the same protocol before training"
            metrics[f"{name}_untrained"] = Metric(distance, "", len(samples), False, protocol)
        self._save_picture(samples, folder / "samples.png")
        head_load = self._head_load(model, samples)
        if evaluation.save_samples:
            samples.export({"head_load": head_load})
        else:
            samples.discard_shards()
        return Evaluation(metrics, head_load, images={"samples": folder / "samples.png"})

    def _samples(self, model: nn.Module, folder: Path) -> SampleSet:
        plan, decoder = head_plan(model), self.drawing.decoder
        modules = [model] if decoder is None else [model, decoder]
        settings = {
            **self.drawing.settings(),
            "model": dataclasses.asdict(self.config.model),
            "heads": dataclasses.asdict(self.config.heads),
            "head_plan": plan.to_dict() if plan else None,
            "weights": weights_hash(modules),
        }
        drawing = self.drawing
        batch = self.config.eval.batch
        return SampleSet(folder, settings, drawing.num_images, batch, drawing.shape)

    def _draw(self, model: nn.Module, samples: SampleSet, progress: Progress) -> None:
        """This process's share of the batches that the set lacks."""
        own = distribution.share_of(samples.prepare(self.config.eval.save_samples))
        total, done = sum(len(samples.numbers(index)) for index in own), 0
        for index in own:
            numbers = samples.numbers(index)

            def tick(share: float, done: int = done, count: int = len(numbers)) -> None:
                progress("sampling", done + int(share * count), total)

            load = SamplingLoad(numbers, self.config.task.diffusion_steps)
            counted = load if self.config.eval.head_load else None
            try:
                with sampling_of(model, numbers, self.config.seed, counted):
                    images = self.drawing.draw(model, numbers, device_of(model), tick)
            except torch.OutOfMemoryError:
                smaller = max(1, len(numbers) // 2)
                raise RunError(
                    f"out of memory with eval.batch={len(numbers)}; try eval.batch={smaller}"
                ) from None
            samples.write(index, images, load.counts())
            done += len(numbers)
        distribution.barrier()

    def _untrained(self, progress: Progress, cache: Path) -> SetFeatures | None:
        """Features of what the network draws before training: what a score must be seen against.

        In pixels only: decoding a set of noise says little and costs as much as one of samples.
        """
        if self.drawing.decoder is not None:
            return None
        settings = {**self.drawing.settings(), "images": self.drawing.num_images}
        source = UntrainedImages(self.drawing, f"untrained {json.dumps(settings)}")
        size = self.config.eval.batch
        return cached_features(source, self.extractor, size, cache, progress, "untrained")

    def _metrics(
        self, reference: SetFeatures, generated: SetFeatures, count: int
    ) -> dict[str, Metric]:
        evaluation = self.config.eval
        marks = [f"{count:,} samples"] if count < FULL_SET else []
        marks += precision_marks(evaluation.precision)
        if evaluation.reference is not None and self.reference.pooled is None:
            marks.append(f"against {self.reference.label}")
        against = (
            f"{count} samples against {self.reference.label}, {self.drawing.protocol()}, "
            f"features {self.extractor.pipeline}"
        )
        return {
            name: Metric(
                score.value,
                "",
                count,
                score.higher_is_better,
                ", ".join(filter(None, (score.label, against, score.detail))),
                marks=list(marks),
            )
            for name, score in scores(self.extractor, reference, generated).items()
        }

    @property
    def class_names(self) -> list[str]:
        """One a class; numbers where neither the weights nor data at hand know them."""
        if self._trained_on is not None:
            return list(self._trained_on)
        if self._opens_data:
            return list(self.data.class_names)
        return [f"class {number}" for number in range(self.num_classes)]

    def _head_load(self, model: nn.Module, samples: SampleSet) -> dict[str, Any] | None:
        if not self.config.eval.head_load:
            return None
        if samples.exported:
            return samples.record()["head_load"]
        pieces = (
            (samples.counts(index), self.drawing.labels(samples.numbers(index)))
            for index in range(samples.num_batches)
        )
        return load_of_images(model, pieces, self.class_names, self.config.task.diffusion_steps)

    @torch.inference_mode()
    def look(self, model: nn.Module, samples: int, progress: Progress) -> Look:
        # Latents need no decoder here: nobody sees the pictures.
        drawing, pieces = Drawing(self.config, None), []
        for start in range(0, samples, self.config.eval.batch):
            numbers = range(start, min(start + self.config.eval.batch, samples))
            load = SamplingLoad(numbers, self.config.task.diffusion_steps)
            with sampling_of(model, numbers, self.config.seed, load):
                drawing.sampled(model, numbers, device_of(model))
            pieces.append((load.counts(), drawing.labels(numbers)))
            progress("looking at heads", numbers.stop, samples)
        steps = self.config.eval.sampling_steps
        return Look(
            f"{samples} generated images, all {steps} sampling steps",
            load_of_images(model, pieces, self.class_names, self.config.task.diffusion_steps),
        )

    def _save_picture(self, samples: SampleSet, path: Path) -> None:
        """The first samples of some classes, evenly spaced among those that the set has."""
        labels = self.drawing.labels(range(len(samples)))
        counts = labels.bincount(minlength=self.num_classes)
        present = counts.nonzero().flatten().tolist()
        shown = min(SHOWN, len(present))
        classes = [present[i * len(present) // shown] for i in range(shown)]
        rows = min(ROWS, int(counts[classes].min()))
        columns = [(labels == c).nonzero().flatten()[:rows].tolist() for c in classes]
        numbers = [column[row] for row in range(rows) for column in columns]
        # In ascending order, in which a stream is read once.
        images = {number: samples.read(number, number + 1) for number in sorted(numbers)}
        names = [self.class_names[c] for c in classes]
        save_class_grid(torch.cat([images[number] for number in numbers]), names, path)
