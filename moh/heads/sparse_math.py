"""Sparse execution anywhere: matrix products and a softmax, block by block of queries.

For what no fused kernel does: dropout of attention weights, a bias that needs its gradient,
devices without a kernel of their own. The backward pass computes each block again; dropout draws
from a seed, so that both passes drop the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moh.heads.pairs import KeyHeads, Pairs, Span, accumulator

ROWS = 256  # queries in a block


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


class Block:
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


def _blocks(
    q_RK: Tensor,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: Dropout,
) -> Iterator[tuple[Span, slice, Tensor, Tensor, Tensor, Block]]:
    """Span, rows, queries, keys, values and attention weights of each block."""
    dtype = accumulator(q_RK.dtype)
    for span in pairs.spans():
        k_MK, v_MK = (x[0, 0].to(dtype) for x in keys.take([span]))
        for start in range(span.start, span.end, ROWS):
            rows = slice(start, min(start + ROWS, span.end))
            token_C, q_CK = pairs.token_R[rows], q_RK[rows].to(dtype)
            mask_CM = _mask_of(mask_BENM, span, token_C)
            block = Block(q_CK, k_MK, token_C, mask_CM, is_causal, scale)
            block.kept_CM = dropout.scale_of(block.weight_CM, start)
            yield span, rows, q_CK, k_MK, v_MK, block


def forward(
    q_BNEK: Tensor,
    keys: KeyHeads,
    pairs: Pairs,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: Dropout,
) -> Tensor:
    """Head outputs (B, N, E, K), zero where nothing was selected."""
    q_RK = pairs.gather(q_BNEK)
    y_RK = torch.empty_like(q_RK)
    for _, rows, _, _, v_MK, block in _blocks(
        q_RK, keys, pairs, mask_BENM, is_causal, scale, dropout
    ):
        y_RK[rows] = block.output(v_MK).to(y_RK.dtype)
    return pairs.scatter(y_RK)


def backward(
    grad_BNEK: Tensor,
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
    grad_RK, q_RK = pairs.gather(grad_BNEK), pairs.gather(q_BNEK)
    dq_RK = torch.empty_like(q_RK)
    dk_BGMK, dv_BGMK = _zeros(keys.k_BGMK), _zeros(keys.v_BGMK)
    dmask = _zeros(mask_BENM) if mask_gradient and mask_BENM is not None else None
    for span, rows, q_CK, k_MK, v_MK, block in _blocks(
        q_RK, keys, pairs, mask_BENM, is_causal, scale, dropout
    ):
        dlogits_CM, dv_MK = block.differentiate(grad_RK[rows].to(q_CK.dtype), v_MK)
        dq_RK[rows] = (dlogits_CM @ k_MK * scale).to(dq_RK.dtype)
        head = keys.of(span.head)
        dk_BGMK[span.sample, head] += dlogits_CM.t() @ q_CK * scale
        dv_BGMK[span.sample, head] += dv_MK
        if dmask is not None:
            samples, heads, queries, _ = dmask.shape
            dmask_NM = dmask[span.sample % samples, span.head % heads]
            dmask_NM.index_add_(0, pairs.token_R[rows] % queries, dlogits_CM.to(dmask.dtype))
    grads = pairs.scatter(dq_RK), dk_BGMK.to(q_RK.dtype), dv_BGMK.to(q_RK.dtype)
    if dmask is None or mask_BENM is None:
        return *grads, q_RK.new_empty(0)
    return *grads, dmask.to(mask_BENM.dtype)


def _zeros(x: Tensor) -> Tensor:
    """Where a gradient of ``x`` is summed up."""
    return torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device)


def _mask_of(mask_BENM: Tensor | None, span: Span, token_C: Tensor) -> Tensor | None:
    """Mask of some queries of one head, (C, M) or (1, M)."""
    if mask_BENM is None:
        return None
    samples, heads, queries, _ = mask_BENM.shape
    mask_NM = mask_BENM[span.sample % samples, span.head % heads]
    return mask_NM if queries == 1 else mask_NM[token_C]
