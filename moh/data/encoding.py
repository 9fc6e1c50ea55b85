"""From images to the latents of a frozen autoencoder: ADM's crop, diffusers' VAE, its posterior."""

from __future__ import annotations

import hashlib
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from moh.config import ImagesConfig
from moh.data import imagenet
from moh.data.order import ShuffledOrder, generator
from moh.data.pixels import open_picture
from moh.data.readers import FolderReader
from moh.data.reading import Key, LoadAhead
from moh.errors import RunError


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's square crop, which DiT keeps.

    Halved with a box filter while the short side is at least twice ``size``, then scaled with a
    bicubic one to ``size`` on the short side, then cut from the middle.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    scaled = (round(image.width * scale), round(image.height * scale))
    image = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def read_crop(path: str | Path, size: int) -> Tensor:
    """The crop of an image file: uint8 (3, size, size).

    Raises:
        RunError: it cannot be read; one line.
    """
    pixels = np.array(centre_crop(open_picture(path), size))
    return torch.from_numpy(pixels).movedim(-1, 0).contiguous()


def posterior_noise(seed: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """The standard normal numbers by which sample ``number`` leaves its posterior's mean."""
    return torch.randn(*shape, generator=generator(seed, "posterior", number))


class Encoder:
    """A frozen AutoencoderKL.

    Args:
        source: a folder that diffusers saved, or a name on the hub.

    Attributes:
        sha256: of its weights and scale, wherever they came from.
        factor: pixels on a side for one latent pixel.
        scale, shift: what a diffusion model sees is ``scale * (latent - shift)``.

    Raises:
        RunError: it cannot be loaded; one line.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.vae: Any = _load(source)
        self.vae.requires_grad_(False).eval()
        config: Any = self.vae.config
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        self.channels = int(config.latent_channels)
        self.scale = float(config.scaling_factor)
        self.shift = float(config.shift_factor or 0.0)

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(repr((self.scale, self.shift)).encode())
        for name, tensor in sorted(self.vae.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> Tensor:
        """Posterior means and standard deviations of images.

        Args:
            pixels: uint8 (B, 3, S, S), on any device; the VAE follows them.

        Returns:
            float32 (B, 2, C, S / factor, S / factor): mean, then standard deviation.
        """
        if next(self.vae.parameters()).device != pixels.device:
            self.vae.to(pixels.device)
        with torch.autocast(pixels.device.type, enabled=False):
            posterior = self.vae.encode(pixels.float() / 127.5 - 1).latent_dist
        return torch.stack([posterior.mean, posterior.std], dim=1).float()

    def latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """What a diffusion model trains on: a draw from each posterior, shifted and scaled."""
        return draw(moments, noise, self.scale, self.shift)


def draw(moments: Tensor, noise: Tensor, scale: float, shift: float) -> Tensor:
    """``scale * (mean + std * noise - shift)``: (B, C, H, W) from (B, 2, C, H, W) and noise."""
    mean, std = moments.unbind(1)
    return scale * (mean + std * noise - shift)


class EncodedFolder:
    """Training images under ``root/train``, encoded on the training device.

    A sample is what the cache of the same images would give, up to the rounding of the VAE.

    Attributes:
        class_names: folder names, in order.
        known_names: the same, None where they are numbers.
        fingerprint: of the file list and the VAE.
    """

    num_test = 0

    def __init__(self, config: ImagesConfig, num_classes: int) -> None:
        require_plain_scale(config)
        if config.root is None:
            raise RunError(f"data.root is not set: {config.name} needs a folder with train/")
        if config.vae is None:
            raise RunError(f"data.vae is not set: {config.name} needs an AutoencoderKL's folder")
        root = Path(config.root) / "train"
        self.config = config
        self._folder = FolderReader(root)
        self.class_names = imagenet.check_classes(self._folder, config.name, num_classes, str(root))
        self.known_names = imagenet.known_names(self.class_names, config.name, num_classes)
        self.encoder = Encoder(config.vae)
        if self.encoder.channels != config.channels:
            raise RunError(
                f"data.vae {config.vae} gives {self.encoder.channels} channels, data.channels is "
                f"{config.channels}"
            )
        listed = f"{list_hash(self._folder)} {self.encoder.sha256}"
        self.fingerprint = hashlib.sha256(listed.encode()).hexdigest()
        self._ahead: LoadAhead | None = None
        self._order: ShuffledOrder | None = None

    @property
    def num_train(self) -> int:
        """Training images."""
        return len(self._folder.samples)

    def order(self, seed: int) -> ShuffledOrder:
        """Order of the training images, with one uniform number each for the flip."""
        return ShuffledOrder(self.num_train, seed, draws=1)

    def train_batch(self, order: ShuffledOrder, first: int, count: int) -> dict[str, Tensor]:
        """Training samples ``first`` to ``first + count - 1``, for :meth:`encode`.

        Returns:
            ``pixels`` uint8 (count, 3, S, S), ``noise`` float32 (count, C, size, size),
            ``labels`` int64 (count,).
        """
        if self._ahead is None or self._order is not order:
            size = self.config.size
            crops = _Crops(
                self._folder,
                size * self.encoder.factor,
                order.seed,
                (self.config.channels, size, size),
            )
            keys = partial(_keys, order, self.config.flip)
            self._ahead = LoadAhead(crops, keys, self.config.workers)
            self._order = order
        pixels, noise, labels = self._ahead(first, count)
        return {"pixels": pixels, "noise": noise, "labels": labels}

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Latents (B, C, size, size) of a batch, on the device where it is."""
        return self.encoder.latents(self.encoder.moments(batch["pixels"]), batch["noise"])


class _Crops(Dataset[tuple[Tensor, Tensor, int]]):
    """Crops and noise by (sample number, index, flip)."""

    def __init__(self, folder: FolderReader, size: int, seed: int, latent: tuple[int, ...]) -> None:
        self.folder, self.size, self.seed, self.latent = folder, size, seed, latent

    def __len__(self) -> int:
        return len(self.folder.samples)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, int]:
        number, index, flip = key
        path, label = self.folder.samples[index]
        pixels = read_crop(path, self.size)
        noise = posterior_noise(self.seed, number, self.latent)
        return pixels.flip(-1) if flip else pixels, noise, label


def _keys(order: ShuffledOrder, flip: bool, first: int, count: int) -> list[Key]:
    indices, uniform = order.take(first, count)
    flips = flipped(uniform, flip)
    numbers = range(first, first + count)
    return list(zip(numbers, indices.tolist(), flips.tolist(), strict=True))


def flipped(uniform_B1: Tensor, flip: bool) -> Tensor:
    """1 for each sample that is mirrored, else 0: (B,) int64."""
    return ((uniform_B1[:, 0] < 0.5) & flip).long()


def list_hash(folder: FolderReader) -> str:
    """SHA-256 of the paths and classes of a folder's images; the pictures are not read."""
    digest = hashlib.sha256()
    for path, label in folder.samples:
        digest.update(f"{Path(path).relative_to(folder.root).as_posix()}\0{label}\n".encode())
    return digest.hexdigest()


def require_plain_scale(config: ImagesConfig) -> None:
    """Refuse a normalisation: latents have none beyond the factor of their VAE.

    Raises:
        RunError: a mean that is not 0 or a standard deviation that is not 1.
    """
    if any(config.mean) or any(value != 1 for value in config.std):
        raise RunError(
            f"data.form {config.form}: latents are scaled by their VAE's factor alone; data.mean "
            f"must be {[0.0] * config.channels} and data.std {[1.0] * config.channels}"
        )


def _load(source: str) -> nn.Module:
    from diffusers import AutoencoderKL
    from diffusers.utils import logging

    logging.set_verbosity_error()
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().is_dir():
        raise RunError(f"VAE {source} is not a folder")
    try:
        vae, found = AutoencoderKL.from_pretrained(
            Path(source).expanduser(),
            use_safetensors=True,
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:
        # The library raises a type of its own for each way in which a folder can be wrong.
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RunError(f"cannot load VAE {source}: {first_line}") from None
    # The library would leave these at random values and say so in a log alone.
    if missing := sorted(found["missing_keys"]):
        raise RunError(f"VAE {source} lacks {len(missing)} of its weights, {missing[0]} first")
    return vae
