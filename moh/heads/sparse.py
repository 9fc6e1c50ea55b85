"""Sparse execution: only the selected query-head pairs are computed.

Shared heads take PyTorch's own attention as it is. Routed heads take their selected queries
alone, through one operator that ``torch.compile`` need not look into. Neither builds anything of
tokens x tokens x heads.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moh.heads import sparse_flash, sparse_math
from moh.heads.one_query import attend_once
from moh.heads.pairs import KeyHeads, Pairs, accumulator
from moh.heads.slots import Load

LARGEST_TRITON_HEAD = 256


def sparse_attention(
    q_BHNK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    selected_BNE: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention of the active heads, before their gates.

    Args:
        q_BHNK: queries; shared heads come first.
        k_BGMK: keys; each key head serves ``H / G`` heads in a row. Likewise the values.
        selected_BNE: whether each routed head is active.
        attn_mask: as in ``F.scaled_dot_product_attention``; likewise the arguments after it.
            Dropout draws other weights than dense execution does.

    Returns:
        (B, N, H, K); zero for a head that is not active.

    Raises:
        ValueError: both a mask and ``is_causal``, or more heads selected from than there are.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other")
    H, E = q_BHNK.shape[1], selected_BNE.shape[-1]
    S, group = H - E, H // k_BGMK.shape[1]
    if S < 0:
        raise ValueError(f"{E} routed heads of {H}")
    q_BHNK, k_BGMK, v_BGMK = _as_autocast(q_BHNK, k_BGMK, v_BGMK)
    if scale is None:
        scale = 1 / math.sqrt(q_BHNK.shape[-1])
    shared_mask, routed_mask = _split_mask(attn_mask, S, k_BGMK.shape[2])
    # One split instead of two slices, since its gradient is one copy. Key heads that serve both
    # kinds of heads are handed to both.
    q_BSNK, q_BENK = q_BHNK.split([S, E], dim=1)
    keys, values = _split_keys(k_BGMK, S, group), _split_keys(v_BGMK, S, group)
    y_BSNK = q_BSNK
    if S:
        y_BSNK = F.scaled_dot_product_attention(
            q_BSNK,
            keys[0],
            values[0],
            attn_mask=shared_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=keys[0].shape[1] != S,
        )
    # Without a gradient and a graph there is nothing to register an operator for.
    graph = torch.is_grad_enabled() or torch.compiler.is_compiling()
    y_BNHK, _ = (_active_heads if graph else _compute_active_heads)(
        y_BSNK.transpose(1, 2),
        q_BENK.transpose(1, 2),
        keys[1],
        values[1],
        selected_BNE,
        routed_mask,
        torch.randint(2**62, (), device="cpu") if dropout_p else None,
        is_causal,
        scale,
        dropout_p,
        group,
        S % group,
        graph,
        backend_for(q_BHNK, attn_mask, dropout_p),
    )
    return y_BNHK


def gated_attention(
    q_BHNK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    gates_BNH: Tensor,
    load: Load,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor | None:
    """Attention of the active heads and their gates at once, where a shorter way is known.

    There is one on a CPU, without gradients and dropout: for one query a sample, and for
    bidirectional attention without a mask whose load is even enough.

    Args:
        gates_BNH: of all heads; shared heads come first.
        load: of the gates of the routed heads.

    The others are those of :func:`sparse_attention`.

    Returns:
        (B, N, H, K), zero for a head that is not active; None where no shorter way is known.
    """
    if is_causal:
        return None
    q_BHNK, k_BGMK, v_BGMK = _as_autocast(q_BHNK, k_BGMK, v_BGMK)
    if q_BHNK.shape[2] == 1:
        y_B1HK = attend_once(q_BHNK, k_BGMK, v_BGMK, load, attn_mask, scale)
        return y_B1HK.mul_(gates_BNH.unsqueeze(-1).to(y_B1HK.dtype))
    if attn_mask is not None or k_BGMK.shape[1] != q_BHNK.shape[1]:
        return None
    if scale is None:
        scale = 1 / math.sqrt(q_BHNK.shape[-1])
    return sparse_flash.forward_gated(q_BHNK, k_BGMK, v_BGMK, gates_BNH, load, scale)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the arguments of PyTorch's attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.dtype != torch.float64 else x for x in tensors)


def _split_keys(x_BGMK: Tensor, num_shared: int, group: int) -> tuple[Tensor, Tensor]:
    """Key heads of the shared and of the routed heads."""
    if num_shared % group == 0:
        whole = num_shared // group
        shared, routed = x_BGMK.split([whole, x_BGMK.shape[1] - whole], dim=1)
        return shared, routed
    head_S = torch.arange(num_shared, device=x_BGMK.device) // group
    return x_BGMK.index_select(1, head_S), x_BGMK[:, num_shared // group :]


def _split_mask(
    mask: Tensor | None, num_shared: int, num_keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """Mask of the shared and of the routed heads, with four dimensions."""
    if mask is None:
        return None, None
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(-1, -1, -1, num_keys)
    if mask.shape[1] == 1:
        return mask, mask
    return mask[:, :num_shared], mask[:, num_shared:]


def backend_for(q: Tensor, mask: Tensor | None, dropout_p: float) -> str:
    """What computes the routed heads: ``flash`` on a CPU, ``triton`` on a GPU, else ``math``.

    The first two know neither dropout nor the gradient of a mask.
    """
    if dropout_p or (mask is not None and mask.requires_grad):
        return "math"
    if q.device.type == "cpu":
        return "flash"
    fits = q.shape[-1] <= LARGEST_TRITON_HEAD and q.dtype != torch.float64
    return "triton" if q.device.type == "cuda" and fits and _has_triton() else "math"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _compute_active_heads(
    y_BNSK: Tensor,
    q_BNEK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    selected_BNE: Tensor,
    mask_BENM: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    group: int,
    offset: int,
    saves_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Outputs of all heads (B, N, H, K), and log-sum-exps of the routed ones (or nothing).

    Args:
        y_BNSK: outputs of the shared heads, which are put before the others.
        k_BGMK: keys of the routed heads; likewise the values.
        mask_BENM: boolean or additive; a dimension but the last may be 1.
        seed: of the dropout; None without.
        group: heads in a row that share a key head.
        offset: place of the first routed head in its group.
        saves_lse: whether a backward pass follows, which needs the log-sum-exps.
        backend: see :func:`backend_for`.
    """
    (B, N, E, K), S = q_BNEK.shape, y_BNSK.shape[2]
    y_BNHK = q_BNEK.new_zeros((B, N, S + E, K))
    y_BNHK[:, :, :S] = y_BNSK
    wanted = (B, N, E) if saves_lse or backend == "triton" else (0,)
    lse_BNE = q_BNEK.new_zeros(wanted, dtype=accumulator(q_BNEK.dtype))
    if backend == "triton":
        _triton().forward(
            q_BNEK,
            k_BGMK,
            v_BGMK,
            selected_BNE,
            mask_BENM,
            is_causal,
            scale,
            group,
            offset,
            y_BNHK,
            lse_BNE,
        )
        return y_BNHK, lse_BNE
    keys = KeyHeads(k_BGMK, v_BGMK, group, offset)
    if backend == "flash":
        kept = lse_BNE if saves_lse else None
        sparse_flash.forward(q_BNEK, keys, selected_BNE, mask_BENM, is_causal, scale, y_BNHK, kept)
        return y_BNHK, lse_BNE
    pairs = Pairs(selected_BNE)
    dropout = sparse_math.Dropout(dropout_p, 0 if seed is None else int(seed))
    sparse_math.forward(q_BNEK, keys, pairs, mask_BENM, is_causal, scale, dropout, y_BNHK)
    return y_BNHK, q_BNEK.new_empty(0)


_active_heads = torch.library.custom_op("moh::active_heads", mutates_args=())(_compute_active_heads)


@torch.library.custom_op("moh::active_heads_backward", mutates_args=())
def _active_heads_backward(
    grad_BNHK: Tensor,
    y_BNHK: Tensor,
    lse_BNE: Tensor,
    q_BNEK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    selected_BNE: Tensor,
    mask_BENM: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    group: int,
    offset: int,
    backend: str,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and the mask; nothing for a mask that needs none."""
    if backend == "triton":
        grads = _triton().backward(
            grad_BNHK,
            y_BNHK,
            lse_BNE,
            q_BNEK,
            k_BGMK,
            v_BGMK,
            selected_BNE,
            mask_BENM,
            is_causal,
            scale,
            group,
            offset,
        )
        return *grads, q_BNEK.new_empty(0)
    keys = KeyHeads(k_BGMK, v_BGMK, group, offset)
    if backend == "flash":
        grads = sparse_flash.backward(
            grad_BNHK, y_BNHK, lse_BNE, q_BNEK, keys, selected_BNE, mask_BENM, is_causal, scale
        )
        return *grads, q_BNEK.new_empty(0)
    pairs = Pairs(selected_BNE)
    dropout = sparse_math.Dropout(dropout_p, 0 if seed is None else int(seed))
    return sparse_math.backward(
        grad_BNHK, q_BNEK, keys, pairs, mask_BENM, is_causal, scale, dropout, mask_gradient
    )


def _triton() -> Any:
    """The kernels for a GPU; imported where there is one, since not every PyTorch brings Triton."""
    return import_module("moh.heads.sparse_triton")


@_active_heads.register_fake
def _(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(0)
    *_, saves_lse, backend = rest
    if backend == "triton" or (saves_lse and backend == "flash"):
        lse = selected.new_empty(selected.shape, dtype=accumulator(q.dtype))
    B, N, E, K = q.shape
    return q.new_empty((B, N, y.shape[2] + E, K)), lse


@_active_heads_backward.register_fake
def _(
    grad: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dmask = q.new_empty(0)
    if rest[-1]:
        assert mask is not None
        dmask = mask.new_empty(mask.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dmask


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, *tensors = inputs[:-7]
    ctx.is_causal, ctx.scale, ctx.dropout_p, ctx.group, ctx.offset, _, ctx.backend = inputs[-7:]
    ctx.num_shared = y.shape[2]
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[5]
    dq, dk, dv, dmask = _active_heads_backward(
        grad,
        *ctx.saved_tensors,
        ctx.is_causal,
        ctx.scale,
        ctx.dropout_p,
        ctx.group,
        ctx.offset,
        ctx.backend,
        wanted,
    )
    return grad[:, :, : ctx.num_shared], dq, dk, dv, None, dmask if wanted else None, *[None] * 8


_active_heads.register_autograd(_differentiate, setup_context=_save)
