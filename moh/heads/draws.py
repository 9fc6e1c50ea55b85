"""Random numbers that belong to a token, never to a batch: what the random control selects by.

A control that selects heads at random must still give the same score whatever the batch size, on
any number of processes, and after a stop. So its numbers are not drawn from a stream but computed
from keys: of the sample (its number, or the text before the token), the token and the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = -0x61C8864680B583EB  # 2**64 over the golden ratio, as a signed number
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFTS = (30, 27, 31)


def combine(*parts: int | Tensor) -> Tensor:
    """A key from any integers: equal parts give equal keys, others keys that look independent.

    Args:
        parts: numbers and int64 tensors (on one device), broadcast against each other.

    Returns:
        int64, of the broadcast shape.
    """
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        if isinstance(part, Tensor):
            key = key.to(part.device)
        key = _mix(key + part + _STEP)
    return key


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; integer products wrap, right shifts must not copy the sign."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def draw(keys: Tensor, batch: int, tokens: int, heads: int) -> Tensor:
    """Random numbers for each token and head, int64 (batch, tokens, heads).

    Args:
        keys: (B,), a key a sample, or (B, N), a key a token. A batch that is a multiple of B
            repeats them: guidance evaluates each sample twice.

    Raises:
        ValueError: keys of another batch.
    """
    device = keys.device
    key_BN = keys
    if keys.dim() == 1:
        key_BN = combine(keys[:, None], torch.arange(tokens, device=device))
    if batch % len(key_BN) or key_BN.shape[1] != tokens:
        raise ValueError(
            f"draws of {len(key_BN)} samples of {key_BN.shape[1]} tokens for a batch of {batch} "
            f"samples of {tokens}: call set_draws before each forward pass, or with None"
        )
    key_BN = key_BN.repeat(batch // len(key_BN), 1)
    return combine(key_BN[:, :, None], torch.arange(heads, device=device))
