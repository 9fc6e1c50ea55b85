"""How a MoH layer is computed once its gates are known: dense or sparse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.heads.router import Execution, Router, Routing
from moh.heads.slots import Load
from moh.heads.sparse import backend_for, gated_attention, sparse_attention
from moh.heads.thresholds import Shape, sparse_is_faster


def attend(
    router: Router,
    routing: Routing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    dense: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Attention and gates, computed as ``router.options.execution`` says (equation 4).

    Args:
        router: of the layer.
        routing: its decision for these tokens.
        query: (B, H, N, K).
        key: (B, G, M, K); each key head serves ``H / G`` heads in a row. Likewise ``value``.
        attn_mask: as in ``F.scaled_dot_product_attention``; likewise ``is_causal``,
            ``dropout_p`` and ``scale``.
        dense: computes all heads (B, N, H, K) in place of PyTorch's attention: a library's own
            call of it.

    Returns:
        Gated head outputs (B, N, H, K), before the output projection.
    """
    gates_BNH, inference = routing.gates_BNH, not torch.is_grad_enabled()
    load = None
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        # Without gradients nobody has found yet which heads are selected.
        load = Load(gates_BNH[..., router.plan.num_shared :] if inference else routing.selected_BNE)
    execution = execution_of(router, query, key, attn_mask, is_causal, dropout_p, load)
    if execution == "sparse":
        y_BNHK = None
        if inference and load is not None and not dropout_p:
            y_BNHK = gated_attention(
                query, key, value, gates_BNH, load, attn_mask, is_causal, scale
            )
        if y_BNHK is not None:
            return y_BNHK
        y_BNHK = sparse_attention(
            query, key, value, routing.selected_BNE, attn_mask, is_causal, dropout_p, scale
        )
    elif dense is not None:
        y_BNHK = dense()
    else:
        y_BNHK = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        ).transpose(1, 2)
    # Without gradients nobody else holds the heads' outputs, and gating needs no second copy.
    return gate_heads(y_BNHK, gates_BNH, in_place=inference)


def gate_heads(y_BNHK: Tensor, gates_BNH: Tensor, in_place: bool = False) -> Tensor:
    """Weight every head's output by its gate.

    Args:
        y_BNHK: head outputs (B, N, H, K), before the output projection.
        gates_BNH: gates (B, N, H).
        in_place: overwrite ``y_BNHK``.

    Returns:
        (B, N, H, K) in the dtype of ``y_BNHK``. Gates of one leave it equal bit for bit.
    """
    gates_BNH1 = gates_BNH.to(y_BNHK.dtype).unsqueeze(-1)
    return y_BNHK.mul_(gates_BNH1) if in_place else y_BNHK * gates_BNH1


def execution_of(
    router: Router,
    q_BHNK: Tensor,
    k_BGMK: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    load: Load | None = None,
) -> Literal["dense", "sparse"]:
    """How :func:`attend` computes these arguments: the option, or for ``auto`` the faster way.

    Args:
        load: of the routed heads; None for an even one.
    """
    execution, plan = router.options.execution, router.plan
    if plan.all_shared or q_BHNK.device.type == "meta":
        return "dense"
    if execution != "auto":
        return execution
    if backend_for(q_BHNK, attn_mask, dropout_p) == "math":
        return "dense"
    shape = Shape(
        device=q_BHNK.device.type,
        queries=q_BHNK.shape[2],
        keys=k_BGMK.shape[2],
        head_dim=q_BHNK.shape[3],
        instances=q_BHNK.shape[0] * q_BHNK.shape[1],
        skipped=1 - plan.num_active / plan.num_heads,
        # A mask costs sparse execution as much as causality does, or less.
        causal=is_causal or attn_mask is not None,
        training=torch.is_grad_enabled() and q_BHNK.requires_grad,
    )
    faster = sparse_is_faster(shape)
    if faster and load is not None and not sparse_is_faster(shape, uneven=True):
        # Where an even load alone pays, it is because each head is given as many queries as the
        # busiest one has: what is left over at the others is not skipped.
        computed = plan.num_shared + plan.top_k * load.busiest_over_mean
        faster = sparse_is_faster(shape._replace(skipped=1 - computed / plan.num_heads))
    return "sparse" if faster else "dense"


def set_execution(model: nn.Module, execution: Execution) -> None:
    """Compute all MoH layers of a model ``dense``, ``sparse`` or whichever is faster (``auto``).

    Raises:
        ValueError: another word.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.options = replace(module.options, execution=execution)
