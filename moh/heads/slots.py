"""Routed heads that take as many queries each, so that all are one call.

Of a few hundred tokens, finding and moving the selected rows costs as much as their attention.
Here both take a handful of operations: each head gets as many slots as the busiest one needs, and
slots left over compute a query that did not select the head, to be multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moh.heads.pairs import memory_lines

# Not tuned: an even load leaves a tenth over, and half as many again can gain nothing on dense
# execution where half of the heads are active.
WASTE = 0.5  # slots left over for each that is used, at most


class Slots:
    """The same number of queries for each routed head of each sample, in any order.

    On a CPU.

    Args:
        flags_BEN: 1 where a token selected the head, 0 elsewhere, float32.
        capacity: C, slots of each head.

    Attributes:
        token_BEC: position of the query in each slot.
        selected_BEC: 1 for a query that selected the head, 0 in a slot left over.
    """

    def __init__(self, flags_BEN: Tensor, capacity: int) -> None:
        # The order of a head's queries is nobody's concern where each sees all keys.
        self.selected_BEC, self.token_BEC = flags_BEN.topk(capacity, dim=-1, sorted=False)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    def fitting(cls, selected_BNE: Tensor, spare: float) -> Slots | None:
        """Slots for these queries; None where too many would be left over, or nothing is gained.

        Args:
            selected_BNE: whether each routed head is active.
            spare: slots that may be left over for each head of each sample but the first.
        """
        flags_BEN = selected_BNE.transpose(1, 2).to(
            torch.float32, memory_format=torch.contiguous_format
        )
        counts = flags_BEN.sum(dim=-1).flatten().tolist()
        capacity, heads, rows = int(max(counts)), len(counts), int(sum(counts))
        if not capacity or heads == 1:
            return None
        if heads * capacity - rows > min((heads - 1) * spare, WASTE * rows):
            return None
        return cls(flags_BEN, capacity)

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

    def mask(self, x_BECK: Tensor) -> Tensor:
        """Zero slots left over, in place."""
        return x_BECK.mul_(self.selected_BEC.unsqueeze(-1).to(x_BECK.dtype))

    def _lines(self, x_BNEK: Tensor) -> tuple[Tensor, Tensor]:
        lines, steps = memory_lines(x_BNEK, 3)
        key = tuple(steps)
        if key not in self._indices:
            B, E, _ = self.token_BEC.shape
            firsts = [[[b * steps[0] + e * steps[2]] for e in range(E)] for b in range(B)]
            self._indices[key] = torch.add(torch.tensor(firsts), self.token_BEC, alpha=steps[1])
        return lines, self._indices[key]
