"""ImageNet's form in small: folders of images of every kind that it holds, and a small VAE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES = ("n01", "n02", "n03")
KINDS = ("plain", "grey", "cmyk", "palette", "rotated", "pixel", "misnamed", "wide")


def picture(seed: int, width: int = 60, height: int = 48) -> Image.Image:
    """Smooth colours with noise on them."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=int)
    noisy = smooth + draw.integers(-8, 9, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def save(kind: str, seed: int, folder: Path) -> Path:
    """Write one picture of a kind; the file that it is in."""
    image, path = picture(seed), folder / f"{kind}.JPEG"
    match kind:
        case "grey":
            image.convert("L").save(path)
        case "cmyk":
            image.convert("CMYK").save(path)
        case "palette":
            path = path.with_suffix(".png")
            image.convert("P").save(path)
        case "rotated":
            exif = Image.Exif()
            exif[0x0112] = 6
            image.save(path, exif=exif)
        case "pixel":
            picture(seed, 1, 1).save(path)
        case "misnamed":
            image.save(path, format="PNG")
        case "wide":
            picture(seed, 300, 40).save(path)
        case _:
            image.save(path)
    return path


def tree(root: Path, val: int = 2) -> Path:
    """``train/`` with one picture of each kind in three classes, ``val/`` with plain ones."""
    for label, name in enumerate(CLASSES):
        for split in ("train", "val"):
            (root / split / name).mkdir(parents=True)
        for number, kind in enumerate(KINDS):
            save(kind, 100 * label + number, root / "train" / name)
        for number in range(val):
            image = picture(1000 + 100 * label + number)
            image.save(root / "val" / name / f"ILSVRC2012_val_{label * val + number + 1:08d}.JPEG")
    return root


def small_vae(folder: Path) -> Path:
    """An AutoencoderKL of two levels with random weights, as diffusers saves it."""
    from diffusers import AutoencoderKL

    torch.manual_seed(5)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.25,
        shift_factor=0.1,
    ).save_pretrained(folder)
    return folder
