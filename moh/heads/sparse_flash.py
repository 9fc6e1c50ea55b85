"""Sparse execution on a CPU: PyTorch's fused kernel on gathered queries.

Bidirectional, all heads take one call where that leaves little over, else a call for each head or
for a few. Causal, a head's queries take pieces: the keys before a piece
need no mask, those within its span a small one; the two results are joined by their
log-sum-exps. The causal backward pass goes by chunks of keys, each with the queries after and
within it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moh.heads.pairs import Block, Gradients, KeyHeads, Pairs, accumulator
from moh.heads.slots import Load, Slots

PIECE = 256  # queries of a head that causal or masked attention takes at a time
CHUNK = 384  # keys that the causal backward pass takes at a time
CALL = 2e7  # operations that one thread does in the time that a call costs beside its work
# Below this many keys, what a second thread saves on few queries is lost in starting it.
KEYS_WORTH_SPLITTING = 1024

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q_BNEK: Tensor,
    keys: KeyHeads,
    selected_BNE: Tensor,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    y_BNHK: Tensor,
    lse_BNE: Tensor | None,
) -> None:
    """Write the selected rows of the outputs (the last E heads) and of the log-sum-exps.

    Args:
        y_BNHK: contiguous; zero.
        lse_BNE: likewise; None where no backward pass follows.
    """
    whole = not is_causal and mask_BENM is None
    slots = _slots(Load(selected_BNE), keys) if whole else None
    if slots is not None:
        y, lse = _forward(slots.take(q_BNEK), keys.k_BGMK, keys.v_BGMK, scale=scale)
        slots.put(y_BNHK[:, :, -selected_BNE.shape[2] :], slots.weigh(y))
        if lse_BNE is not None:
            slots.put(lse_BNE, lse)
        return
    pairs = Pairs(selected_BNE)
    reach = None if mask_BENM is None else Reach(pairs, mask_BENM)
    # Copies of what does not lie token by token, made once.
    q_TEK, y_THK = q_BNEK.flatten(0, 1), y_BNHK.flatten(0, 1)
    for block in _rectangles(pairs, keys) if whole else pairs.blocks():
        q = pairs.take(q_TEK, block)
        if whole:
            y, lse = attend(q, *keys.take(block), scale)
        else:
            y, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=accumulator(q.dtype))
            if reach is None:
                _causal_forward(q, block, keys, pairs, scale, y, lse)
            else:
                for rows, near, mask in reach.pieces(block):
                    k, v = keys.take(block, near)
                    y[:, :, rows], lse[:, :, rows] = attend(q[:, :, rows], k, v, scale, mask)
        pairs.put(y_THK, block, y)
        if lse_BNE is not None:
            pairs.put(lse_BNE.flatten(0, 1), block, lse)


def forward_gated(
    q_BHNK: Tensor, k_BHMK: Tensor, v_BHMK: Tensor, gates_BNH: Tensor, load: Load, scale: float
) -> Tensor | None:
    """Gated outputs (B, N, H, K) of all heads, without gradients; None where slots do not pay.

    Bidirectional, without a mask. Gates are multiplied as outputs are written: a slot left over
    has none, and no pass over all outputs follows.

    Args:
        k_BHMK: a key head for each head; likewise the values.
        load: of the gates of the routed heads, which are the last.
    """
    (B, H, N, K), E = q_BHNK.shape, load.num_heads
    S = H - E
    keys = KeyHeads(k_BHMK[:, S:], v_BHMK[:, S:], 1, 0)
    slots = _slots(load, keys)
    if slots is None:
        return None
    y_BNHK = q_BHNK.new_zeros((B, N, H, K))
    if S:
        y_BSNK = _forward(q_BHNK[:, :S], k_BHMK[:, :S], v_BHMK[:, :S], scale=scale)[0]
        gates_BNS1 = gates_BNH[..., :S, None].to(y_BSNK.dtype)
        torch.mul(y_BSNK.transpose(1, 2), gates_BNS1, out=y_BNHK[:, :, :S])
    q_BNEK = q_BHNK[:, S:].transpose(1, 2)
    y_BECK = _forward(slots.take(q_BNEK), keys.k_BGMK, keys.v_BGMK, scale=scale)[0]
    slots.put(y_BNHK[:, :, S:], slots.weigh(y_BECK))
    return y_BNHK


def backward(
    grad_BNHK: Tensor,
    y_BNHK: Tensor,
    lse_BNE: Tensor,
    q_BNEK: Tensor,
    keys: KeyHeads,
    selected_BNE: Tensor,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries (B, N, E, K), the keys and the values (B, G, M, K)."""
    whole = not is_causal and mask_BENM is None
    slots = _slots(Load(selected_BNE), keys) if whole else None
    if slots is not None:
        return _backward_of_slots(slots, grad_BNHK, y_BNHK, lse_BNE, q_BNEK, keys, scale)
    pairs = Pairs(selected_BNE)
    reach = None if mask_BENM is None else Reach(pairs, mask_BENM)
    sums = Gradients(q_BNEK, pairs, keys)
    tensors = [x.flatten(0, 1) for x in (grad_BNHK, q_BNEK, y_BNHK, lse_BNE)]
    for block in _rectangles(pairs, keys) if whole else pairs.blocks():
        saved = tuple(pairs.take(x, block) for x in tensors)
        if block.valid_BHC is not None:
            # With these zeros a place left over adds nothing to any gradient.
            for x in saved:
                x[~block.valid_BHC] = 0
        if whole:
            dq, dk, dv = differentiate(saved, *keys.take(block), scale)
            sums.add_keys(block, dk, dv)
        else:
            dq = torch.zeros_like(saved[1], dtype=accumulator(q_BNEK.dtype))
            pieces = (
                _causal_chunks(block, keys, pairs, dq.dtype)
                if reach is None
                else reach.pieces(block)
            )
            for rows, near, mask in pieces:
                row = tuple(x[:, :, rows] for x in saved)
                dq_part, dk, dv = differentiate(row, *keys.take(block, near), scale, mask)
                dq[:, :, rows] += dq_part
                sums.add_keys(block, dk, dv, near)
        sums.put_queries(block, dq)
    return sums.finish()


def _backward_of_slots(
    slots: Slots,
    grad_BNHK: Tensor,
    y_BNHK: Tensor,
    lse_BNE: Tensor,
    q_BNEK: Tensor,
    keys: KeyHeads,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    E = q_BNEK.shape[2]
    grad, y = slots.take(grad_BNHK[:, :, -E:]), slots.take(y_BNHK[:, :, -E:])
    # With a gradient of zero a slot left over adds nothing to any other gradient.
    dq, dk, dv = _backward(
        slots.weigh(grad),
        slots.take(q_BNEK),
        keys.k_BGMK,
        keys.v_BGMK,
        y,
        slots.take(lse_BNE),
        0.0,
        False,
        scale=scale,
    )
    dq_BNEK = q_BNEK.new_zeros(q_BNEK.shape)
    slots.put(dq_BNEK, dq)
    return dq_BNEK, dk, dv


def _slots(load: Load, keys: KeyHeads) -> Slots | None:
    """Slots, where they pay; a key head of its own for each head is what their call knows."""
    return Slots.fitting(load, _spare(keys)) if keys.group == 1 else None


def _rectangles(pairs: Pairs, keys: KeyHeads) -> Iterator[Block]:
    """Blocks that trade calls for places left over."""
    return pairs.rectangles(_spare(keys), keys.group, keys.offset)


def _spare(keys: KeyHeads) -> float:
    """Rows whose attention takes as long as a call does beside its work."""
    work_of_row = 4 * keys.length * keys.k_BGMK.shape[-1]
    return CALL * torch.get_num_threads() / work_of_row


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The fused kernel, (samples, heads, rows, K): output and log-sum-exps.

    Few queries of one head would leave threads idle, since the kernel deals out queries: the keys
    are then dealt out instead, and the parts joined.
    """
    samples, heads, rows, _ = q.shape
    parts = torch.get_num_threads() // (samples * heads * math.ceil(rows / 32))
    if mask is not None or heads > 1 or parts < 2 or k.shape[2] < KEYS_WORTH_SPLITTING:
        y, lse = _forward(q, k, v, attn_mask=mask, scale=scale)
        return y, lse
    whole = k.shape[2] // parts * parts
    y, lse = _forward(
        q.expand(-1, parts, -1, -1),
        _in_parts(k[:, :, :whole], parts),
        _in_parts(v[:, :, :whole], parts),
        scale=scale,
    )
    total = lse.logsumexp(dim=1, keepdim=True)
    y = (y * (lse - total).exp().unsqueeze(-1)).sum(dim=1, keepdim=True, dtype=lse.dtype)
    if whole < k.shape[2]:
        y, total = _join(y, total, *_forward(q, k[:, :, whole:], v[:, :, whole:], scale=scale))
    return y.to(q.dtype), total


def _in_parts(x: Tensor, parts: int) -> Tensor:
    """Keys of one head as several heads: (samples, 1, M, K) -> (samples, parts, M / parts, K)."""
    return x.squeeze(1).unflatten(1, (parts, -1))


def _join(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each."""
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    return torch.lerp(a.to(weight.dtype), b.to(weight.dtype), weight), torch.logaddexp(lse_a, lse_b)


def differentiate(
    row: tuple[Tensor, ...], k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, (samples, heads, ..., K) each.

    The kernel deals out heads alone: the keys of one head are given to it in parts, as many as
    there are threads.

    Args:
        row: gradient of the output, query, output and log-sum-exp; these two over all keys, of
            which ``k`` and ``v`` may be a part.
    """
    grad, q, y, lse = row
    dtype = accumulator(q.dtype)
    samples, heads, length = q.shape[0], q.shape[1], k.shape[2]
    if heads > 1:
        dq, dk, dv = _backward(grad, q, k, v, y, lse, 0.0, False, attn_mask=mask, scale=scale)
        return dq.to(dtype), dk, dv
    parts = min(-(-torch.get_num_threads() // samples), length)
    whole = length // parts * parts
    found = []
    for part, count in ((slice(0, whole), parts), (slice(whole, length), 1)):
        if part.start == part.stop:
            continue
        near = None
        if mask is not None:
            near = mask[..., part].unflatten(-1, (count, -1)).transpose(-2, -3).unsqueeze(0)
        dq, dk, dv = _backward(
            *(x.expand(-1, count, *x.shape[2:]) for x in (grad, q)),
            _in_parts(k[:, :, part], count),
            _in_parts(v[:, :, part], count),
            *(x.expand(-1, count, *x.shape[2:]) for x in (y, lse)),
            0.0,
            False,
            attn_mask=near,
            scale=scale,
        )
        dq = dq.sum(dim=1, keepdim=True, dtype=dtype)
        found.append((dq, *(x.flatten(1, 2).unsqueeze(1) for x in (dk, dv))))
    if len(found) == 1:
        return found[0]
    (dq, *ours), (dq_rest, *rest) = found
    dk, dv = (torch.cat(pair, dim=2) for pair in zip(ours, rest, strict=True))
    return dq + dq_rest, dk, dv


def _causal_mask(token_C: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
    """Additive mask (rows, keys) of queries at these positions."""
    width = keys.stop - keys.start
    # The row of a query is a window on one line: to the end of what it sees, then nothing.
    line = torch.zeros(2 * width, dtype=dtype)
    line[width:] = -math.inf
    seen_C = (token_C + (1 - keys.start)).clamp_(0, width)
    return line.unfold(0, width, 1).index_select(0, width - seen_C)


def _causal_forward(
    q: Tensor,
    block: Block,
    keys: KeyHeads,
    pairs: Pairs,
    scale: float,
    y: Tensor,
    lse: Tensor,
) -> None:
    token_C = pairs.token_R[block.rows]
    starts = range(0, token_C.shape[0], PIECE)
    ends = [min(start + PIECE, token_C.shape[0]) for start in starts]
    firsts = token_C[list(starts)].tolist()
    lasts = token_C[[end - 1 for end in ends]].tolist()
    for start, end, first, last in zip(starts, ends, firsts, lasts, strict=True):
        # A position past the last key sees all of them, as in PyTorch's own causal mask.
        seen, near = min(first + 1, keys.length), min(last + 1, keys.length)
        part, total = attend(q[:, :, start:end], *keys.take(block, slice(0, seen)), scale)
        y[:, :, start:end], lse[:, :, start:end] = part, total
        if near > seen:
            # The first row has no key left; a row without keys would have no log-sum-exp.
            rows, rest = slice(start + 1, end), slice(seen, near)
            mask = _causal_mask(token_C[rows], rest, lse.dtype)
            within = attend(q[:, :, rows], *keys.take(block, rest), scale, mask)
            joined = _join(part[:, :, 1:], total[:, :, 1:], *within)
            y[:, :, rows], lse[:, :, rows] = joined


Piece = tuple[slice, slice, Tensor | None]  # rows of a block, keys, mask


def _causal_chunks(
    block: Block, keys: KeyHeads, pairs: Pairs, dtype: torch.dtype
) -> Iterator[Piece]:
    """Chunks of keys, each with the queries within it and with those after it."""
    token_C = pairs.token_R[block.rows]
    count = token_C.shape[0]
    starts = list(range(0, keys.length, CHUNK))
    borders = torch.tensor([*starts[1:], keys.length], device=token_C.device)
    before = [0, *torch.searchsorted(token_C, borders).tolist()]
    for first, (begin, after) in zip(starts, itertools.pairwise(before), strict=True):
        near = slice(first, min(first + CHUNK, keys.length))
        if begin < after:
            rows = slice(begin, after)
            yield rows, near, _causal_mask(token_C[rows], near, dtype)
        if after < count:
            yield slice(after, count), near, None


class Reach:
    """What each query may see of a mask.

    Args:
        mask_BENM: boolean or additive; a dimension but the last may be 1.
    """

    def __init__(self, pairs: Pairs, mask_BENM: Tensor) -> None:
        self._pairs, self._mask_BENM = pairs, mask_BENM
        boolean = mask_BENM.dtype == torch.bool
        self._dtype = accumulator(torch.float32 if boolean else mask_BENM.dtype)
        seen = mask_BENM if boolean else mask_BENM > torch.finfo(mask_BENM.dtype).min
        seen = seen.to(torch.uint8)
        # All keys where a query sees none.
        self._first_BEN = seen.argmax(dim=-1)
        self._last_BEN = seen.shape[-1] - seen.flip(-1).argmax(dim=-1)

    def pieces(self, block: Block) -> Iterator[Piece]:
        """Pieces of a block, the keys that any query of one may see, and the mask of these.

        Queries are in order of position, so that a causal mask, padded or not, leaves a piece
        few keys that it must not see.
        """
        B, E, N, _ = self._mask_BENM.shape
        at = (block.sample % B, block.head % E)
        mask_NM, first_N, last_N = self._mask_BENM[at], self._first_BEN[at], self._last_BEN[at]
        token_C = self._pairs.token_R[block.rows] % N
        for start in range(0, token_C.shape[0], PIECE):
            rows = slice(start, min(start + PIECE, token_C.shape[0]))
            token = token_C[rows]
            near = slice(int(first_N[token].min()), int(last_N[token].max()))
            mask = mask_NM[token, near]
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=self._dtype).masked_fill_(~mask, -math.inf)
            yield rows, near, mask.to(self._dtype)
