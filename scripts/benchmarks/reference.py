"""MoH the straightforward way: logits, softmax and values of all heads, gates by einsum.

The equations as they stand, without a fused kernel; for TransNeXt's aggregated attention with
unfolded windows, for DiT's blocks with one operation after the other. Made from a converted
model, which keeps weights and routers: only forward passes are other ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.backbones.convert import converted_layers


def plain_attention(
    q_BHNK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    gates_BNH: Tensor,
    is_causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Gated heads (B, N, H, K); a copy of keys and values for each head of a group."""
    group = q_BHNK.shape[1] // k_BGMK.shape[1]
    if group > 1:
        k_BGMK, v_BGMK = (x.repeat_interleave(group, dim=1) for x in (k_BGMK, v_BGMK))
    scale = 1 / math.sqrt(q_BHNK.shape[-1]) if scale is None else scale
    logits_BHNM = (q_BHNK * scale) @ k_BGMK.transpose(-2, -1)
    if bias is not None:
        logits_BHNM = logits_BHNM + bias
    if is_causal:
        future = torch.ones(logits_BHNM.shape[-2:], dtype=torch.bool, device=q_BHNK.device)
        logits_BHNM = logits_BHNM.masked_fill(future.triu(1), -math.inf)
    y_BHNK = logits_BHNM.softmax(dim=-1) @ v_BGMK
    return torch.einsum("bhnk,bnh->bnhk", y_BHNK, gates_BNH.to(y_BHNK.dtype))


def make_plain(model: nn.Module) -> nn.Module:
    """Give the MoH layers of a converted model, and DiT's blocks, the plain forward pass, in place.

    Raises:
        ValueError: a layer of which there is no plain version.
    """
    for name, module, _ in converted_layers(model):
        plain = _PLAIN.get(type(module).__name__, {}).get(type(module).__module__)
        if plain is None:
            raise ValueError(f"no plain version of layer {name}, {type(module).__name__}")
        module.forward = plain.__get__(module)
    for block in model.modules():
        if type(block).__name__ == "DiTBlock":
            block.forward = _dit_block.__get__(block)
    return model


def _timm(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    B, N, _ = x.shape
    qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    q, k = self.q_norm(q), self.k_norm(k)
    gates = self.router(x, q).gates_BNH
    y = plain_attention(q, k, v, gates, is_causal, attn_mask)
    return self.proj_drop(self.proj(self.norm(y.reshape(B, N, -1))))


def _dit(self: Any, hidden_states: Tensor) -> Tensor:
    x = hidden_states
    q, k, v = (
        linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        for linear in (self.to_q, self.to_k, self.to_v)
    )
    y = plain_attention(q, k, v, self.router(x, q).gates_BNH)
    return self.to_out[1](self.to_out[0](y.flatten(2)))


def _dit_block(self: Any, x: Tensor, c: Tensor) -> Tensor:
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (
        self.norm1.linear(c).unsqueeze(1).chunk(6, dim=-1)
    )
    x = x + gate * self.attn(self.norm1.norm(x) * (1 + scale) + shift)
    return x + mlp_gate * self.ff(self.norm2(x) * (1 + mlp_scale) + mlp_shift)


def _llama(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    token_mask_BN: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = hidden_states
    q, k, v = (
        linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    gates = self.router(x, q, token_mask_BN).gates_BNH
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    return self.o_proj(plain_attention(q, k, v, gates, is_causal=True).flatten(-2)), None


def _transnext(self: Any, x: Tensor) -> Tensor:
    q, arguments = self.split(x)
    scaled, k, v = arguments["query"], arguments["key"], arguments["value"]
    gates = self.router(x, q).gates_BNH
    return self.project(
        plain_attention(scaled, k, v, gates, bias=arguments["attn_mask"], scale=1.0)
    )


def _aggregated(self: Any, x: Tensor) -> Tensor:
    """Local windows by ``F.unfold``: a copy of keys and values for each of their places."""
    B, N, D = x.shape
    H, W, size = self.num_heads, self.window_size**2, self.window_size
    q = self.q(x).view(B, N, H, -1).transpose(1, 2)
    unit_q = F.normalize(q, dim=-1)
    scaled_q = self.scale_query(unit_q, self.log_length_N1)

    k, v = self.kv(x).chunk(2, dim=-1)
    k = F.normalize(k.view(B, N, H, -1), dim=-1).reshape(B, N, D)
    maps = torch.cat([k, v], dim=-1).transpose(1, 2).unflatten(2, self.grid)
    windows = F.unfold(maps, kernel_size=size, padding=size // 2)
    k_local, v_local = windows.view(B, 2 * H, -1, W, N).permute(0, 1, 4, 2, 3).chunk(2, dim=1)
    local = (scaled_q.unsqueeze(-2) @ k_local).squeeze(-2)
    local = local + self.relative_pos_bias_local.unsqueeze(1)
    local = local.masked_fill(self.outside_NW, -math.inf)

    pooled_k, pooled_v = self.kv(self.pool(x)).unflatten(-1, (2, H, -1)).permute(2, 0, 3, 1, 4)
    pooled = scaled_q @ F.normalize(pooled_k, dim=-1).transpose(-2, -1) + self.position_bias()
    weights = torch.cat([local, pooled], dim=-1).softmax(dim=-1)
    local, pooled = weights.split([W, pooled.shape[-1]], dim=-1)
    local = local + unit_q @ self.learnable_tokens + self.learnable_bias
    y = (local.unsqueeze(-2) @ v_local.transpose(-2, -1)).squeeze(-2) + pooled @ pooled_v
    y = torch.einsum("bhnk,bnh->bnhk", y, self.router(x, q).gates_BNH)
    return self.project(y)


# By class name and module, so that a family's library is not imported for another one's sake.
_PLAIN: dict[str, dict[str, Callable[..., Any]]] = {
    "MoHAttention": {"moh.backbones.vit": _timm, "moh.backbones.dit_attention": _dit},
    "MoHLlamaAttention": {"moh.backbones.llama": _llama},
    "MoHTransNeXtAttention": {"moh.backbones.transnext_attention": _transnext},
    "MoHAggregatedAttention": {"moh.backbones.transnext_attention": _aggregated},
}
