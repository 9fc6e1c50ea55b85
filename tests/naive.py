"""Mixture-of-Head attention by its definition: one token and one head at a time.

Independent of ``moh``: plain loops over the equations, in the dtype of the input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax(logits: list[Tensor]) -> list[Tensor]:
    largest = max(float(logit.detach()) for logit in logits)
    exps = [torch.exp(logit - largest) for logit in logits]
    total = sum(exps[1:], exps[0])
    return [e / total for e in exps]


def two_stage_gates(
    x_D: Tensor,
    num_shared: int,
    num_routed: int,
    top_k: int,
    w_routed: Tensor | None,
    w_stage: Tensor | None,
    w_shared: Tensor | None,
    scale: str,
) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """Gates of one token, its routed probabilities and selections."""
    one = torch.ones((), dtype=x_D.dtype)
    shared = [one] * num_shared
    if num_shared > 1:
        shared = softmax([w_shared[i] @ x_D for i in range(num_shared)])
        if scale == "released":
            shared = [num_shared * g for g in shared]
    probs: list[Tensor] = []
    selected: list[bool] = []
    routed: list[Tensor] = []
    if num_routed:
        probs = softmax([w_routed[i] @ x_D for i in range(num_routed)])
        order = sorted(range(num_routed), key=lambda i: -float(probs[i].detach()))
        chosen = set(order[:top_k])
        selected = [i in chosen for i in range(num_routed)]
        total = sum((probs[i] for i in order[1:top_k]), probs[order[0]])
        for i in range(num_routed):
            if not selected[i]:
                routed.append(0 * one)
            elif scale == "released":
                routed.append(top_k * probs[i] / total)
            else:
                routed.append(probs[i])
    if num_shared and num_routed and w_stage is not None:
        a = softmax([w_stage[0] @ x_D, w_stage[1] @ x_D])
        if scale == "released":
            a = [2 * value for value in a]
        shared = [a[0] * g for g in shared]
        routed = [a[1] * g for g in routed]
    return shared + routed, probs, selected


def query_norm_gates(
    q_HK: Tensor, num_shared: int, top_k: int, straight_through: bool
) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """Gates of one token by the norms of its queries."""
    one = torch.ones((), dtype=q_HK.dtype)
    norms = [torch.sqrt((q_HK[i] ** 2).sum()) for i in range(num_shared, q_HK.shape[0])]
    mean = sum(norms[1:], norms[0]) / len(norms)
    variance = sum((n - mean) ** 2 for n in norms) / (len(norms) - 1)
    probs = softmax([n / torch.sqrt(variance) for n in norms])
    order = sorted(range(len(norms)), key=lambda i: -float(norms[i].detach()))
    selected = [i in order[:top_k] for i in range(len(norms))]
    routed = []
    for prob, chosen in zip(probs, selected, strict=True):
        hard = one if chosen else 0 * one
        soft = prob - prob.detach() if straight_through and chosen else 0
        routed.append(hard + soft)
    return [one] * num_shared + routed, probs, selected


def balance_loss(probs: list[list[Tensor]], selected: list[list[bool]], scale: str) -> Tensor:
    """``E * sum_i P_i f_i`` over a flat list of tokens; without E for ``paper``."""
    tokens, experts = len(probs), len(probs[0])
    loss = torch.zeros((), dtype=probs[0][0].dtype)
    for i in range(experts):
        mean_prob = sum((p[i] for p in probs[1:]), probs[0][i]) / tokens
        share = sum(s[i] for s in selected) / tokens
        loss = loss + mean_prob * share
    return loss * (experts if scale == "released" else 1)


def attention(q_HNK: Tensor, k_HMK: Tensor, v_HMK: Tensor, gates: list[list[Tensor]]) -> Tensor:
    """Gated head outputs of one sample, (N, H, K)."""
    heads, tokens, width = q_HNK.shape
    keys = range(k_HMK.shape[1])
    rows = []
    for n in range(tokens):
        outputs = []
        for h in range(heads):
            weights = softmax([q_HNK[h, n] @ k_HMK[h, m] / math.sqrt(width) for m in keys])
            mixed = sum(
                (w * v_HMK[h, m] for m, w in enumerate(weights)), torch.zeros_like(v_HMK[h, 0])
            )
            outputs.append(gates[n][h] * mixed)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)
