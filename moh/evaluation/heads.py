"""Head load over an evaluation: by layer, and by class or task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    ``load.mask_BN`` says which tokens of the next batches count, those of batches of another
    shape none; None for all.
    """

    def __init__(self, group_names: Sequence[str]) -> None:
        self.group_names = list(group_names)
        self.groups_B: Tensor | None = None
        self.group: int | None = None
        self.mask_BN: Tensor | None = None
        self._selected: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._plan: dict[str, tuple[int, int]] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[HeadLoad]:
        """Record every forward pass of the model's routers inside the block."""
        self.expect(model)
        handles = [
            router.register_forward_hook(self._hook(name))
            for name, router in routers(model)
            if name in self._plan
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def expect(self, model: nn.Module) -> None:
        """Start at zero for every layer of the model that has routed heads."""
        for name, router in routers(model):
            if router.plan.all_shared:
                continue
            self._plan[name] = (router.plan.top_k, router.plan.num_routed)
            # Whole numbers, of which float64 holds any that an evaluation reaches.
            groups = len(self.group_names)
            self._selected[name] = torch.zeros(groups, router.plan.num_routed, dtype=torch.float64)
            self._tokens[name] = torch.zeros(groups, dtype=torch.float64)

    def _hook(self, name: str) -> Any:
        def record(router: Router, inputs: tuple[Tensor, ...], routing: Routing) -> None:
            selected_BNE = routing.selected_BNE.detach()
            tokens_B: Tensor | int = selected_BNE.shape[1]
            if self.mask_BN is not None:
                if self.mask_BN.shape != selected_BNE.shape[:2]:
                    return
                mask_BN = self.mask_BN.to(selected_BNE.device)
                selected_BNE = selected_BNE & mask_BN[..., None]
                tokens_B = mask_BN.sum(1)
            if self.group is not None:
                groups_B = torch.full((len(selected_BNE),), self.group)
            elif self.groups_B is not None:
                # Guidance doubles the batch: both halves are of the same classes.
                groups_B = self.groups_B.repeat(len(selected_BNE) // len(self.groups_B))
            else:
                return
            self._add(name, selected_BNE.sum(1), tokens_B, groups_B)

        return record

    def _add(self, name: str, selected_BE: Tensor, tokens: Tensor | int, groups_B: Tensor) -> None:
        # The sums stay where the model is: fetching them would halt a GPU at every layer.
        device = selected_BE.device
        groups_B = groups_B.to(device)
        self._selected[name] = self._selected[name].to(device)
        self._tokens[name] = self._tokens[name].to(device)
        self._selected[name].index_add_(0, groups_B, selected_BE.double())
        tokens_B = torch.as_tensor(tokens, dtype=torch.float64, device=device)
        self._tokens[name].index_add_(0, groups_B, tokens_B.expand(len(groups_B)).contiguous())

    def counts(self) -> dict[str, Tensor]:
        """Selections ``selected/LAYER`` (groups, E) and ``tokens/LAYER`` (groups,), int64."""
        found = {}
        for name in self._plan:
            found[f"selected/{name}"] = self._selected[name].long().cpu()
            found[f"tokens/{name}"] = self._tokens[name].long().cpu()
        return found

    def add(self, counts: Mapping[str, Tensor], groups_B: Tensor) -> None:
        """Add :meth:`counts` of another one, its groups being ``groups_B`` of this one."""
        for name in self._plan:
            self._add(name, counts[f"selected/{name}"], counts[f"tokens/{name}"], groups_B)

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
