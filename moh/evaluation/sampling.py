"""Images from a diffusion model: a set that depends on the seed alone.

Every random number belongs to an image number. Image 7 of seed 0 sees the same noise in a batch of
one and in a batch of 256, on one process and on eight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moh.tasks.diffusion import GaussianDiffusion, Model

Progress = Callable[[Iterable[int]], Iterable[int]]


def image_generator(seed: int, image_number: int, stream: str = "noise") -> torch.Generator:
    """The random stream of one image, on the CPU whatever the model runs on.

    PyTorch's CPU generator keeps 32 bits of a seed. The image number is added to a hash of seed
    and stream, not hashed with them: so no two images of a set can share a stream.
    """
    digest = hashlib.blake2b(f"{stream}:{seed}".encode(), digest_size=4).digest()
    offset = int.from_bytes(digest, "little")
    return torch.Generator().manual_seed((offset + image_number) % 2**32)


def class_labels(
    image_numbers: Sequence[int], num_classes: int, balanced: bool = True, seed: int = 0
) -> Tensor:
    """The class of each image number, (B,) int64.

    Args:
        image_numbers: which images of the set.
        num_classes: classes to choose from.
        balanced: the number modulo ``num_classes``; otherwise drawn uniformly, as the paper's
            sampling script does.
        seed: of the draw.
    """
    if balanced:
        return torch.tensor(image_numbers, dtype=torch.int64) % num_classes
    draws = [
        torch.randint(num_classes, (1,), generator=image_generator(seed, number, "label"))
        for number in image_numbers
    ]
    return torch.cat(draws)


class ImageNoise:
    """Standard normal noise by image number, drawn step after step.

    Args:
        image_numbers: the images of the batch.
        shape: of one image (C, H, W).
        seed: of the set.
        device: where the noise is wanted.
    """

    def __init__(
        self,
        image_numbers: Sequence[int],
        shape: tuple[int, ...],
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._generators = [image_generator(seed, number) for number in image_numbers]
        self._shape = tuple(shape)
        self._device = device

    def draw(self) -> Tensor:
        """The next (B, C, H, W): the first call gives the start, each further one a step."""
        noise = torch.empty(len(self._generators), *self._shape)
        for image, generator in zip(noise, self._generators, strict=True):
            image.normal_(generator=generator)
        return noise.to(self._device)


def guide(output: Tensor, guidance: float, channels: int = 3) -> Tensor:
    """Classifier-free guidance of a batch: conditional half, then unconditional half.

    Guided are the first ``channels`` channels of the noise (at most all), as in DiT; the rest and
    the variance stay each half's own.

    Args:
        output: model output (2B, 2C, ...).
        guidance: 1 is the conditional model, more pushes away from the unconditional one.

    Returns:
        The same shape; the guided channels are equal in both halves.
    """
    channels = min(channels, output.shape[1] // 2)
    conditional, unconditional = output[:, :channels].chunk(2)
    guided = unconditional + guidance * (conditional - unconditional)
    return torch.cat([torch.cat([guided, guided]), output[:, channels:]], dim=1)


def guided_model(model: Model, guidance: float, null_label: int, channels: int = 3) -> Model:
    """A model that guides itself: the same call, twice the work.

    Args:
        null_label: the label that stands for none.
    """

    def call(x: Tensor, t_B: Tensor, labels_B: Tensor) -> Tensor:
        null_B = torch.full_like(labels_B, null_label)
        output = model(torch.cat([x, x]), torch.cat([t_B, t_B]), torch.cat([labels_B, null_B]))
        return guide(output, guidance, channels).chunk(2)[0]

    return call


@torch.no_grad()
def sample(
    model: Model,
    diffusion: GaussianDiffusion,
    image_numbers: Sequence[int],
    labels: Tensor,
    shape: tuple[int, ...],
    guidance: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    guidance_channels: int = 3,
    null_label: int | None = None,
    clip: float | None = None,
) -> Tensor:
    """Draw images by ancestral sampling over all steps of ``diffusion``.

    Args:
        model: (x, timesteps, labels) -> noise and variance, in evaluation mode.
        diffusion: the full schedule or a respaced one.
        image_numbers: which images of the set; they fix the noise.
        labels: classes (B,), on the device where the model is.
        shape: of one sample (C, H, W).
        guidance: 1 samples without guidance and without its cost.
        seed: of the set.
        progress: wraps the loop over the steps (``tqdm.tqdm``).
        guidance_channels: see :func:`guide`.
        null_label: the unconditional class; None for the model's ``config.num_classes``.
        clip: see :meth:`GaussianDiffusion.p_mean_variance`.

    Returns:
        (B, C, H, W), float32.

    Raises:
        ValueError: as many labels as images are needed; guidance without an unconditional class.
    """
    if len(labels) != len(image_numbers):
        raise ValueError(f"{len(labels)} labels for {len(image_numbers)} image numbers")
    if guidance != 1.0:
        if null_label is None:
            null_label = getattr(getattr(model, "config", None), "num_classes", None)
        if null_label is None:
            raise ValueError(f"guidance {guidance} needs null_label, the unconditional class")
        model = guided_model(model, guidance, null_label, guidance_channels)
    noise = ImageNoise(image_numbers, shape, seed, labels.device)
    x = noise.draw()
    steps: Iterable[int] = range(diffusion.num_steps - 1, -1, -1)
    for step in steps if progress is None else progress(steps):
        t_B = torch.full_like(labels, step)
        prediction = diffusion.p_mean_variance(model, x, t_B, labels, clip)
        x = diffusion.step(prediction, t_B, noise.draw()) if step else prediction.mean
    return x


def to_uint8(x: Tensor) -> Tensor:
    """Pixels on [-1, 1] as bytes: ``clamp(127.5 x + 128, 0, 255)``, fractions cut off."""
    return (127.5 * x + 128).clamp(0, 255).to(torch.uint8)
