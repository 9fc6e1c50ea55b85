"""How a MoH layer is computed once its gates are known: dense or sparse."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.heads.router import Execution, Router, Routing
from moh.heads.sparse import backend_for, sparse_attention
from moh.heads.thresholds import Shape, sparse_is_faster

# Of a load of 1 / i by head, half active, sparse over dense on two cores was 1.30 at 256 queries,
# 1.15 at 384 and 0.80 at 512.
LONG = 512  # queries from which on a load may be as uneven as it will
# An even load's busiest head has 1.1 times the mean; at 256 queries the gain is gone by about 1.4.
UNEVEN = 1.3  # queries of the busiest head over the mean


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
) -> Tensor:
    """Attention and gates, computed as ``router.options.execution`` says (equation 4).

    Args:
        router: of the layer.
        routing: its decision for these tokens.
        query: (B, H, N, K).
        key: (B, G, M, K); each key head serves ``H / G`` heads in a row. Likewise ``value``.
        attn_mask: as in ``F.scaled_dot_product_attention``; likewise the arguments after it.

    Returns:
        Gated head outputs (B, N, H, K), before the output projection.
    """
    execution = execution_of(router, query, key, attn_mask, is_causal, dropout_p, routing)
    if execution == "sparse":
        y_BNHK = sparse_attention(
            query, key, value, routing.selected_BNE, attn_mask, is_causal, dropout_p, scale
        )
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
    return gate_heads(y_BNHK, routing.gates_BNH, in_place=not torch.is_grad_enabled())


def _is_uneven(routing: Routing) -> bool:
    """Whether the busiest head has far more queries than the others.

    A CPU gains on short sequences by giving all heads as many (:class:`moh.heads.slots.Slots`);
    of an uneven load that computes more than it skips.
    """
    B, N, _ = routing.gates_BNH.shape
    if routing.gates_BNH.device.type != "cpu" or not 1 < N < LONG:
        return False
    if torch.compiler.is_compiling():
        return False
    selected_BNE = routing.selected_BNE
    E = selected_BNE.shape[-1]
    counts = selected_BNE.sum(dim=1).flatten().tolist()
    return max(counts) * B * E > UNEVEN * sum(counts)


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
    routing: Routing | None = None,
) -> Literal["dense", "sparse"]:
    """How :func:`attend` computes these arguments: the option, or for ``auto`` the faster way.

    Args:
        routing: of the router; None for an even load.
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
    if not sparse_is_faster(shape):
        return "dense"
    uneven = routing is not None and not shape.causal and _is_uneven(routing)
    return "dense" if uneven else "sparse"


def set_execution(model: nn.Module, execution: Execution) -> None:
    """Compute all MoH layers of a model ``dense``, ``sparse`` or whichever is faster (``auto``).

    Raises:
        ValueError: another word.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.options = replace(module.options, execution=execution)
