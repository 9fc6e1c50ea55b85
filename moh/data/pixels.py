"""From an image file to RGB of 8 bits: one rule for training, evaluation, latents and scores."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from moh.errors import RunError

# Pillow's own conversion, as torchvision, timm and torch-fidelity call it.
CONVERTED = frozenset(
    ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
)


def open_picture(source: str | Path | IO[bytes], name: str | None = None) -> Image.Image:
    """An image file as :func:`to_rgb` gives it, whatever its format or name.

    EXIF rotation is not applied, and of several frames or pages the first is taken, as in the
    pipelines of the published weights.

    Args:
        source: its path, or the open file.
        name: where an open file lies, for people.

    Raises:
        RunError: it cannot be decoded to its last row, or its pixels have no rule; one line that
            names it.
    """
    try:
        with warnings.catch_warnings():
            # ImageNet has files whose EXIF block is broken and whose picture is not.
            warnings.filterwarnings("ignore", "(?i).*corrupt exif", UserWarning)
            with Image.open(source) as image:
                return to_rgb(image)
    except Exception as error:
        # What a decoder raises for a broken file is not one type.
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise RunError(f"cannot read image {name or source}: {first_line}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """An opened image as RGB of 8 bits.

    Pillow's conversion, as in the pipelines of the published ImageNet weights and of
    torch-fidelity: alpha is dropped (not blended), a palette is looked up, CMYK and YCbCr become
    RGB without a colour profile. Grey of 16 bits, which Pillow would clip to white, is scaled:
    ``round(value / 257)``.

    Raises:
        ValueError: of floats, of 32-bit integers or in CIELAB: their range or their white point
            is not in the file.
    """
    if is_deep(image):
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode not in CONVERTED:
        raise ValueError(
            f"pixels of mode {image.mode} have no rule for 8 bits; save it as 8-bit RGB or grey, "
            "or as 16-bit grey"
        )
    return image.convert("RGB")


def is_deep(image: Image.Image) -> bool:
    """True for grey of 16 bits: Pillow's ``I;16``, and ``I`` of a PGM, which it scales to that."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
