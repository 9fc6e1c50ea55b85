"""Where the tokens of a TransNeXt stage are: relative coordinates and window borders.

All tables are on the CPU, also under ``torch.device("meta")``; the layers move them.
"""

from __future__ import annotations

import torch
from torch import Tensor

Size = tuple[int, int]  # height, width in tokens


def on_grid(x_BN: Tensor, grid: Size) -> Tensor:
    """Tokens (B, N, ...) as a map (B, height, width, ...), without a copy."""
    return x_BN.view(x_BN.shape[0], *grid, *x_BN.shape[2:])


def relative_coords(query: Size, key: Size, pretrain: Size) -> tuple[Tensor, Tensor]:
    """Log-spaced relative coordinates between a grid and the same grid average-pooled.

    A difference d in tokens becomes ``sign(d) * log2(|e| + 1) / log2(8)`` with
    ``e = 8 d / (pretrain - 1)``, so that coordinates keep their scale at other image sizes.

    Args:
        query: grid of the queries.
        key: grid of the keys, pooled from ``query``; the same where nothing is pooled.
        pretrain: query grid at the image size that sets the scale.

    Returns:
        The T different (vertical, horizontal) coordinates, float32 (T, 2), in ascending order,
        and for each pair of query and key the row of its coordinates, int64 (queries * keys,).
    """
    y_Y, rows = _axis(query[0], key[0], pretrain[0])
    x_X, columns = _axis(query[1], key[1], pretrain[1])
    table_T2 = torch.cartesian_prod(y_Y, x_X)
    index = rows[:, None, :, None] * len(x_X) + columns[None, :, None, :]
    return table_T2, index.flatten()


def _axis(query: int, key: int, pretrain: int) -> tuple[Tensor, Tensor]:
    """The different coordinates along one axis, and their index by (query, key)."""
    cell = torch.arange(key, device="cpu")
    first, last = cell * query // key, -(-(cell + 1) * query // key) - 1
    # A pooled key lies in the middle of its cell, (first + last) / 2: twice the difference is
    # an integer, so equal differences are found exactly.
    twice = 2 * torch.arange(query, device="cpu")[:, None] - (first + last)
    values, index = torch.unique(twice, return_inverse=True)
    scaled = 8 * (values.float() / 2 / max(pretrain - 1, 1))
    return scaled.sign() * (scaled.abs() + 1).log2() / 3, index


def outside_window(grid: Size, window: int) -> Tensor:
    """Which neighbours in a window around each token lie outside the grid.

    Returns:
        Bool (tokens, window * window), rows of the window first.
    """
    offsets = torch.arange(window, device="cpu") - window // 2
    inside = []
    for length in grid:
        position = torch.arange(length, device="cpu")[:, None] + offsets
        inside.append((position >= 0) & (position < length))
    both = inside[0][:, None, :, None] & inside[1][None, :, None, :]
    return ~both.reshape(grid[0] * grid[1], window * window)
