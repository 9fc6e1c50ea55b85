"""Sparse execution on a CPU: PyTorch's fused kernel on gathered queries.

Bidirectional, a head's queries take one call. Causal, they take blocks: the keys before a block
need no mask, those within its span a small one; the two results are joined by their
log-sum-exps. The backward pass goes by chunks of keys, each with the queries after and within it.
All rows M of ``k_BGMK`` and ``v_BGMK`` are keys; G key heads serve the routed heads in groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moh.heads.pairs import KeyHeads, Padding, Pairs, Span, accumulator

ROWS = 128  # queries in a block of causal or masked attention
CHUNK = 256  # keys in a chunk of the causal backward pass
PADDING_WASTE = 0.25
# Below this many keys, what a second thread saves on few queries is lost in starting it.
KEYS_WORTH_SPLITTING = 1024

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q_BNEK: Tensor,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Head outputs (B, N, E, K) and log-sum-exps (B, N, E), zero where nothing was selected."""
    q_RK = pairs.gather(q_BNEK)
    y_RK = torch.empty_like(q_RK)
    lse_R = torch.empty(len(pairs), dtype=accumulator(q_RK.dtype))
    if is_causal:
        _causal_forward(q_RK, keys, pairs, scale, y_RK, lse_R)
    elif mask_BENM is not None:
        for span, rows, near, mask in _masked_blocks(pairs, mask_BENM):
            k, v = keys.take([span], near)
            y, lse = _attend(_one(q_RK, rows), k, v, scale, mask)
            y_RK[rows], lse_R[rows] = y[0, 0], lse[0, 0]
    else:
        for spans in pairs.batches(PADDING_WASTE):
            rows = slice(spans[0].start, spans[-1].end)
            if len(spans) == 1:
                y, lse = _attend(_one(q_RK, rows), *keys.take(spans), scale)
                y_RK[rows], lse_R[rows] = y[0, 0], lse[0, 0]
            else:
                padding = Padding.of(spans, q_RK.device)
                y, lse = _attend(padding.pad(q_RK), *keys.take(spans), scale)
                y_RK[rows], lse_R[rows] = padding.unpad(y), padding.unpad(lse)
    return pairs.scatter(y_RK), pairs.scatter(lse_R)


def backward(
    grad_BNEK: Tensor,
    y_BNEK: Tensor,
    lse_BNE: Tensor,
    q_BNEK: Tensor,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries (B, N, E, K), the keys and the values (B, G, M, K)."""
    rows = _Rows(*(pairs.gather(x) for x in (grad_BNEK, q_BNEK, y_BNEK, lse_BNE)))
    sums = _Sums(rows.q_RK, keys)
    if is_causal:
        _causal_backward(rows, keys, pairs, scale, sums)
    elif mask_BENM is not None:
        for span, block, near, mask in _masked_blocks(pairs, mask_BENM):
            k, v = keys.take([span], near)
            sums.add(span, block, near, _differentiate(rows.of(block), k, v, scale, mask))
    else:
        for spans in pairs.batches(PADDING_WASTE):
            block = slice(spans[0].start, spans[-1].end)
            k, v = keys.take(spans)
            if len(spans) == 1:
                sums.add(spans[0], block, slice(None), _differentiate(rows.of(block), k, v, scale))
            else:
                padding = Padding.of(spans, k.device)
                dq, dk, dv = _differentiate(rows.padded(padding), k, v, scale)
                sums.dq_RK[block] = padding.unpad(dq)
                sums.add_keys(keys.of(spans[0].head), slice(None), slice(None), dk[:, 0], dv[:, 0])
    dtype = rows.q_RK.dtype
    return pairs.scatter(sums.dq_RK.to(dtype)), sums.dk_BGMK.to(dtype), sums.dv_BGMK.to(dtype)


class _Rows:
    """What the backward pass needs of each row."""

    def __init__(self, grad_RK: Tensor, q_RK: Tensor, y_RK: Tensor, lse_R: Tensor) -> None:
        self.grad_RK, self.q_RK, self.y_RK, self.lse_R = grad_RK, q_RK, y_RK, lse_R

    def of(self, rows: slice) -> tuple[Tensor, ...]:
        """Gradient, query, output and log-sum-exp of some rows, as one sample and one head."""
        return tuple(_one(x, rows) for x in (self.grad_RK, self.q_RK, self.y_RK, self.lse_R))

    def padded(self, padding: Padding) -> tuple[Tensor, ...]:
        """The same of several spans as a rectangle."""
        return tuple(padding.pad(x) for x in (self.grad_RK, self.q_RK, self.y_RK, self.lse_R))


class _Sums:
    """Gradients that several calls add to."""

    def __init__(self, q_RK: Tensor, keys: KeyHeads) -> None:
        dtype = accumulator(q_RK.dtype)
        self.keys = keys
        self.dq_RK = torch.zeros_like(q_RK, dtype=dtype)
        contiguous = torch.contiguous_format
        self.dk_BGMK = torch.zeros_like(keys.k_BGMK, dtype=dtype, memory_format=contiguous)
        self.dv_BGMK = torch.zeros_like(keys.v_BGMK, dtype=dtype, memory_format=contiguous)

    def add(
        self, span: Span, rows: slice, keys: slice, grads: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Add what one call of one span gave."""
        dq, dk, dv = grads
        self.dq_RK[rows] += dq[0, 0]
        self.add_keys(self.keys.of(span.head), span.sample, keys, dk[0, 0], dv[0, 0])

    def add_keys(
        self, head: int, samples: slice | int, keys: slice, dk: Tensor, dv: Tensor
    ) -> None:
        """Add gradients of keys and values."""
        self.dk_BGMK[samples, head, keys] += dk
        self.dv_BGMK[samples, head, keys] += dv


def _one(x_R: Tensor, rows: slice) -> Tensor:
    """Rows as one sample and one head: (rows, ...) -> (1, 1, rows, ...)."""
    return x_R[rows][None, None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The fused kernel on one head, (samples, 1, rows, K); output and log-sum-exps.

    Few queries would leave threads idle, since the kernel deals out queries: the keys are then
    dealt out instead, and the parts joined.
    """
    threads, (samples, _, rows, _) = torch.get_num_threads(), q.shape
    parts = threads // max(1, samples * math.ceil(rows / 32))
    if mask is not None or parts < 2 or k.shape[2] < KEYS_WORTH_SPLITTING:
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
        rest = _forward(q, k[:, :, whole:], v[:, :, whole:], scale=scale)
        y, total = _join(y, total, *rest)
    return y.to(q.dtype), total


def _in_parts(x: Tensor, parts: int) -> Tensor:
    """Keys of one head as several heads: (samples, 1, M, K) -> (samples, parts, M / parts, K)."""
    return x.squeeze(1).unflatten(1, (parts, -1))


def _join(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each."""
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    return torch.lerp(a.to(weight.dtype), b.to(weight.dtype), weight), torch.logaddexp(lse_a, lse_b)


def _differentiate(
    row: tuple[Tensor, ...], k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of one head, (samples, 1, ..., K) each.

    The log-sum-exps may be over more keys than those given. The kernel deals out heads alone:
    the keys are given to it in parts, as many as there are threads.
    """
    grad, q, y, lse = row
    dtype = accumulator(q.dtype)
    samples, length = q.shape[0], k.shape[2]
    parts = min(-(-torch.get_num_threads() // samples), length)
    whole = length // parts * parts
    dq = torch.zeros((), dtype=dtype)
    dk, dv = [], []
    for part, count in ((slice(0, whole), parts), (slice(whole, length), 1)):
        if part.start == part.stop:
            continue
        near = None
        if mask is not None:
            near = mask[..., part].unflatten(-1, (count, -1)).transpose(-2, -3).unsqueeze(0)
        grads = _backward(
            *(x.expand(-1, count, *x.shape[2:]) for x in (grad, q)),
            _in_parts(k[:, :, part], count),
            _in_parts(v[:, :, part], count),
            *(x.expand(-1, count, *x.shape[2:]) for x in (y, lse)),
            0.0,
            False,
            attn_mask=near,
            scale=scale,
        )
        dq = dq + grads[0].sum(dim=1, keepdim=True, dtype=dtype)
        dk.append(grads[1].flatten(1, 2).unsqueeze(1))
        dv.append(grads[2].flatten(1, 2).unsqueeze(1))
    return dq, *(x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in (dk, dv))


def _causal_mask(token_R: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (rows, keys) of queries at these positions and keys ``first`` to ``last``."""
    key = torch.arange(first, last, device=token_R.device)
    mask = torch.zeros((token_R.shape[0], last - first), dtype=dtype)
    return mask.masked_fill_(key > token_R.unsqueeze(1), -math.inf)


def _causal_forward(
    q_RK: Tensor, keys: KeyHeads, pairs: Pairs, scale: float, y_RK: Tensor, lse_R: Tensor
) -> None:
    blocks = [
        (span, start, min(start + ROWS, span.end))
        for span in pairs.spans()
        for start in range(span.start, span.end, ROWS)
    ]
    firsts = pairs.token_R[[start for _, start, _ in blocks]].tolist()
    lasts = pairs.token_R[[end - 1 for _, _, end in blocks]].tolist()
    for (span, start, end), first, last in zip(blocks, firsts, lasts, strict=True):
        # A position past the last key sees all of them, as in PyTorch's own causal mask.
        seen, near = min(first + 1, keys.length), min(last + 1, keys.length)
        rows, later = slice(start, end), slice(start + 1, end)
        y, lse = _attend(_one(q_RK, rows), *keys.take([span], slice(0, seen)), scale)
        if near > seen:
            # The first row has no key left; a row without keys would have no log-sum-exp.
            mask = _causal_mask(pairs.token_R[later], seen, near, lse.dtype)
            part = _attend(_one(q_RK, later), *keys.take([span], slice(seen, near)), scale, mask)
            y_RK[start], lse_R[start] = y[0, 0, 0], lse[0, 0, 0]
            y, lse = _join(y[:, :, 1:], lse[:, :, 1:], *part)
            rows = later
        y_RK[rows], lse_R[rows] = y[0, 0].to(y_RK.dtype), lse[0, 0]


def _causal_backward(rows: _Rows, keys: KeyHeads, pairs: Pairs, scale: float, sums: _Sums) -> None:
    starts = list(range(0, keys.length, CHUNK))
    borders = torch.tensor([*starts[1:], keys.length], device=pairs.token_R.device)
    for span in pairs.spans():
        token_C = pairs.token_R[span.start : span.end]
        before = [0, *torch.searchsorted(token_C, borders).tolist()]
        for first, (begin, after) in zip(starts, itertools.pairwise(before), strict=True):
            chunk = slice(first, min(first + CHUNK, keys.length))
            k, v = keys.take([span], chunk)
            if begin < after:
                block = slice(span.start + begin, span.start + after)
                mask = _causal_mask(pairs.token_R[block], chunk.start, chunk.stop, sums.dq_RK.dtype)
                sums.add(span, block, chunk, _differentiate(rows.of(block), k, v, scale, mask))
            block = slice(span.start + after, span.end)
            if block.start < block.stop:
                sums.add(span, block, chunk, _differentiate(rows.of(block), k, v, scale))


def _masked_blocks(pairs: Pairs, mask_BENM: Tensor) -> Iterator[tuple[Span, slice, slice, Tensor]]:
    """Blocks of queries, the keys that any of them may see, and the additive mask of these.

    Queries are in order of position, so that a causal mask, padded or not, leaves a block few
    keys that it must not see.

    Args:
        mask_BENM: as :func:`forward` takes it.
    """
    B, N, E = pairs.shape
    dtype = accumulator(mask_BENM.dtype if mask_BENM.is_floating_point() else torch.float32)
    first_R, last_R = (
        pairs.gather(bound.expand(B, E, N).transpose(1, 2)) for bound in _bounds(mask_BENM)
    )
    samples, heads, queries, _ = mask_BENM.shape
    for span in pairs.spans():
        mask_NM = mask_BENM[span.sample % samples, span.head % heads]
        for start in range(span.start, span.end, ROWS):
            rows = slice(start, min(start + ROWS, span.end))
            near = slice(int(first_R[rows].min()), int(last_R[rows].max()))
            if queries == 1:
                mask = mask_NM[:, near].expand(rows.stop - rows.start, -1)
            else:
                mask = mask_NM[pairs.token_R[rows], near]
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -math.inf)
            yield span, rows, near, mask.to(dtype)


def _bounds(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First key that each query may see, and the one after the last; all keys where it sees none.

    Args:
        mask: (..., M); false, or the lowest number of its type and below, for keys not seen.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    seen = seen.to(torch.uint8)
    return seen.argmax(dim=-1), seen.shape[-1] - seen.flip(-1).argmax(dim=-1)
