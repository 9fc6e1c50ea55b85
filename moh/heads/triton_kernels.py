"""Triton kernels of sparse attention.

Each program takes a block of one routed head's selected queries, in order of position, and the
keys that they see; programs past the last selected query end at once. The backward pass has one
kernel by queries and one by keys.
"""

# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False
# mypy: disallow_untyped_decorators=False
from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
BOOLEAN = tl.constexpr(1)  # kinds of mask: 0 none, 1 boolean, 2 additive


@triton.jit
def _logits(
    q, k_rows, token, key, mask_ptr, mask_n, mask_m, M, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits (queries, keys) in units of log 2; -inf where a query must not look."""
    logits = tl.dot(q, tl.trans(k_rows), input_precision=PRECISION) * (scale * LOG2_E)
    if MASK:
        at = mask_ptr + token[:, None] * mask_n + key[None, :] * mask_m
        mask = tl.load(at, mask=(key < M)[None, :], other=0)
        if MASK == BOOLEAN:
            logits = tl.where(mask != 0, logits, -float("inf"))
        else:
            logits += mask.to(tl.float32) * LOG2_E
    seen = (key < M)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= token[:, None])
    return tl.where(seen, logits, -float("inf"))


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, y_ptr, lse_ptr, token_ptr, count_ptr,
    q_b, q_n, q_e, k_b, k_g, k_m, v_b, v_g, v_m, mask_b, mask_e, mask_n, mask_m,
    y_b, y_n, y_h, N, M, E, group, offset, first_head, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    b, e = (pair // E).to(tl.int64), (pair % E).to(tl.int64)
    count = tl.load(count_ptr + pair)
    start = tl.program_id(0) * BLOCK_N
    if start >= count:
        return
    row = start + tl.arange(0, BLOCK_N)
    valid = row < count
    token = tl.load(token_ptr + pair.to(tl.int64) * N + row, mask=valid, other=0)
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    at_q = q_ptr + b * q_b + e * q_e + token[:, None] * q_n + column[None, :]
    q = tl.load(at_q, mask=valid[:, None] & inside[None, :], other=0.0)
    g = (e + offset) // group
    k_ptr += b * k_b + g * k_g
    v_ptr += b * v_b + g * v_g
    if MASK:
        mask_ptr += b * mask_b + e * mask_e
    largest = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    stop = M
    if CAUSAL:
        stop = tl.minimum(M, tl.max(token) + 1)
    for first in range(0, stop, BLOCK_M):
        key = first + tl.arange(0, BLOCK_M)
        at = (key < M)[:, None] & inside[None, :]
        k = tl.load(k_ptr + key[:, None] * k_m + column[None, :], mask=at, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_m + column[None, :], mask=at, other=0.0)
        logits = _logits(
            q, k, token, key, mask_ptr, mask_n, mask_m, M, scale, CAUSAL, MASK, PRECISION
        )
        new = tl.maximum(largest, tl.max(logits, axis=1))
        # A query that has seen no key yet: -inf less -inf would be no number.
        base = tl.where(new == -float("inf"), 0.0, new)
        weight = tl.exp2(logits - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weight, axis=1)
        sums = sums * decay[:, None]
        sums += tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        largest = new
    blind = total == 0.0
    y = sums / tl.where(blind, 1.0, total)[:, None]
    at_y = y_ptr + b * y_b + token[:, None] * y_n + (e + first_head) * y_h + column[None, :]
    tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])
    # Natural log; +inf makes every weight of a query without keys zero in the backward pass.
    lse = tl.where(blind, float("inf"), (largest + tl.log2(total)) / LOG2_E)
    tl.store(lse_ptr + (b * N + token) * E + e, lse, mask=valid)


@triton.jit
def _weights_and_slopes(
    q, grad, k, v, lse, delta, token, key, mask_ptr, mask_n, mask_m, M, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention weights and gradients of the logits, (queries, keys) each."""
    logits = _logits(q, k, token, key, mask_ptr, mask_n, mask_m, M, scale, CAUSAL, MASK, PRECISION)
    weight = tl.exp2(logits - lse[:, None] * LOG2_E)
    slope = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return weight, weight * (slope - delta[:, None])


@triton.jit
def query_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, lse_ptr, delta_ptr, dq_ptr, token_ptr, count_ptr,
    grad_b, grad_n, grad_h, q_b, q_n, q_e, k_b, k_g, k_m, v_b, v_g, v_m,
    mask_b, mask_e, mask_n, mask_m, N, M, E, group, offset, first_head, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    b, e = (pair // E).to(tl.int64), (pair % E).to(tl.int64)
    count = tl.load(count_ptr + pair)
    start = tl.program_id(0) * BLOCK_N
    if start >= count:
        return
    row = start + tl.arange(0, BLOCK_N)
    valid = row < count
    token = tl.load(token_ptr + pair.to(tl.int64) * N + row, mask=valid, other=0)
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    whole = valid[:, None] & inside[None, :]
    at_q = q_ptr + b * q_b + e * q_e + token[:, None] * q_n + column[None, :]
    q = tl.load(at_q, mask=whole, other=0.0)
    at_grad = grad_ptr + b * grad_b + (e + first_head) * grad_h
    grad = tl.load(at_grad + token[:, None] * grad_n + column[None, :], mask=whole, other=0.0)
    lse = tl.load(lse_ptr + (b * N + token) * E + e, mask=valid, other=float("inf"))
    delta = tl.load(delta_ptr + (b * N + token) * E + e, mask=valid, other=0.0)
    g = (e + offset) // group
    k_ptr += b * k_b + g * k_g
    v_ptr += b * v_b + g * v_g
    if MASK:
        mask_ptr += b * mask_b + e * mask_e
    dq = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    stop = M
    if CAUSAL:
        stop = tl.minimum(M, tl.max(token) + 1)
    for first in range(0, stop, BLOCK_M):
        key = first + tl.arange(0, BLOCK_M)
        at = (key < M)[:, None] & inside[None, :]
        k = tl.load(k_ptr + key[:, None] * k_m + column[None, :], mask=at, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_m + column[None, :], mask=at, other=0.0)
        _, slope = _weights_and_slopes(
            q, grad, k, v, lse, delta, token, key, mask_ptr, mask_n, mask_m, M, scale,
            CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        dq += tl.dot(slope.to(k.dtype), k, input_precision=PRECISION)
    at_dq = dq_ptr + ((b * N + token[:, None]) * E + e) * K + column[None, :]
    tl.store(at_dq, (dq * scale).to(dq_ptr.dtype.element_ty), mask=whole)


@triton.jit
def key_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    token_ptr, count_ptr, before_ptr,
    grad_b, grad_n, grad_h, q_b, q_n, q_e, k_b, k_g, k_m, v_b, v_g, v_m,
    mask_b, mask_e, mask_n, mask_m, N, M, E, G, group, offset, first_head, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, g = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    first = tl.program_id(0) * BLOCK_M
    key = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    at = (key < M)[:, None] & inside[None, :]
    at_k = k_ptr + b * k_b + g * k_g + key[:, None] * k_m + column[None, :]
    at_v = v_ptr + b * v_b + g * v_g + key[:, None] * v_m + column[None, :]
    k, v = tl.load(at_k, mask=at, other=0.0), tl.load(at_v, mask=at, other=0.0)
    dk = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    # The routed heads that this key head serves.
    begin = tl.maximum(g * group - offset, 0)
    end = tl.minimum((g + 1) * group - offset, E)
    for e in range(begin, end):
        pair = b * E + e
        count = tl.load(count_ptr + pair)
        start = 0
        if CAUSAL:
            # Queries before the first of these keys see none of them.
            start = tl.load(before_ptr + pair * N + tl.minimum(first, N - 1))
            if first >= N:
                start = count
        here = mask_ptr
        if MASK:
            here = mask_ptr + b * mask_b + e * mask_e
        for low in range(start, count, BLOCK_N):
            row = low + tl.arange(0, BLOCK_N)
            valid = row < count
            whole = valid[:, None] & inside[None, :]
            token = tl.load(token_ptr + pair * N + row, mask=valid, other=0)
            at_q = q_ptr + b * q_b + e * q_e + token[:, None] * q_n + column[None, :]
            q = tl.load(at_q, mask=whole, other=0.0)
            at_grad = grad_ptr + b * grad_b + (e + first_head) * grad_h + column[None, :]
            grad = tl.load(at_grad + token[:, None] * grad_n, mask=whole, other=0.0)
            lse = tl.load(lse_ptr + (b * N + token) * E + e, mask=valid, other=float("inf"))
            delta = tl.load(delta_ptr + (b * N + token) * E + e, mask=valid, other=0.0)
            weight, slope = _weights_and_slopes(
                q, grad, k, v, lse, delta, token, key, here, mask_n, mask_m, M, scale,
                CAUSAL, MASK, PRECISION,
            )  # fmt: skip
            dv += tl.dot(tl.trans(weight).to(grad.dtype), grad, input_precision=PRECISION)
            dk += tl.dot(tl.trans(slope).to(q.dtype), q, input_precision=PRECISION)
    to = ((b * G + g) * M + key[:, None]) * K + column[None, :]
    tl.store(dk_ptr + to, (dk * scale).to(dk_ptr.dtype.element_ty), mask=at)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=at)
