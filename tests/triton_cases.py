"""The Triton kernels against PyTorch's attention, on a CPU through Triton's interpreter.

Run by ``test_sparse_gpu.py`` in a process of its own: Triton reads TRITON_INTERPRET when it is
imported, which torch.compile may have done before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moh.heads import sparse_triton

# tokens, keys, heads, key heads, shared, top_k, width, kind of mask
CASES = [
    (70, 70, 6, 3, 1, 2, 8, "causal"),
    (70, 40, 4, 2, 2, 2, 20, "causal"),
    (35, 45, 6, 2, 2, 2, 20, "boolean"),
    (33, 33, 3, 3, 0, 2, 32, "bias"),
    (1, 50, 4, 2, 0, 2, 16, "none"),
    (40, 40, 3, 3, 1, 2, 16, "padded causal"),
]


def mask_of(kind: str, heads: int, tokens: int, keys: int) -> torch.Tensor | None:
    if kind == "boolean":
        return torch.rand(1, 1, tokens, keys) > 0.3
    if kind == "bias":
        return torch.randn(1, heads, 1, keys)
    if kind == "padded causal":
        seen = torch.ones(2, 1, tokens, keys, dtype=torch.bool).tril()
        seen[1, :, :, :9] = False  # the first queries of this sample see no key
        return seen
    return None


def check(tokens, keys, heads, key_heads, shared, top_k, width, kind, dtype, tolerance) -> None:
    B, E, group = 2, heads - shared, heads // key_heads
    q = torch.randn(B, tokens, heads, width).to(dtype).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(B, key_heads, keys, width).to(dtype).requires_grad_() for _ in range(2))
    index = torch.rand(B, tokens, E).topk(top_k, dim=-1).indices
    selected = torch.zeros(B, tokens, E, dtype=torch.bool).scatter(-1, index, True)
    mask, causal, scale = mask_of(kind, heads, tokens, keys), kind == "causal", 0.4
    grad = torch.randn(B, tokens, heads, width).to(dtype)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=group > 1
    ).transpose(1, 2)
    active = F.pad(selected, (shared, 0), value=False).unsqueeze(-1)
    expected = torch.autograd.grad(y, (q, k, v), grad * active)

    routed = [q[:, shared:].transpose(1, 2), k[:, shared // group :], v[:, shared // group :]]
    routed = [x.detach() for x in routed]
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, shared:]
    ours, lse = torch.zeros(B, tokens, heads, width, dtype=dtype), torch.zeros(B, tokens, E)
    options = (selected, mask, causal, scale, group, shared % group)
    sparse_triton.forward(*routed, *options, ours, lse)
    dq, dk, dv = sparse_triton.backward(grad, ours, lse, *routed, *options)
    for one, other in (
        (ours, y.detach() * active),
        (dq, expected[0][:, shared:].transpose(1, 2)),
        (dk, expected[1][:, shared // group :]),
        (dv, expected[2][:, shared // group :]),
    ):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    torch.manual_seed(0)
    for case in CASES:
        check(*case, torch.float32, 1e-5)
        print(*case, flush=True)
    check(*CASES[0], torch.float16, 2e-2)
