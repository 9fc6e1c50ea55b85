"""Sparse execution anywhere: matrix products and a softmax, piece by piece of queries.

For what no fused kernel does: dropout of attention weights, a bias that needs its gradient,
devices without a kernel of their own. The backward pass computes each piece again; dropout draws
from a seed, so that both passes drop the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moh.heads.pairs import Block, Gradients, KeyHeads, Pairs, accumulator

PIECE = 256  # queries of a head taken at a time


class Dropout(NamedTuple):
    """Dropout of attention weights.

    Attributes:
        p: share of the weights that are dropped.
        seed: of the draw; the same seed drops the same weights.
    """

    p: float
    seed: int

    def scale_of(self, weight: Tensor, draw: int) -> Tensor | float:
        """Factor of each weight: 0, or 1 / (1 - p) for those that are kept."""
        if not self.p:
            return 1.0
        generator = torch.Generator(weight.device).manual_seed(self.seed + draw)
        kept = torch.empty_like(weight).bernoulli_(1 - self.p, generator=generator)
        return kept / (1 - self.p) if self.p < 1 else kept


class Weights:
    """Attention weights of some queries of one head.

    Args:
        q_CK: queries.
        k_MK: keys of the head.
        token_C: positions of the queries.
        mask_CM: boolean or additive mask; None for none.
    """

    def __init__(
        self,
        q_CK: Tensor,
        k_MK: Tensor,
        token_C: Tensor,
        mask_CM: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> None:
        logits_CM = (q_CK @ k_MK.t()) * scale
        if mask_CM is not None and mask_CM.dtype == torch.bool:
            logits_CM = logits_CM.masked_fill(~mask_CM, -math.inf)
        elif mask_CM is not None:
            logits_CM = logits_CM + mask_CM
        if is_causal:
            key_M = torch.arange(k_MK.shape[0], device=k_MK.device)
            logits_CM = logits_CM.masked_fill(key_M > token_C.unsqueeze(1), -math.inf)
        self.weight_CM = logits_CM.softmax(dim=-1)
        if mask_CM is not None:
            # A query without keys gives zero, as in PyTorch's attention.
            blind_C1 = logits_CM.amax(dim=-1, keepdim=True) == -math.inf
            self.weight_CM = self.weight_CM.masked_fill(blind_C1, 0.0)
        self.kept_CM: Tensor | float = 1.0

    def output(self, v_MK: Tensor) -> Tensor:
        """Weighted values (C, K)."""
        return (self.weight_CM * self.kept_CM) @ v_MK

    def differentiate(self, grad_CK: Tensor, v_MK: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the logits (C, M) and of the values (M, K)."""
        dv_MK = (self.weight_CM * self.kept_CM).t() @ grad_CK
        dweight_CM = self.weight_CM * (grad_CK @ v_MK.t() * self.kept_CM)
        return dweight_CM - self.weight_CM * dweight_CM.sum(dim=-1, keepdim=True), dv_MK


def forward(
    q_BNEK: Tensor,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: Dropout,
    y_BNHK: Tensor,
) -> None:
    """Write the selected rows of the outputs, the last E heads.

    Args:
        y_BNHK: contiguous.
    """
    q_TEK, y_THK = q_BNEK.flatten(0, 1), y_BNHK.flatten(0, 1)
    for block in pairs.blocks():
        q = pairs.take(q_TEK, block)
        y = torch.empty_like(q)
        for rows, _, v_MK, weights in _pieces(
            q, block, keys, pairs, mask_BENM, is_causal, scale, dropout
        ):
            y[0, 0, rows] = weights.output(v_MK).to(y.dtype)
        pairs.put(y_THK, block, y)


def backward(
    grad_BNHK: Tensor,
    q_BNEK: Tensor,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: Dropout,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries (B, N, E, K), keys and values (B, G, M, K), and mask (or nothing)."""
    sums, dmask = Gradients(q_BNEK, pairs, keys), None
    if mask_gradient and mask_BENM is not None:
        dmask = torch.zeros_like(mask_BENM, dtype=accumulator(mask_BENM.dtype))
    q_TEK, grad_THK = q_BNEK.flatten(0, 1), grad_BNHK.flatten(0, 1)
    for block in pairs.blocks():
        q, grad = pairs.take(q_TEK, block), pairs.take(grad_THK, block)
        dq = torch.empty_like(q, dtype=accumulator(q.dtype))
        for rows, k_MK, v_MK, weights in _pieces(
            q, block, keys, pairs, mask_BENM, is_causal, scale, dropout
        ):
            dlogits_CM, dv_MK = weights.differentiate(grad[0, 0, rows].to(dq.dtype), v_MK)
            dq[0, 0, rows] = dlogits_CM @ k_MK * scale
            dk_MK = dlogits_CM.t() @ q[0, 0, rows].to(dq.dtype) * scale
            sums.add_keys(block, dk_MK[None, None], dv_MK[None, None])
            if dmask is not None:
                B, E, N, _ = dmask.shape
                token_C = pairs.token_R[block.rows][rows] % N
                dmask_NM = dmask[block.sample % B, block.head % E]
                dmask_NM.index_add_(0, token_C, dlogits_CM.to(dmask.dtype))
        sums.put_queries(block, dq)
    if dmask is None or mask_BENM is None:
        return *sums.finish(), q_BNEK.new_empty(0)
    return *sums.finish(), dmask.to(mask_BENM.dtype)


def _pieces(
    q: Tensor,
    block: Block,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: Dropout,
) -> Iterator[tuple[slice, Tensor, Tensor, Weights]]:
    """Rows, keys, values and attention weights of each piece of a block of one sample."""
    dtype = accumulator(q.dtype)
    k_MK, v_MK = (x[0, 0].to(dtype) for x in keys.take(block))
    for start in range(0, q.shape[2], PIECE):
        rows = slice(start, min(start + PIECE, q.shape[2]))
        token_C, mask_CM = pairs.token_R[block.rows][rows], None
        if mask_BENM is not None:
            B, E, N, _ = mask_BENM.shape
            mask_CM = mask_BENM[block.sample % B, block.head % E]
            mask_CM = mask_CM if N == 1 else mask_CM[token_C]
        weights = Weights(q[0, 0, rows].to(dtype), k_MK, token_C, mask_CM, is_causal, scale)
        weights.kept_CM = dropout.scale_of(weights.weight_CM, block.rows.start + start)
        yield rows, k_MK, v_MK, weights
