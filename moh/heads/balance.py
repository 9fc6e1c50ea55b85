"""Load-balance loss and head load, read from the routers after a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from moh.heads.router import Router


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """All routers of a model with their module names, first layer first."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield name, module


def selection_counts(model: nn.Module | Iterable[Router]) -> Tensor:
    """What each router counted in the last forward pass, one after the other.

    Args:
        model: a model, or its routers.

    Returns:
        Float32 (sum of E + 1,): how many tokens selected each routed head of a layer, then how
        many tokens there were. Empty before a forward pass.
    """
    statistics = [router.statistics for router in _routers(model) if router.statistics is not None]
    counts = [part for s in statistics for part in (s.selected_sum_E, s.num_tokens.view(1))]
    return torch.cat(counts) if counts else torch.zeros(0)


def set_selection_counts(model: nn.Module | Iterable[Router], counts: Tensor) -> None:
    """Replace the counts of the last forward pass by those of more tokens.

    The probabilities stay those of the last forward pass, with their gradient. So
    :func:`balance_loss` is then its part of the loss: over all parts of the batch that was
    counted they add up to the loss of the whole batch, and their gradients to its gradient.
    :func:`head_load` is that of the whole batch.

    Args:
        model: a model, or its routers.
        counts: sums of :func:`selection_counts` over all parts.
    """
    counted = [router for router in _routers(model) if router.statistics is not None]
    sizes = [router.plan.num_routed + 1 for router in counted]
    for router, total in zip(counted, counts.split(sizes), strict=True):
        assert router.statistics is not None
        router.statistics = router.statistics._replace(
            selected_sum_E=total[:-1], num_tokens=total[-1]
        )


def sum_counts(model: nn.Module | Iterable[Router], add_up: Callable[[Tensor], object]) -> None:
    """Replace each router's counts of the last forward pass by their sums over processes.

    See :func:`set_selection_counts` for what this makes of :func:`balance_loss`.

    Args:
        model: a model, or its routers.
        add_up: replaces a tensor by its sum over the processes, in place; called once.
    """
    found = list(_routers(model))
    counts = selection_counts(found)
    if counts.numel():
        add_up(counts)
        set_selection_counts(found, counts)


def balance_loss(model: nn.Module | Iterable[Router]) -> Tensor | None:
    """Balance loss of the last forward pass, averaged over the layers with routed heads.

    A layer's loss is ``E * sum_i P_i f_i`` with the mean probability ``P_i`` and the mean
    selection ``f_i`` of routed head i (paper, equation 7, times E as the released code has it;
    without the factor for ``gate_scale="paper"``). The gradient flows through ``P_i`` alone.
    The coefficient (paper: 0.01) is the caller's. A control that selects at random or always the
    same heads has no balance loss: it cannot change the selection, and would only push the
    probabilities, and with them the gates, away from the heads that are selected.

    Args:
        model: a model, or its routers where they are at hand: walking a model takes longer than
            the loss.

    Returns:
        A float32 scalar with gradient, or None for a model without learned selection.
    """
    losses = [
        router.balance_loss()
        for router in _routers(model)
        if router.statistics is not None and router.options.selection == "learned"
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


def _routers(model: nn.Module | Iterable[Router]) -> Iterable[Router]:
    if isinstance(model, nn.Module):
        return [router for _, router in routers(model)]
    return model
