"""Attention patterns and head outputs of any layer that can be MoH, computed anew from its input.

The libraries' fused kernels never form the patterns. Here a layer's queries and keys are projected
once more, in the layer's own precision, and everything after that is float32.

What a pattern is: the softmax weights of one query over its keys, which sum to one.

- ViT, DiT: over all tokens of the image.
- LLaMA: over the tokens up to the query's own (causal); query heads that share keys (grouped keys
  and values) are heads of their own.
- TransNeXt's last stage: over all tokens, with its position bias and length scaling.
- TransNeXt's aggregated attention: over one query's window and the pooled tokens together, which
  share one softmax; places of the window outside the grid have weight zero. The learned tokens that
  are added to the window's weights afterwards are no part of the pattern (with them it would not
  sum to one) but are part of the head's output.

A head's output is what its gate would multiply: before the output projection, after the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rows = slice


@dataclass(frozen=True)
class AttentionHeads:
    """One layer's heads on one batch.

    Attributes:
        outputs_BNHK: float32, ungated.
        weights: rows of queries -> their patterns (B, H, R, M), float32.
        num_keys: M.
    """

    outputs_BNHK: Tensor
    weights: Callable[[Rows], Tensor]
    num_keys: int


def _global(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, scale: float, bias: Tensor | None = None
) -> AttentionHeads:
    """Heads of attention over all keys.

    Args:
        bias: added to the logits, broadcastable to (B, H, N, M); -inf hides a key.
    """
    q, k, v = q_BHNK.float(), k_BHNK.float(), v_BHNK.float()
    bias = None if bias is None else bias.float()

    def weights(rows: Rows) -> Tensor:
        logits = scale * (q[:, :, rows] @ k.transpose(-2, -1))
        if bias is not None:
            logits = logits + bias[..., rows, :]
        return logits.softmax(dim=-1)

    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return AttentionHeads(y.transpose(1, 2), weights, k.shape[2])


def _timm(attn: Any, x: Tensor) -> AttentionHeads:
    B, N, _ = x.shape
    qkv = attn.qkv(x).reshape(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    return _global(attn.q_norm(q), attn.k_norm(k), v, attn.head_dim**-0.5)


def _diffusers(attn: Any, x: Tensor) -> AttentionHeads:
    q, k, v = (
        linear(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        for linear in (attn.to_q, attn.to_k, attn.to_v)
    )
    if attn.norm_q is not None:
        q = attn.norm_q(q)
    if attn.norm_k is not None:
        k = attn.norm_k(k)
    return _global(q, k, v, q.shape[-1] ** -0.5)


def _llama(
    attn: Any,
    x: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **_: Any,
) -> AttentionHeads:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v = (
        linear(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    k, v = (part.repeat_interleave(attn.num_key_value_groups, dim=1) for part in (k, v))
    N = x.shape[1]
    hidden = torch.ones(N, N, dtype=torch.bool, device=x.device).triu(1)
    bias = torch.zeros(N, N, device=x.device).masked_fill(hidden, -math.inf)
    if isinstance(attention_mask, Tensor):
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=torch.float32).masked_fill(
                ~attention_mask, -math.inf
            )
        bias = bias + attention_mask.float()
    return _global(q, k, v, attn.scaling, bias)


def _transnext(attn: Any, x: Tensor) -> AttentionHeads:
    from moh.backbones.transnext_attention import normalize

    B, N, _ = x.shape
    qkv = attn.qkv(x).view(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    scaled_q = attn.scale_query(normalize(q), math.log(N))
    return _global(scaled_q, normalize(k), v, 1.0, attn.position_bias())


def _aggregated(attn: Any, x: Tensor) -> AttentionHeads:
    from moh.backbones.transnext_attention import normalize

    B, N, _ = x.shape
    q = attn.q(x).view(B, N, attn.num_heads, attn.head_dim).transpose(1, 2)
    scaled_q = attn.scale_query(normalize(q), attn.log_length_N1).float()
    local = attn.local_logits(scaled_q, attn.keys_values(x)[0].float())
    pooled_k = attn.keys_values(attn.pool(x))[0].float().permute(0, 2, 3, 1)
    bias = attn.position_bias().float()

    def weights(rows: Rows) -> Tensor:
        pooled = scaled_q[:, :, rows] @ pooled_k + bias[:, rows]
        return torch.cat([local[:, :, rows], pooled], dim=-1).softmax(dim=-1)

    y_BNHK, _ = attn.heads(x)
    return AttentionHeads(y_BNHK.float(), weights, local.shape[-1] + pooled_k.shape[-1])


# (library, the attention class that `moh.convert` takes) -> how its heads are computed.
_KNOWN: dict[tuple[str, str], Callable[..., AttentionHeads]] = {
    ("timm", "Attention"): _timm,
    ("diffusers", "Attention"): _diffusers,
    ("transformers", "LlamaAttention"): _llama,
    ("moh", "TransNeXtAttention"): _transnext,
    ("moh", "AggregatedAttention"): _aggregated,
}


def attention_heads(
    attn: Any, mha: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AttentionHeads:
    """The heads of a layer on the input of one of its forward passes.

    Args:
        attn: the layer, MHA or MoH.
        mha: its MHA class (:class:`moh.backbones.convert.Wiring`).
        args: of the forward pass; with ``kwargs``, as a forward hook sees them.

    Raises:
        ValueError: a class whose patterns nobody has written down.
    """
    compute = _KNOWN.get((mha.__module__.partition(".")[0], mha.__name__))
    if compute is None:
        raise ValueError(f"no attention patterns are known for {mha.__module__}.{mha.__name__}")
    kwargs = dict(kwargs)
    x = args[0] if args else kwargs.pop("hidden_states")
    if compute is _llama:
        # The cache would be written a second time; the patterns are those of a whole text.
        names = ("position_embeddings", "attention_mask")
        given = dict(zip(names, args[1:], strict=False)) | {
            name: kwargs[name] for name in names if name in kwargs
        }
        return compute(attn, x, **given)
    return compute(attn, x)
