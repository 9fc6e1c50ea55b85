"""The selected query-head pairs as lists of rows, and the keys that each head looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Rows of one routed head in one sample: ``start`` to ``end`` of the list."""

    head: int
    sample: int
    start: int
    end: int


class Block:
    """Rows of one head that are computed together: those of one sample, or of all as a rectangle.

    Attributes:
        head: the routed head.
        samples: those that the rows belong to.
        rows: of the list.
        index_BC, valid_BC: for a rectangle, the row at each place (any row at the places left
            over), and which places hold a row of their own.
    """

    def __init__(self, spans: list[Span], device: torch.device) -> None:
        first, last = spans[0], spans[-1]
        self.head = first.head
        self.samples = slice(first.sample, last.sample + 1)
        self.rows = slice(first.start, last.end)
        self.index_BC: Tensor | None = None
        self.valid_BC: Tensor | None = None
        if len(spans) > 1:
            start_B1 = torch.tensor([[span.start] for span in spans], device=device)
            end_B1 = torch.tensor([[span.end] for span in spans], device=device)
            longest = max(span.end - span.start for span in spans)
            index_BC = start_B1 + torch.arange(longest, device=device)
            self.valid_BC = index_BC < end_B1
            self.index_BC = index_BC.clamp_(max=last.end - 1)


class Pairs:
    """Every selected (token, routed head) as a row; R rows in all.

    Rows of a head in a sample lie together, in order of position, so that causal attention over
    them stays triangular. Head after head; within a head, sample after sample.

    Args:
        selected_BNE: whether each routed head is active.

    Attributes:
        token_R: position of each row.
        counts: rows of each head (outer) in each sample (inner).
    """

    def __init__(self, selected_BNE: Tensor) -> None:
        B, N, _ = selected_BNE.shape
        self.shape = selected_BNE.shape
        flat_R = selected_BNE.permute(2, 0, 1).reshape(-1).nonzero().squeeze(1)
        self._place_R = flat_R % (B * N)
        self.token_R = flat_R % N
        self.counts: list[list[int]] = selected_BNE.sum(dim=1).t().tolist()

    def __len__(self) -> int:
        return int(self.token_R.shape[0])

    def spans(self) -> Iterator[Span]:
        """One span for each head of each sample that any token selected."""
        start = 0
        for head, counts in enumerate(self.counts):
            for sample, count in enumerate(counts):
                if count:
                    yield Span(head, sample, start, start + count)
                start += count

    def blocks(self, waste: float = 0.0) -> Iterator[Block]:
        """The spans, those of a head joined over all samples where that pads little.

        Args:
            waste: largest allowed share of padding rows over real ones; 0 joins none.
        """
        by_head: dict[int, list[Span]] = {}
        for span in self.spans():
            by_head.setdefault(span.head, []).append(span)
        for spans in by_head.values():
            counts = [span.end - span.start for span in spans]
            whole = len(spans) == len(self.counts[0])
            joined = waste and whole and max(counts) * len(counts) <= (1 + waste) * sum(counts)
            for part in [spans] if joined else [[span] for span in spans]:
                yield Block(part, self.token_R.device)

    def take(self, x_BNHK: Tensor, block: Block) -> Tensor:
        """Copy a block's rows of a tensor whose last E heads are the routed ones.

        Returns:
            (samples, 1, rows, ...).
        """
        column, place_R = self._column(x_BNHK, block.head), self._place_R
        if block.index_BC is None:
            return column.index_select(0, place_R[block.rows])[None, None]
        taken = column.index_select(0, place_R[block.index_BC].flatten())
        return taken.unflatten(0, block.index_BC.shape).unsqueeze(1)

    def put(self, x_BNHK: Tensor, block: Block, values: Tensor) -> None:
        """Overwrite a block's rows; inverse of :meth:`take`. The tensor must be contiguous."""
        values = values.squeeze(1)
        values = values[0] if block.valid_BC is None else values[block.valid_BC]
        self._column(x_BNHK, block.head).index_copy_(0, self._place_R[block.rows], values)

    def _column(self, x_BNHK: Tensor, head: int) -> Tensor:
        """All rows of a head, (B * N, ...)."""
        return x_BNHK.flatten(0, 1)[:, x_BNHK.shape[2] - self.shape[2] + head]


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

    def take(self, block: Block, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, (samples, 1, M, K) each, without a copy."""
        head = self.of(block.head)
        at = (block.samples, slice(head, head + 1), keys)
        return self.k_BGMK[at], self.v_BGMK[at]


class Gradients:
    """Gradients of queries, keys and values, to which block after block is added."""

    def __init__(self, q_BNEK: Tensor, pairs: Pairs, keys: KeyHeads) -> None:
        def zeros(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device)

        self._pairs, self._keys, self._dtype = pairs, keys, q_BNEK.dtype
        self._dq_BNEK = zeros(q_BNEK)
        self._dk_BGMK, self._dv_BGMK = zeros(keys.k_BGMK), zeros(keys.v_BGMK)

    def put_queries(self, block: Block, dq: Tensor) -> None:
        """Set the gradients of a block's queries, (samples, 1, rows, K)."""
        self._pairs.put(self._dq_BNEK, block, dq)

    def add_keys(self, block: Block, dk: Tensor, dv: Tensor, keys: slice = slice(None)) -> None:
        """Add to the gradients of some keys and values of a block, (samples, 1, keys, K)."""
        at = (block.samples, self._keys.of(block.head), keys)
        self._dk_BGMK[at] += dk.squeeze(1)
        self._dv_BGMK[at] += dv.squeeze(1)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, E, K), (B, G, M, K) and (B, G, M, K), in the type of the queries."""
        found = (self._dq_BNEK, self._dk_BGMK, self._dv_BGMK)
        return found[0].to(self._dtype), found[1].to(self._dtype), found[2].to(self._dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over keys are kept in."""
    return torch.promote_types(dtype, torch.float32)
