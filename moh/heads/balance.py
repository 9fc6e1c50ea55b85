"""Load-balance loss and head load, read from the routers after a forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moh.heads.router import Router


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """All routers of a model with their module names, first layer first."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield name, module


def balance_loss(model: nn.Module) -> Tensor | None:
    """Balance loss of the last forward pass, averaged over the layers with routed heads.

    A layer's loss is ``E * sum_i P_i f_i`` with the mean probability ``P_i`` and the mean
    selection ``f_i`` of routed head i (paper, equation 7, times E as the released code has it;
    without the factor for ``gate_scale="paper"``). The gradient flows through ``P_i`` alone.
    The coefficient (paper: 0.01) is the caller's.

    Returns:
        A float32 scalar with gradient, or None for a model without routed heads.
    """
    losses = [
        router.balance_loss() for _, router in routers(model) if router.statistics is not None
    ]
    return torch.stack(losses).mean() if losses else None


def head_load(model: nn.Module) -> dict[str, Tensor]:
    """Share of tokens that selected each routed head in the last forward pass.

    Returns:
        Module name of each routing layer -> float32 tensor (E,), detached; sums to top_k.
    """
    return {
        name: router.statistics.selected_sum_E / router.statistics.num_tokens.clamp_min(1)
        for name, router in routers(model)
        if router.statistics is not None
    }
