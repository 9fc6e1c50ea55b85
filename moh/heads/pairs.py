"""The selected query-head pairs as lists of rows, and the keys that each head looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The rows of one routed head in one sample: ``start`` to ``end`` of the list."""

    head: int
    sample: int
    start: int
    end: int


class Pairs:
    """Every selected (token, routed head) as a row; R rows in all.

    Rows of a head in a sample lie together, in order of position, so that causal attention over
    them stays triangular. Head after head; within a head, sample after sample.

    Args:
        selected_BNE: whether each routed head is active.
    """

    def __init__(self, selected_BNE: Tensor) -> None:
        B, N, E = selected_BNE.shape
        self.shape = (B, N, E)
        flat_R = selected_BNE.permute(2, 0, 1).reshape(-1).nonzero().squeeze(1)
        self.token_R = flat_R % N
        row = flat_R.div(N, rounding_mode="floor")
        sample_R, head_R = row % B, row.div(B, rounding_mode="floor")
        self._slot_R = (sample_R * N + self.token_R) * E + head_R
        self.counts: list[list[int]] = selected_BNE.sum(dim=1).t().tolist()

    def __len__(self) -> int:
        return int(self._slot_R.shape[0])

    def gather(self, x_BNEK: Tensor) -> Tensor:
        """The selected rows of a tensor (B, N, E, ...), as (R, ...)."""
        return x_BNEK.reshape(-1, *x_BNEK.shape[3:]).index_select(0, self._slot_R)

    def scatter(self, x_RK: Tensor) -> Tensor:
        """Inverse of :meth:`gather`: (B, N, E, ...) with zeros where nothing was selected."""
        out = x_RK.new_zeros((self._num_slots, *x_RK.shape[1:]))
        out.index_copy_(0, self._slot_R, x_RK)
        return out.view(*self.shape, *x_RK.shape[1:])

    @property
    def _num_slots(self) -> int:
        B, N, E = self.shape
        return B * N * E

    def spans(self) -> Iterator[Span]:
        """One span for each head of each sample that any token selected."""
        start = 0
        for head, counts in enumerate(self.counts):
            for sample, count in enumerate(counts):
                if count:
                    yield Span(head, sample, start, start + count)
                start += count

    def batches(self, waste: float) -> Iterator[list[Span]]:
        """Spans to compute together: a head over all samples where that pads little.

        Args:
            waste: largest allowed share of padding rows over real ones.
        """
        by_head: dict[int, list[Span]] = {}
        for span in self.spans():
            by_head.setdefault(span.head, []).append(span)
        for spans in by_head.values():
            counts = [span.end - span.start for span in spans]
            whole = len(spans) == self.shape[0] > 1
            if whole and max(counts) * len(counts) <= (1 + waste) * sum(counts):
                yield spans
            else:
                yield from ([span] for span in spans)


class Padding(NamedTuple):
    """Rows of several spans as a rectangle.

    Attributes:
        index_BC: row of the list at each place; any row at the places left over.
        valid_BC: which places hold a row of their own.
    """

    index_BC: Tensor
    valid_BC: Tensor

    @classmethod
    def of(cls, spans: list[Span], device: torch.device) -> Padding:
        """Lay out spans that follow each other in the list."""
        start_B1 = torch.tensor([[span.start] for span in spans], device=device)
        end_B1 = torch.tensor([[span.end] for span in spans], device=device)
        longest = max(span.end - span.start for span in spans)
        index_BC = start_B1 + torch.arange(longest, device=device)
        return cls(index_BC.clamp(max=spans[-1].end - 1), index_BC < end_B1)

    def pad(self, x_RK: Tensor) -> Tensor:
        """(R, ...) -> (B, 1, C, ...), zero at the places left over."""
        x = x_RK[self.index_BC]
        x[~self.valid_BC] = 0
        return x.unsqueeze(1)

    def unpad(self, x_B1CK: Tensor) -> Tensor:
        """Inverse of :meth:`pad`, the rows of these spans alone."""
        return x_B1CK.squeeze(1)[self.valid_BC]


class KeyHeads:
    """Keys and values of the routed heads.

    Args:
        group: routed heads in a row that share a key head.
        offset: place of the first routed head in its group.
    """

    def __init__(self, k_BGMK: Tensor, v_BGMK: Tensor, group: int, offset: int) -> None:
        self.k_BGMK, self.v_BGMK = k_BGMK, v_BGMK
        self.group, self.offset = group, offset
        self.length = k_BGMK.shape[2]

    def of(self, head: int) -> int:
        """The key head of a routed head."""
        return (self.offset + head) // self.group

    def take(self, spans: list[Span], keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of spans of one head, (samples, 1, M, K) each, without a copy."""
        head = self.of(spans[0].head)
        samples = slice(spans[0].sample, spans[-1].sample + 1)
        return (
            self.k_BGMK[samples, head : head + 1, keys],
            self.v_BGMK[samples, head : head + 1, keys],
        )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over keys are kept in."""
    return torch.promote_types(dtype, torch.float32)
