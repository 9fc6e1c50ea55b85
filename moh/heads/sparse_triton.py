"""Sparse execution on a GPU: attention kernels that read the selected queries where they lie.

Nothing is gathered, no shape depends on the selection, and the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from moh.heads.triton_kernels import forward_kernel, key_kernel, query_kernel

NO_MASK, BOOLEAN, ADDITIVE = 0, 1, 2


class Order:
    """The selected queries of each head, by place.

    Args:
        selected_BNE: whether each routed head is active.

    Attributes:
        token_BEN: position of the i-th selected query of each head; beyond the count, anything.
        count_BE: selected queries of each head.
        before_BEN: how many of them lie before each position.
    """

    def __init__(self, selected_BNE: Tensor) -> None:
        selected_BEN = selected_BNE.transpose(1, 2)
        N = selected_BEN.shape[2]
        upto_BEN = selected_BEN.cumsum(dim=2)
        self.count_BE = upto_BEN[:, :, -1].int().contiguous()
        self.before_BEN = (upto_BEN - selected_BEN.long()).int().contiguous()
        place_BEN = torch.where(selected_BEN, upto_BEN - 1, N)
        position_N = torch.arange(N, device=selected_BNE.device, dtype=torch.int32)
        token = position_N.new_zeros((*selected_BEN.shape[:2], N + 1))
        token.scatter_(2, place_BEN, position_N.expand_as(place_BEN))
        self.token_BEN = token[:, :, :N].contiguous()


def forward(
    q_BNEK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    selected_BNE: Tensor,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    group: int,
    offset: int,
    y_BNHK: Tensor,
    lse_BNE: Tensor,
) -> None:
    """Write the selected rows of the outputs (the last E heads) and of the log-sum-exps."""
    B, N, E, _ = q_BNEK.shape
    q, k, v = _last_contiguous(q_BNEK, k_BGMK, v_BGMK)
    order, mask = Order(selected_BNE), _mask(mask_BENM, (B, E, N, k.shape[2]), q)
    sizes = _sizes(q, is_causal, mask[0])
    forward_kernel[(triton.cdiv(N, sizes["BLOCK_N"]), B * E)](
        q, k, v, mask[1], y_BNHK, lse_BNE, order.token_BEN, order.count_BE,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask[2], *y_BNHK.stride()[:3],
        N, k.shape[2], E, group, offset, y_BNHK.shape[2] - E, scale, **sizes,
    )  # fmt: skip


def backward(
    grad_BNHK: Tensor,
    y_BNHK: Tensor,
    lse_BNE: Tensor,
    q_BNEK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    selected_BNE: Tensor,
    mask_BENM: Tensor | None,
    is_causal: bool,
    scale: float,
    group: int,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries (B, N, E, K), the keys and the values (B, G, M, K)."""
    B, N, E, _ = q_BNEK.shape
    _, G, M, _ = k_BGMK.shape
    grad, q, k, v = _last_contiguous(grad_BNHK, q_BNEK, k_BGMK, v_BGMK)
    S = grad.shape[2] - E
    delta_BNE = (grad[:, :, S:].float() * y_BNHK[:, :, S:].float()).sum(dim=-1)
    order, mask = Order(selected_BNE), _mask(mask_BENM, (B, E, N, M), q)
    sizes = _sizes(q, is_causal, mask[0])
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    strides = [size for x in (grad, q, k, v) for size in x.stride()[:3]] + mask[2]
    shape = (N, M, E)
    query_kernel[(triton.cdiv(N, sizes["BLOCK_N"]), B * E)](
        grad, q, k, v, mask[1], lse_BNE, delta_BNE, dq, order.token_BEN, order.count_BE,
        *strides, *shape, group, offset, S, scale, **sizes,
    )  # fmt: skip
    key_kernel[(triton.cdiv(M, sizes["BLOCK_M"]), B * G)](
        grad, q, k, v, mask[1], lse_BNE, delta_BNE, dk, dv,
        order.token_BEN, order.count_BE, order.before_BEN,
        *strides, *shape, G, group, offset, S, scale, **sizes,
    )  # fmt: skip
    return dq, dk, dv


def _last_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _mask(
    mask_BENM: Tensor | None, shape: tuple[int, ...], anything: Tensor
) -> tuple[int, Tensor, list[int]]:
    """Kind, data and strides of a mask; broadcast dimensions have stride 0."""
    if mask_BENM is None:
        return NO_MASK, anything, [0, 0, 0, 0]
    mask = mask_BENM.expand(shape)
    if mask.dtype == torch.bool:
        return BOOLEAN, mask.view(torch.uint8), list(mask.stride())
    return ADDITIVE, mask, list(mask.stride())


def _sizes(q: Tensor, is_causal: bool, mask: int) -> dict[str, Any]:
    """Compile-time constants of all kernels."""
    K = q.shape[-1]
    block_k = max(16, triton.next_power_of_2(K))
    # What fits in the shared memory of every GPU since 2020.
    bytes_of_row = block_k * q.element_size()
    block = 64 if q.element_size() == 2 and block_k <= 128 else 32 if bytes_of_row <= 256 else 16
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {
        "K": K,
        "BLOCK_K": block_k,
        "BLOCK_N": block,
        "BLOCK_M": block,
        "CAUSAL": is_causal,
        "MASK": mask,
        "PRECISION": "tf32" if tf32 else "ieee",
    }
