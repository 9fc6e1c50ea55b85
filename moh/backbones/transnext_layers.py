"""What a TransNeXt block has besides attention: patch embedding, gated MLP, residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from moh.backbones.transnext_attention import PositionBiasedAttention
from moh.backbones.transnext_positions import Size, on_grid


class PatchEmbed(nn.Module):
    """Overlapping convolution of an image, or of a stage's map, to tokens."""

    def __init__(self, in_chans: int, dim: int, kernel: int, stride: int, **dd: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding=kernel // 2, **dd)
        self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, height, width) -> tokens (B, N, D)."""
        return self.norm(self.proj(image).flatten(2).transpose(1, 2))


class DepthwiseConv(nn.Module):
    """3x3 depthwise convolution of tokens on a grid."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **dd)

    def forward(self, x_BND: Tensor, grid: Size) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        image = on_grid(x_BND, grid).permute(0, 3, 1, 2)
        return self.dwconv(image).flatten(2).transpose(1, 2)


class ConvGLU(nn.Module):
    """Gated MLP whose gate sees its neighbours; two thirds as wide as a plain MLP of ``ratio``."""

    def __init__(self, dim: int, ratio: float, drop: float, **dd: Any) -> None:
        super().__init__()
        hidden = int(2 * ratio * dim / 3)
        self.fc1 = nn.Linear(dim, 2 * hidden, **dd)
        self.dwconv = DepthwiseConv(hidden, **dd)
        self.fc2 = nn.Linear(hidden, dim, **dd)
        self.drop = nn.Dropout(drop)

    def forward(self, x_BND: Tensor, grid: Size) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        gate, value = self.fc1(x_BND).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(F.gelu(self.dwconv(gate, grid)) * value)))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual that stochastic depth can drop."""

    def __init__(
        self,
        attn: PositionBiasedAttention,
        mlp: ConvGLU,
        norm: Callable[[], nn.Module],
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attn = attn
        self.norm2 = norm()
        self.mlp = mlp
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x_BND = x_BND + self.drop_path(self.attn(self.norm1(x_BND)))
        return x_BND + self.drop_path(self.mlp(self.norm2(x_BND), self.attn.grid))
