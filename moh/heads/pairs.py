"""The selected query-head pairs as lists of rows, and the keys that each head looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Block:
    """Rows that are computed together: of one head in one sample, or of a rectangle of both.

    Attributes:
        heads, samples: of the rows.
        rows: of the list, one behind the other.
        index_BHC, valid_BHC: for a rectangle, the row at each place (any row at the places left
            over), and which places hold a row of their own.
        keep_R, head_R: for a rectangle, the place of each row, head after head, and its head.
    """

    def __init__(
        self, heads: slice, samples: slice, start: int, counts: Sequence[Sequence[int]]
    ) -> None:
        self.heads, self.samples = heads, samples
        flat = [count for by_sample in counts for count in by_sample]
        self.rows = slice(start, start + sum(flat))
        self.index_BHC: Tensor | None = None
        self.valid_BHC: Tensor | None = None
        self.keep_R: Tensor | None = None
        self.head_R: Tensor | None = None
        if len(flat) > 1:
            count_G = torch.tensor(flat)
            offset_R = torch.arange(sum(flat)) - (count_G.cumsum(0) - count_G).repeat_interleave(
                count_G
            )
            group_R = torch.arange(len(flat)).repeat_interleave(count_G)
            self.keep_R = group_R * max(flat) + offset_R
            self.head_R = heads.start + group_R // len(counts[0])
            ends = torch.tensor(list(accumulate(flat, initial=start)))
            ends_HB = ends.view(-1)[1:].view(len(counts), -1)
            start_HB = ends.view(-1)[:-1].view(len(counts), -1)
            index_HBC = start_HB.unsqueeze(-1) + torch.arange(max(flat))
            self.valid_BHC = (index_HBC < ends_HB.unsqueeze(-1)).transpose(0, 1)
            self.index_BHC = index_HBC.clamp_(max=self.rows.stop - 1).transpose(0, 1)

    @property
    def head(self) -> int:
        """The head, or the first of several."""
        return int(self.heads.start)

    @property
    def sample(self) -> int:
        """The sample, or the first of several."""
        return int(self.samples.start)


class Pairs:
    """Every selected (token, routed head) as a row; R rows in all. On a CPU.

    Rows of a head in a sample lie together, in order of position, so that causal attention over
    them stays triangular. Head after head; within a head, sample after sample.

    Args:
        selected_BNE: whether each routed head is active.

    Attributes:
        token_R: position of each row.
        counts: rows of each head (outer) in each sample (inner).
    """

    def __init__(self, selected_BNE: Tensor) -> None:
        B, N, _ = self.shape = selected_BNE.shape
        flat_R = selected_BNE.permute(2, 0, 1).reshape(-1).nonzero().squeeze(1)
        self._place_R = flat_R % (B * N)
        self.token_R = flat_R % N
        self.counts: list[list[int]] = selected_BNE.sum(dim=1).t().tolist()
        totals = [sum(by_sample) for by_sample in self.counts]
        self._starts = list(accumulate(totals, initial=0))

    def blocks(self) -> Iterator[Block]:
        """A block for each head of each sample that any token selected."""
        for head in range(self.shape[2]):
            yield from self._alone(head)

    def rectangles(self, spare: float, group: int, offset: int) -> Iterator[Block]:
        """The same rows in fewer blocks: neighbouring heads over all samples.

        Args:
            spare: places that may be left over for each block that is saved.
            group, offset: of the key heads. Heads of a block share one, or none do.
        """
        B, E = self.shape[0], len(self.counts)
        first = 0
        while first < E:
            largest, rows = max(self.counts[first]), sum(self.counts[first])
            if B * largest - rows > (B - 1) * spare:
                yield from self._alone(first)
                first += 1
                continue
            last = first + 1
            while last < E and (group == 1 or self._same_key(first, last, group, offset)):
                more = max(self.counts[last])
                wider = max(largest, more)
                if B * ((last + 1 - first) * wider - (last - first) * largest - more) > spare:
                    break
                last, largest, rows = last + 1, wider, rows + sum(self.counts[last])
            if rows and B * (last - first) > 1:
                heads, samples = slice(first, last), slice(0, B)
                yield Block(heads, samples, self._starts[first], self.counts[first:last])
            else:
                yield from self._alone(first)
            first = last

    @staticmethod
    def _same_key(one: int, other: int, group: int, offset: int) -> bool:
        return (offset + one) // group == (offset + other) // group

    def _alone(self, head: int) -> Iterator[Block]:
        start = self._starts[head]
        for sample, count in enumerate(self.counts[head]):
            if count:
                yield Block(slice(head, head + 1), slice(sample, sample + 1), start, [[count]])
            start += count

    def take(self, x_THK: Tensor, block: Block) -> Tensor:
        """Copy a block's rows of a tensor whose last E heads are the routed ones.

        Args:
            x_THK: (B * N, heads, ...).

        Returns:
            (samples, heads, rows, ...).
        """
        first = x_THK.shape[1] - self.shape[2]
        if block.index_BHC is None:
            column = x_THK[:, first + block.head]
            return column.index_select(0, self._place_R[block.rows])[None, None]
        lines, (by_token, by_head) = memory_lines(x_THK, 2)
        head_H1 = torch.arange(block.heads.start, block.heads.stop).unsqueeze(1)
        index_BHC = self._place_R[block.index_BHC] * by_token + (first + head_H1) * by_head
        taken = lines.index_select(0, index_BHC.flatten())
        return taken.view(*index_BHC.shape, *x_THK.shape[2:])

    def put(self, x_THK: Tensor, block: Block, values: Tensor) -> None:
        """Overwrite a block's rows, of a contiguous tensor; inverse of :meth:`take`."""
        first = x_THK.shape[1] - self.shape[2]
        if block.keep_R is None or block.head_R is None:
            column = x_THK[:, first + block.head]
            column.index_copy_(0, self._place_R[block.rows], values[0, 0])
            return
        lines, (by_token, by_head) = memory_lines(x_THK, 2)
        place_R = self._place_R[block.rows] * by_token + (first + block.head_R) * by_head
        rows = values.transpose(0, 1).reshape(-1, *x_THK.shape[2:])
        lines.index_copy_(0, place_R, rows.index_select(0, block.keep_R))


def memory_lines(x: Tensor, dims: int) -> tuple[Tensor, list[int]]:
    """A tensor's memory as lines of its last dimension, without a copy where it lies so.

    One index a line moves memory in one piece; an index for each dimension does not.

    Args:
        x: with one dimension more than ``dims``, the line, or as many: a line of one number.

    Returns:
        (lines, K) or (lines,), and for each of the dimensions the lines from one entry to the next.
    """
    size = x.shape[dims:]
    width = size[0] if size else 1
    if x.stride()[dims:] not in ((), (1,)) or any(step % width for step in x.stride()[:dims]):
        x = x.contiguous()
    steps = [step // width for step in x.stride()[:dims]]
    last = sum((n - 1) * step for n, step in zip(x.shape[:dims], steps, strict=True))
    return x.as_strided((last + 1, *size), (width, 1) if size else (1,)), steps


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

    def of(self, block: Block) -> slice:
        """The key heads of a block: one for each head, or one for all."""
        if self.group == 1:
            return block.heads
        head = (self.offset + block.head) // self.group
        return slice(head, head + 1)

    def take(self, block: Block, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, (samples, heads, M, K) each, without a copy."""
        heads = block.heads.stop - block.heads.start
        at = (block.samples, self.of(block), keys)
        k, v = self.k_BGMK[at], self.v_BGMK[at]
        return k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)


class Gradients:
    """Gradients of queries, keys and values, to which block after block is added."""

    def __init__(self, q_BNEK: Tensor, pairs: Pairs, keys: KeyHeads) -> None:
        def zeros(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device)

        self._pairs, self._keys, self._dtype = pairs, keys, q_BNEK.dtype
        self._dq_BNEK = zeros(q_BNEK)
        self._dk_BGMK, self._dv_BGMK = zeros(keys.k_BGMK), zeros(keys.v_BGMK)

    def put_queries(self, block: Block, dq: Tensor) -> None:
        """Set the gradients of a block's queries, (samples, heads, rows, K)."""
        self._pairs.put(self._dq_BNEK.flatten(0, 1), block, dq)

    def add_keys(self, block: Block, dk: Tensor, dv: Tensor, keys: slice = slice(None)) -> None:
        """Add to the gradients of some keys and values of a block, (samples, heads, keys, K)."""
        at = (block.samples, self._keys.of(block), keys)
        for total, new in ((self._dk_BGMK[at], dk), (self._dv_BGMK[at], dv)):
            total += new.sum_to_size(total.shape)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, E, K), (B, G, M, K) and (B, G, M, K), in the type of the queries."""
        found = (self._dq_BNEK, self._dk_BGMK, self._dv_BGMK)
        return found[0].to(self._dtype), found[1].to(self._dtype), found[2].to(self._dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over keys are kept in."""
    return torch.promote_types(dtype, torch.float32)
