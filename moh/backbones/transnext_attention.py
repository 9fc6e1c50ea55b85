"""The two attention layers of TransNeXt (arXiv 2311.17132), as MHA and as MoH.

Both normalise queries and keys, scale the logits by the number of keys and add a position bias
that an MLP makes of relative coordinates. Grids are (height, width) in tokens. More dimensions
in names: Y, X rows and columns of the grid, M pooled keys, W places of a local window, T
different relative coordinates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.backbones.convert import Wiring, register_wiring
from moh.backbones.transnext_positions import Size, on_grid, outside_window, relative_coords
from moh.backbones.transnext_windows import add_window_values, window_dots
from moh.backbones.vit import trunc_normal_init
from moh.heads import Router, attend, gate_heads
from moh.heads.router import no_autocast

BIAS_MLP_WIDTH = 512
POOL_NORM_EPS = 1e-5


def normalize(x: Tensor) -> Tensor:
    """``x / |x|`` over the last dimension, in the dtype of ``x`` also under autocast."""
    return F.normalize(x, dim=-1, eps=max(1e-12, torch.finfo(x.dtype).tiny)).to(x.dtype)


class PositionBiasedAttention(nn.Module):
    """What both layers share; a subclass computes the heads.

    Args:
        dim: D, a multiple of ``num_heads``.
        num_heads: H.
        grid: tokens of the input.
        pretrain_grid: grid that sets the scale of the coordinates; None for ``grid``.
        attn_drop: dropout of attention weights.
        proj_drop: dropout after the output projection.
        dd: ``device`` and ``dtype`` of the parameters.

    Raises:
        ValueError: ``dim`` is not a multiple of ``num_heads``.
    """

    coords_T2: Tensor
    pair_index: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Size,
        pretrain_grid: Size | None,
        attn_drop: float,
        proj_drop: float,
        **dd: Any,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid = grid
        self.pretrain_grid = pretrain_grid or grid
        self.query_embedding = nn.Parameter(torch.empty(num_heads, 1, self.head_dim, **dd))
        self.temperature = nn.Parameter(torch.empty(num_heads, 1, 1, **dd))
        self.cpb_fc1 = nn.Linear(2, BIAS_MLP_WIDTH, **dd)
        self.cpb_fc2 = nn.Linear(BIAS_MLP_WIDTH, num_heads, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def key_grid(self) -> Size:
        """Grid of the keys that have a position bias."""
        return self.grid

    def reset_parameters(self) -> None:
        """Draw the parameters that belong to no submodule, and compute the buffers."""
        nn.init.trunc_normal_(self.query_embedding, std=0.02)
        nn.init.constant_(self.temperature, math.log(math.expm1(1 / 0.24)))
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute the buffers of the present grid; timm calls it after a meta device."""
        coords_T2, pair_index = relative_coords(self.grid, self.key_grid(), self.pretrain_grid)
        weight = self.cpb_fc1.weight
        self.register_buffer("coords_T2", coords_T2.to(weight), persistent=False)
        self.register_buffer("pair_index", pair_index.to(weight.device), persistent=False)

    def set_grid(self, grid: Size) -> None:
        """Take inputs of another grid; the scale of the coordinates stays."""
        self.grid = grid
        self.init_non_persistent_buffers()

    def position_bias(self) -> Tensor:
        """Additive bias (H, N, M) of each pair of query and key, evaluated once a coordinate."""
        # In bfloat16 neighbouring coordinates of a large grid would fall together.
        with no_autocast(self.coords_T2.device.type):
            bias_TH = self.cpb_fc2(F.relu(self.cpb_fc1(self.coords_T2)))
        bias = bias_TH.t().index_select(1, self.pair_index)
        return bias.view(self.num_heads, math.prod(self.grid), math.prod(self.key_grid()))

    def scale_query(self, unit_q_BHNK: Tensor, log_length: Tensor | float) -> Tensor:
        """``(q/|q| + query_embedding) * softplus(temperature) * log(length)``, (B, H, N, K)."""
        scale = F.softplus(self.temperature) * log_length
        return ((unit_q_BHNK + self.query_embedding) * scale).to(unit_q_BHNK.dtype)

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all heads (B, N, H, K), and the queries before normalisation (B, H, N, K)."""
        raise NotImplementedError

    def project(self, y_BNHK: Tensor) -> Tensor:
        """Heads to the output, (B, N, D)."""
        return self.proj_drop(self.proj(y_BNHK.flatten(2)))

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return self.project(self.heads(x_BND)[0])


class TransNeXtAttention(PositionBiasedAttention):
    """Attention over the whole grid: the last stage.

    Args:
        qkv_bias: whether the query, key and value projections have a bias.

    The other arguments are those of :class:`PositionBiasedAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Size,
        pretrain_grid: Size | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__(dim, num_heads, grid, pretrain_grid, attn_drop, proj_drop, **dd)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.reset_parameters()

    def split(self, x_BND: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Queries before normalisation (B, H, N, K), and what PyTorch's attention takes."""
        B, N, _ = x_BND.shape
        qkv = self.qkv(x_BND).view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q_BHNK, k_BHNK, v_BHNK = qkv.unbind(0)
        return q_BHNK, {
            "query": self.scale_query(normalize(q_BHNK), math.log(N)),
            "key": normalize(k_BHNK),
            "value": v_BHNK,
            "attn_mask": self.position_bias().to(q_BHNK.dtype).unsqueeze(0),
            "dropout_p": self.attn_drop.p if self.training else 0.0,
            "scale": 1.0,
        }

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all heads (B, N, H, K), and the queries before normalisation (B, H, N, K)."""
        q_BHNK, arguments = self.split(x_BND)
        return F.scaled_dot_product_attention(**arguments).transpose(1, 2), q_BHNK


class AggregatedAttention(PositionBiasedAttention):
    """Attention over a local window and the pooled grid together: all stages but the last.

    Args:
        sr_ratio: the grid is pooled to ``grid // sr_ratio``.
        window_size: side of the local window in tokens, odd.
        fixed_pool_size: side of the pooled grid instead of ``grid // sr_ratio``.
        qkv_bias: whether the query, key and value projections have a bias.

    The other arguments are those of :class:`PositionBiasedAttention`.

    Raises:
        ValueError: an even window.
    """

    outside_NW: Tensor
    log_length_N1: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Size,
        sr_ratio: int,
        pretrain_grid: Size | None = None,
        window_size: int = 3,
        fixed_pool_size: int | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__(dim, num_heads, grid, pretrain_grid, attn_drop, proj_drop, **dd)
        if window_size % 2 == 0:
            raise ValueError(f"window_size {window_size} has no centre; it must be odd")
        self.sr_ratio = sr_ratio
        self.window_size = window_size
        self.fixed_pool_size = fixed_pool_size
        places = window_size**2
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **dd)
        self.sr = nn.Conv2d(dim, dim, kernel_size=1, **dd)
        self.norm = nn.LayerNorm(dim, eps=POOL_NORM_EPS, **dd)
        self.relative_pos_bias_local = nn.Parameter(torch.empty(num_heads, places, **dd))
        self.learnable_tokens = nn.Parameter(torch.empty(num_heads, self.head_dim, places, **dd))
        self.learnable_bias = nn.Parameter(torch.empty(num_heads, 1, places, **dd))
        self.reset_parameters()

    def key_grid(self) -> Size:
        """The pooled grid."""
        if self.fixed_pool_size is not None:
            return self.fixed_pool_size, self.fixed_pool_size
        return max(self.grid[0] // self.sr_ratio, 1), max(self.grid[1] // self.sr_ratio, 1)

    def reset_parameters(self) -> None:
        """Draw the parameters that belong to no submodule, and compute the buffers."""
        nn.init.trunc_normal_(self.relative_pos_bias_local, std=0.0004)
        nn.init.trunc_normal_(self.learnable_tokens, std=0.02)
        nn.init.zeros_(self.learnable_bias)
        super().reset_parameters()

    def init_non_persistent_buffers(self) -> None:
        """Compute the buffers of the present grid; timm calls it after a meta device."""
        super().init_non_persistent_buffers()
        outside_NW = outside_window(self.grid, self.window_size)
        neighbours_N1 = (~outside_NW).sum(dim=1, keepdim=True)
        log_length_N1 = (neighbours_N1 + math.prod(self.key_grid())).float().log()
        weight = self.cpb_fc1.weight
        self.register_buffer("outside_NW", outside_NW.to(weight.device), persistent=False)
        self.register_buffer("log_length_N1", log_length_N1.to(weight), persistent=False)

    def keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised keys and values, (B, N, H, K) each."""
        B, N, _ = x_BND.shape
        k_BNHK, v_BNHK = self.kv(x_BND).view(B, N, 2, self.num_heads, self.head_dim).unbind(2)
        return normalize(k_BNHK), v_BNHK

    def pool(self, x_BND: Tensor) -> Tensor:
        """The pooled grid as tokens, (B, M, D)."""
        # A 1x1 convolution of a map is a linear layer of its tokens, which lie ready.
        tokens = F.gelu(F.linear(x_BND, self.sr.weight.flatten(1), self.sr.bias))
        image = on_grid(tokens, self.grid).permute(0, 3, 1, 2)
        pooled = F.adaptive_avg_pool2d(image, self.key_grid())
        return self.norm(pooled.flatten(2).transpose(1, 2))

    def local_logits(self, scaled_q_BHNK: Tensor, k_BNHK: Tensor) -> Tensor:
        """Logits of each token's neighbours (B, H, N, W), -inf outside the grid."""
        q_BYXHK = on_grid(scaled_q_BHNK.transpose(1, 2), self.grid)
        logits = window_dots(q_BYXHK, on_grid(k_BNHK, self.grid), self.window_size)
        bias_HNW = self.relative_pos_bias_local.unsqueeze(1).masked_fill(self.outside_NW, -math.inf)
        return logits.flatten(1, 2).transpose(1, 2) + bias_HNW

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all heads (B, N, H, K), and the queries before normalisation (B, H, N, K)."""
        B, N, _ = x_BND.shape
        q_BHNK = self.q(x_BND).view(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        k_BNHK, v_BNHK = self.keys_values(x_BND)
        pooled_k_BMHK, pooled_v_BMHK = self.keys_values(self.pool(x_BND))
        unit_q_BHNK = normalize(q_BHNK)
        scaled_q_BHNK = self.scale_query(unit_q_BHNK, self.log_length_N1)

        local_BHNW = self.local_logits(scaled_q_BHNK, k_BNHK)
        pooled_BHNM = scaled_q_BHNK @ pooled_k_BMHK.permute(0, 2, 3, 1) + self.position_bias()
        weights = self.attn_drop(torch.cat([local_BHNW, pooled_BHNM], dim=-1).softmax(dim=-1))
        local_BHNW, pooled_BHNM = weights.split(
            [local_BHNW.shape[-1], pooled_BHNM.shape[-1]], dim=-1
        )
        local_BHNW = local_BHNW + (unit_q_BHNK @ self.learnable_tokens + self.learnable_bias)

        pooled_BNHK = (pooled_BHNM @ pooled_v_BMHK.transpose(1, 2)).transpose(1, 2)
        y_BYXHK = add_window_values(
            on_grid(pooled_BNHK, self.grid),
            on_grid(local_BHNW.transpose(1, 2), self.grid),
            on_grid(v_BNHK, self.grid),
            self.window_size,
        )
        return y_BYXHK.flatten(1, 2), q_BHNK


class MoHTransNeXtAttention(TransNeXtAttention):
    """TransNeXt's last-stage attention with a router. Made by :func:`moh.convert`."""

    router: Router

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        q_BHNK, arguments = self.split(x_BND)
        return self.project(attend(self.router, self.router(x_BND, q_BHNK), **arguments))


class MoHAggregatedAttention(AggregatedAttention):
    """TransNeXt's aggregated attention with a router. Made by :func:`moh.convert`.

    Always dense: a query has a few dozen keys, less work than gathering the query.
    """

    router: Router

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        y_BNHK, q_BHNK = self.heads(x_BND)
        return self.project(gate_heads(y_BNHK, self.router(x_BND, q_BHNK).gates_BNH))


for _mha, _moh in (
    (TransNeXtAttention, MoHTransNeXtAttention),
    (AggregatedAttention, MoHAggregatedAttention),
):
    register_wiring(
        Wiring(
            mha=_mha,
            moh=_moh,
            shape=lambda attn: (attn.proj.in_features, attn.num_heads, attn.head_dim),
            init=trunc_normal_init,
        )
    )
