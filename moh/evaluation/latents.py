"""Latents to pictures: the VAE whose latents a model was trained on."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from moh.errors import RunError
from moh.evaluation.precision import precision

PIECE = 16  # latents decoded at a time: pictures of 256 pixels need 0.5 GB each on the way


class LatentDecoder(nn.Module):
    """The decoder of diffusers' ``AutoencoderKL``.

    Args:
        source: a folder that diffusers wrote (or one with such a ``vae/``), or a name on the hub.

    Attributes:
        name: of the folder or on the hub, without the owner.
        channels: of a latent.
        factor: pixels a latent pixel, each way.

    Raises:
        RunError: no such folder, no such name within reach, or another kind of model.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.name = Path(source).name
        folder = Path(source)
        if (folder / "vae" / "config.json").is_file():
            folder = folder / "vae"
        if folder.is_dir():
            _check_folder(folder)
        elif looks_like_a_path(source):
            raise RunError(f"eval.vae={source} does not exist")
        try:
            # diffusers passes the hub a setting that it warns of.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                vae = AutoencoderKL.from_pretrained(str(folder) if folder.is_dir() else source)
        except (OSError, ValueError, RuntimeError) as error:
            if not folder.is_dir():
                raise RunError(
                    f"eval.vae={source} is no folder here, and the hub is out of reach or has no "
                    "such model; name a folder with its config.json and weights"
                ) from None
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RunError(f"eval.vae={source} cannot be loaded: {reason}") from None
        vae.eval().requires_grad_(False)
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder
        self.scale = float(vae.config.scaling_factor)
        self.shift = float(vae.config.shift_factor or 0.0)
        self.channels = int(vae.config.latent_channels)
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)

    @torch.inference_mode()
    def forward(self, latents_BCHW: Tensor) -> Tensor:
        """Decode scaled latents to float32 pictures about [-1, 1], (B, 3, factor H, factor W)."""
        x = latents_BCHW.float() / self.scale + self.shift
        with _one_thread(x.device), precision("fp32", x.device):
            return torch.cat([self._decode(piece) for piece in x.split(PIECE)])

    def _decode(self, x: Tensor) -> Tensor:
        return self.decoder(x if self.post_quant_conv is None else self.post_quant_conv(x))


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    try:
        kind = json.loads(config.read_text()).get("_class_name")
    except (OSError, ValueError, AttributeError):
        raise RunError(f"eval.vae={folder} has no config.json of an AutoencoderKL") from None
    if kind != "AutoencoderKL":
        raise RunError(f"eval.vae={folder} holds a {kind}, not an AutoencoderKL")


def looks_like_a_path(source: str) -> bool:
    """True if a name cannot be one on the hub (``owner/name``)."""
    return source.startswith((os.sep, ".", "~")) or source.count("/") != 1


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU the last bits of a convolution depend on the number of threads; a set must not."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
