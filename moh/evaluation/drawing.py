"""From a diffusion model to pictures by number, under the protocol of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import moh
from moh.config import Config
from moh.errors import RunError
from moh.evaluation.image_sets import ImageSource
from moh.evaluation.latents import LatentDecoder
from moh.evaluation.precision import precision
from moh.evaluation.sampling import class_labels, sample, to_uint8
from moh.tasks.diffusion import GaussianDiffusion, Model

FULL_SET = 50_000  # images behind a quotable Fréchet distance


class Drawing:
    """How the pictures of a run come about: steps, guidance, labels, scale or decoder.

    Args:
        config: of the run.
        decoder: of latents; None for pixels.

    Raises:
        RunError: a decoder of latents with another number of channels.
    """

    def __init__(self, config: Config, decoder: LatentDecoder | None) -> None:
        self.config, self.decoder = config, decoder
        channels = config.data.channels
        if decoder is not None and decoder.channels != channels:
            raise RunError(
                f"eval.vae={config.eval.vae} decodes {decoder.channels} channels, the model draws "
                f"{channels} (data.channels)"
            )
        self.diffusion = GaussianDiffusion(config.task.diffusion_steps).respace(
            config.eval.sampling_steps
        )
        self.num_images = config.eval.samples or FULL_SET

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a picture (C, H, W)."""
        size, channels = self.config.data.size, self.config.data.channels
        if self.decoder is None:
            return channels, size, size
        return 3, size * self.decoder.factor, size * self.decoder.factor

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """The class of each image number, int64."""
        balanced = self.config.eval.labels == "balanced"
        return class_labels(numbers, self.config.model.num_classes, balanced, self.config.seed)

    def settings(self) -> dict[str, Any]:
        """All that a pixel depends on beside the weights, the image number and the batch."""
        evaluation, data = self.config.eval, self.config.data
        return {
            "moh": moh.__version__,
            "seed": self.config.seed,
            "sampling_steps": evaluation.sampling_steps,
            "diffusion_steps": self.config.task.diffusion_steps,
            "guidance": evaluation.guidance,
            "labels": evaluation.labels,
            "classes": self.config.model.num_classes,
            "precision": evaluation.precision,
            "mean": list(data.mean),
            "std": list(data.std),
            "latent": [data.channels, data.size],
        }

    def protocol(self) -> str:
        """In words, for the record of a score."""
        evaluation = self.config.eval
        words = [f"{evaluation.sampling_steps} DDPM steps", f"guidance {evaluation.guidance:g}"]
        if evaluation.labels == "drawn":
            words.append("labels drawn")
        if self.decoder is not None:
            words.append(f"decoder {self.decoder.name}")
        if evaluation.precision != "fp32":
            words.append(evaluation.precision)
        return ", ".join(words)

    def draw(
        self,
        model: Model,
        numbers: range,
        device: torch.device,
        tick: Callable[[float], None] | None = None,
    ) -> Tensor:
        """Pictures of some image numbers, uint8 (B, C, H, W) on the CPU.

        Args:
            device: where the model is.
            tick: told the share of the steps that is done, after each.
        """
        x = self.sampled(model, numbers, device, tick)
        pixels = self._to_unit(x) if self.decoder is None else self.decoder(x)
        return to_uint8(pixels).cpu()

    def sampled(
        self,
        model: Model,
        numbers: range,
        device: torch.device,
        tick: Callable[[float], None] | None = None,
    ) -> Tensor:
        """The same before they are pictures: what the model itself draws, float32."""

        def counted(steps: Iterable[int]) -> Iterator[int]:
            for done, step in enumerate(steps, 1):
                yield step
                if tick is not None:
                    tick(done / self.diffusion.num_steps)

        data = self.config.data
        return sample(
            self._precise(model, device),
            self.diffusion,
            numbers,
            self.labels(numbers).to(device),
            (data.channels, data.size, data.size),
            guidance=self.config.eval.guidance,
            seed=self.config.seed,
            progress=counted,
            null_label=self.config.model.num_classes,
            clip=self._bound,
        )

    def _precise(self, model: Model, device: torch.device) -> Model:
        """The model in the precision of the protocol; everything around it stays float32."""

        def call(x: Tensor, t_B: Tensor, labels_B: Tensor) -> Tensor:
            with precision(self.config.eval.precision, device):
                return model(x, t_B, labels_B)

        return call

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


class UntrainedImages(ImageSource):
    """What a network draws before training, drawn when it is read.

    DiT's output layer starts at zero, so an untrained model predicts zero whatever its heads are:
    one set serves MHA and MoH alike.
    """

    def __init__(self, drawing: Drawing, fingerprint: str) -> None:
        self.label = "an untrained network"
        self._drawing, self._fingerprint = drawing, fingerprint

    def __len__(self) -> int:
        return self._drawing.num_images

    def read(self, start: int, stop: int) -> Tensor:
        return self._drawing.draw(_zero, range(start, stop), torch.device("cpu"))

    def fingerprint(self) -> str:
        return self._fingerprint


def _zero(x: Tensor, t_B: Tensor, labels_B: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x)] * 2, dim=1)


def load_decoder(config: Config) -> LatentDecoder | None:
    """The decoder that a configuration names, None for pixels.

    Raises:
        RunError: latents without one.
    """
    if not config.task.latent:
        return None
    if config.eval.vae is None:
        raise RunError(
            "eval.vae is not set: latents need the decoder of their VAE, a folder or a hub name "
            "(eval=dit names one)"
        )
    return LatentDecoder(config.eval.vae)
