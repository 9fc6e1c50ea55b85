"""Head load over an evaluation: by layer, and by class or task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moh.distribution import sum_over_processes
from moh.heads import Router, Routing, routers


class HeadLoad:
    """Counts which routed heads are selected while a model is evaluated.

    Use as ``with load.watch(model): ...`` and set ``load.groups_B`` to the group of each sample
    of the batch before its forward pass, or ``load.group`` for one group whatever the batch.
    """

    def __init__(self, group_names: Sequence[str]) -> None:
        self.group_names = list(group_names)
        self.groups_B: Tensor | None = None
        self.group: int | None = None
        self._selected: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._plan: dict[str, tuple[int, int]] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[HeadLoad]:
        """Record every forward pass of the model's routers inside the block."""
        handles = []
        for name, router in routers(model):
            if router.plan.all_shared:
                continue
            self._plan[name] = (router.plan.top_k, router.plan.num_routed)
            self._selected[name] = torch.zeros(len(self.group_names), router.plan.num_routed)
            self._tokens[name] = torch.zeros(len(self.group_names))
            handles.append(router.register_forward_hook(self._hook(name)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def record(router: Router, inputs: tuple[Tensor, ...], routing: Routing) -> None:
            selected_BNE = routing.selected_BNE.detach().float()
            if self.group is not None:
                groups_B = torch.full((len(selected_BNE),), self.group)
            elif self.groups_B is not None:
                # Guidance doubles the batch: both halves are of the same classes.
                groups_B = self.groups_B.repeat(len(selected_BNE) // len(self.groups_B)).cpu()
            else:
                return
            self._selected[name].index_add_(0, groups_B, selected_BNE.sum(1).cpu())
            tokens = torch.full((len(groups_B),), float(selected_BNE.shape[1]))
            self._tokens[name].index_add_(0, groups_B, tokens)

        return record

    def sum_over_processes(self) -> None:
        """Add up what the processes of this run have counted; all of them call it."""
        sum_over_processes(*self._selected.values(), *self._tokens.values())

    def to_json(self) -> dict[str, Any] | None:
        """Loads as lists, None if nothing was routed.

        Returns:
            ``layers``, ``top_k``, ``num_routed``, ``overall`` [layer][head], ``groups`` name ->
            [layer][head]; loads are shares of tokens in [0, 1].
        """
        names = [name for name in self._plan if self._tokens[name].sum() > 0]
        if not names:
            return None

        def loads(selected_E: Tensor, tokens: Tensor) -> list[float]:
            return [round(v, 6) for v in (selected_E / tokens.clamp_min(1)).tolist()]

        return {
            "layers": names,
            "top_k": [self._plan[name][0] for name in names],
            "num_routed": [self._plan[name][1] for name in names],
            "overall": [loads(self._selected[n].sum(0), self._tokens[n].sum()) for n in names],
            "groups": {
                group: [loads(self._selected[n][g], self._tokens[n][g]) for n in names]
                for g, group in enumerate(self.group_names)
                if self._tokens[names[0]][g] > 0
            },
        }
