"""Products of each token with its neighbours, as shifted views of one padded map.

A window's W places are W views: nothing is unfolded, forward or backward. PyTorch's own gradient
of a view is a map of zeros for each of them, so the gradients are written out here. Names as in
:mod:`moh.backbones.transnext_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _shifted(padded: Tensor, window: int) -> list[Tensor]:
    """Each token's neighbours, as W views (B, Y, X, ...) of a padded map, rows first."""
    height, width = padded.shape[1] - window + 1, padded.shape[2] - window + 1
    return [padded[:, y : y + height, x : x + width] for y in range(window) for x in range(window)]


def _pad(x_BYXHK: Tensor, window: int) -> Tensor:
    """The map with zeros around it, wide enough for the windows of its border."""
    return F.pad(x_BYXHK, (0, 0, 0, 0, *[window // 2] * 4))


def _inner(padded: Tensor, window: int) -> Tensor:
    radius = window // 2
    return padded[:, radius : padded.shape[1] - radius, radius : padded.shape[2] - radius]


class _Dots(torch.autograd.Function):
    """Scalar products of each query with the keys in its window."""

    @staticmethod
    def forward(ctx: Any, q_BYXHK: Tensor, k_BYXHK: Tensor, window: int) -> Tensor:
        ctx.save_for_backward(q_BYXHK, k_BYXHK)
        ctx.window = window
        # Autocast would copy each product to float32 before a sum of no given dtype.
        dtype = q_BYXHK.dtype
        keys = _shifted(_pad(k_BYXHK, window), window)
        return torch.stack([(q_BYXHK * k).sum(-1, dtype=dtype) for k in keys], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad_BYXHW: Tensor) -> tuple[Tensor, Tensor, None]:
        (q, k), window = ctx.saved_tensors, ctx.window
        padded = _pad(k, window)
        dq, dk = torch.zeros_like(q), torch.zeros_like(padded)
        grads = grad_BYXHW.unsqueeze(-2).unbind(-1)
        nears, dnears = _shifted(padded, window), _shifted(dk, window)
        for grad, near, dnear in zip(grads, nears, dnears, strict=True):
            dq.addcmul_(grad, near)
            dnear.addcmul_(grad, q)
        return dq, _inner(dk, window), None


class _Sum(torch.autograd.Function):
    """Values in each token's window, weighted and added to what is there."""

    @staticmethod
    def forward(
        ctx: Any, y_BYXHK: Tensor, weight_BYXHW: Tensor, v_BYXHK: Tensor, window: int
    ) -> Tensor:
        ctx.save_for_backward(weight_BYXHW, v_BYXHK)
        ctx.window = window
        weights = weight_BYXHW.unsqueeze(-2).unbind(-1)
        (weight, near), *others = zip(weights, _shifted(_pad(v_BYXHK, window), window), strict=True)
        y_BYXHK = torch.addcmul(y_BYXHK, weight, near)
        for weight, near in others:
            y_BYXHK.addcmul_(weight, near)
        return y_BYXHK

    @staticmethod
    def backward(ctx: Any, grad_BYXHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (weight_BYXHW, v), window = ctx.saved_tensors, ctx.window
        padded = _pad(v, window)
        dv = torch.zeros_like(padded, dtype=grad_BYXHK.dtype)
        dots = []
        weights = weight_BYXHW.unsqueeze(-2).unbind(-1)
        nears, dnears = _shifted(padded, window), _shifted(dv, window)
        for weight, near, dnear in zip(weights, nears, dnears, strict=True):
            dots.append((grad_BYXHK * near).sum(-1, dtype=weight.dtype))
            dnear.addcmul_(weight, grad_BYXHK)
        return grad_BYXHK, torch.stack(dots, dim=-1), _inner(dv, window), None


def window_dots(q_BYXHK: Tensor, k_BYXHK: Tensor, window: int) -> Tensor:
    """Scalar products of each query with the keys of its W neighbours.

    Args:
        q_BYXHK: queries on their grid; likewise the keys.
        window: side of the window in tokens, odd.

    Returns:
        (B, Y, X, H, W); zero for neighbours outside the grid.
    """
    dots: Tensor = _Dots.apply(q_BYXHK, k_BYXHK, window)
    return dots


def add_window_values(
    y_BYXHK: Tensor, weight_BYXHW: Tensor, v_BYXHK: Tensor, window: int
) -> Tensor:
    """Add the values of each token's W neighbours, weighted; outside the grid they are zero."""
    added: Tensor = _Sum.apply(y_BYXHK, weight_BYXHW, v_BYXHK, window)
    return added
