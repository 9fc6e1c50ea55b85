"""Which tokens the random control is about to see: set before a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moh.heads.balance import routers
from moh.heads.draws import combine
from moh.heads.router import Router


def _drawing(model: nn.Module | Iterable[Router]) -> list[Router]:
    """Routers that select at random, first layer first."""
    found = (r for _, r in routers(model)) if isinstance(model, nn.Module) else model
    return [router for router in found if router.options.selection == "random"]


def set_draws(model: nn.Module | Iterable[Router], keys: Tensor | None) -> None:
    """Tell the routers that select at random which samples come next.

    Holds for every forward pass until the next call, so that activations which the backward pass
    computes anew come from the same heads. Without it they draw from PyTorch's global stream.
    Nothing happens to a model that does not select at random.

    Args:
        model: a model, or its routers, first layer first.
        keys: int64 (B,), a key a sample, or (B, N), a key a token; :func:`combine` makes them.
            None for the global stream.
    """
    for layer, router in enumerate(_drawing(model)):
        router.draws = None if keys is None else combine(keys, layer)


class _Prefixes:
    """Keys of the tokens of a text from the tokens up to each, through a key-value cache too."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._last_B1: Tensor | None = None

    def keys(self, ids_BN: Tensor, mask: Tensor | None) -> Tensor:
        """(B, N) int64.

        Args:
            mask: 2-D attention mask (B, past + N), or None.
        """
        counts = torch.ones_like(ids_BN)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            counts = mask.long()
        length = ids_BN.shape[1]
        place_BN, counts_BN = counts.cumsum(1)[:, -length:], counts[:, -length:]
        key_BN = (combine(self.seed, place_BN, ids_BN) * counts_BN).cumsum(1)
        cached = counts.shape[1] > length
        if cached and self._last_B1 is not None and len(self._last_B1) == len(key_BN):
            key_BN = key_BN + self._last_B1
        self._last_B1 = key_BN[:, -1:]
        return key_BN


@contextmanager
def draws_by_prefix(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, each token of a language model selects by ``seed`` and the text up to it.

    So neither the batch, nor padding at either end, nor cached generation changes a selection.
    Nothing happens to a model that does not select at random.
    """
    if not _drawing(model):
        yield
        return
    prefixes = _Prefixes(seed)

    def before(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        ids_BN = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        set_draws(module, prefixes.keys(ids_BN, mask))

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        set_draws(model, None)
