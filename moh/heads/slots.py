"""Routed heads that take as many queries each, so that all are one call.

Of a few hundred tokens, finding and moving the selected rows costs as much as their attention.
Here both take a handful of operations: each head gets as many slots as the busiest one needs, and
slots left over compute a query that did not select the head, to be multiplied by zero.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from moh.heads.pairs import memory_lines

# Measured on two cores at 16 heads, half active: a call for each head was the faster way from 0.5
# left over for each used (512 queries, four samples) or from 1 (one sample). At 256 queries it
# never was, but dense execution then was.
WASTE = 0.6  # slots left over for each that is used, at most


class Load:
    """How many queries each routed head of each sample has, counted when it is asked for.

    On a CPU; a GPU would be waited for.

    Args:
        weights_BNE: gates, or whether a head is active; 0 where a query did not select the head.
    """

    def __init__(self, weights_BNE: Tensor) -> None:
        self._weights_BNE = weights_BNE

    @property
    def num_heads(self) -> int:
        """E, the routed heads."""
        return self._weights_BNE.shape[-1]

    @cached_property
    def weights_BEN(self) -> Tensor:  # noqa: N802 (dimensions)
        """The weights, those of a head in a line, float32."""
        return self._weights_BNE.transpose(1, 2).to(
            torch.float32, memory_format=torch.contiguous_format
        )

    @cached_property
    def counts(self) -> list[int]:
        """Queries of each head of each sample, sample after sample."""
        if self._weights_BNE.shape[1] == 1:
            return [int(weight != 0) for weight in self._weights_BNE.flatten().tolist()]
        counts: list[int] = self.weights_BEN.count_nonzero(dim=-1).flatten().tolist()
        return counts

    @property
    def busiest_over_mean(self) -> float:
        """Queries of the busiest head over those of all heads on average; 1 without queries."""
        return max(self.counts) * len(self.counts) / (sum(self.counts) or 1)


class Slots:
    """The same number of queries for each routed head of each sample, in any order.

    On a CPU.

    Args:
        load: of all heads.
        capacity: C, slots of each head.

    Attributes:
        token_BEC: position of the query in each slot.
        weight_BEC: the load's weight of each slot's query for the head, float32; 0 in a slot left
            over.
    """

    def __init__(self, load: Load, capacity: int) -> None:
        # The order of a head's queries is nobody's concern where each sees all keys.
        self.weight_BEC, self.token_BEC = load.weights_BEN.topk(capacity, dim=-1, sorted=False)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    def fitting(cls, load: Load, spare: float) -> Slots | None:
        """Slots for these queries; None where too many would be left over, or nothing is gained.

        Args:
            spare: slots that may be left over for each head of each sample but the first.
        """
        capacity, heads, rows = max(load.counts), len(load.counts), sum(load.counts)
        if not capacity or heads == 1:
            return None
        if heads * capacity - rows > min((heads - 1) * spare, WASTE * rows):
            return None
        return cls(load, capacity)

    def take(self, x_BNEK: Tensor) -> Tensor:
        """Copy the queries of all slots, (B, E, C, ...), of a tensor (B, N, E, ...)."""
        lines, index_BEC = self._lines(x_BNEK)
        taken = lines.index_select(0, index_BEC.flatten())
        return taken.view(*index_BEC.shape, *x_BNEK.shape[3:])

    def put(self, x_BNEK: Tensor, values: Tensor) -> None:
        """Overwrite the rows of all slots, in memory that holds a row's numbers in a line."""
        lines, index_BEC = self._lines(x_BNEK)
        # As a kernel leaves them: query by query, then head by head.
        values = values.transpose(1, 2).reshape(-1, *x_BNEK.shape[3:])
        lines.index_copy_(0, index_BEC.transpose(1, 2).flatten(), values)

    def weigh(self, x_BECK: Tensor) -> Tensor:
        """Multiply what is in the slots by the weights, in place."""
        return x_BECK.mul_(self.weight_BEC.unsqueeze(-1).to(x_BECK.dtype))

    def _lines(self, x_BNEK: Tensor) -> tuple[Tensor, Tensor]:
        lines, steps = memory_lines(x_BNEK, 3)
        key = tuple(steps)
        if key not in self._indices:
            B, E, _ = self.token_BEC.shape
            first_E1 = torch.arange(E).mul_(steps[2]).unsqueeze(-1)
            index_BEC = torch.add(first_E1, self.token_BEC, alpha=steps[1])
            if B > 1:
                index_BEC += torch.arange(B).mul_(steps[0]).view(B, 1, 1)
            self._indices[key] = index_BEC
        return lines, self._indices[key]
