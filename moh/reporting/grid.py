"""Pictures of samples: a column a class, its name above."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

ROWS = 8
GAP = 3  # pixels between pictures
TILE = 64  # least width of a picture; small ones are enlarged by whole factors
WIDE = 128  # most; large ones are reduced, and half as many rows shown


def save_class_grid(images_BCHW: Tensor, class_names: Sequence[str], path: Path) -> None:
    """Write the first samples of each class as a labelled PNG.

    Args:
        images_BCHW: uint8 (B, C, H, W); image i shows class ``i % len(class_names)``.
        class_names: one a column.
        path: of the PNG.
    """
    classes = len(class_names)
    most = ROWS // 2 if images_BCHW.shape[-1] >= WIDE else ROWS
    rows = min(most, len(images_BCHW) // classes)
    images_BCHW = _reduced(images_BCHW[: rows * classes])
    factor = max(1, TILE // images_BCHW.shape[-1])
    tiles = images_BCHW.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    if tiles.shape[1] == 1:
        tiles = tiles.expand(-1, 3, -1, -1)
    height, width = tiles.shape[2:]
    font = ImageFont.load_default(size=12)
    header = 22
    size = (classes * (width + GAP) + GAP, header + rows * (height + GAP) + GAP)
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    for index, tile in enumerate(tiles.to(torch.uint8)):
        row, column = divmod(index, classes)
        left, top = GAP + column * (width + GAP), header + GAP + row * (height + GAP)
        canvas.paste(Image.fromarray(tile.permute(1, 2, 0).contiguous().numpy()), (left, top))
        if row == 0:
            middle = left + width // 2
            draw.text((middle, header // 2), class_names[column], "black", font, anchor="mm")
    canvas.save(path, optimize=True)


def _reduced(images_BCHW: Tensor) -> Tensor:
    """No wider than :data:`WIDE`."""
    height, width = images_BCHW.shape[2:]
    if width <= WIDE or not len(images_BCHW):
        return images_BCHW
    size = (round(height * WIDE / width), WIDE)
    small = F.interpolate(images_BCHW.float(), size=size, mode="bicubic", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8)
