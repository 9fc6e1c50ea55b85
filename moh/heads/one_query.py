"""One query a sample, with cached keys: a step of generation.

The active heads of a sample are a few runs of neighbours, whose queries, keys and values are
slices. Nothing is gathered, and the keys of other heads are not read, which is what a step costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from moh.heads.slots import Load


def attend_once(
    q_BH1K: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    load: Load,
    attn_mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention of the active heads, before their gates, without gradients.

    Args:
        k_BGMK: each key head serves ``H / G`` heads in a row; likewise the values.
        load: of the routed heads, which are the last.
        attn_mask: as in ``F.scaled_dot_product_attention``, likewise ``scale``.

    Returns:
        (B, 1, H, K); zero for a head that is not active.
    """
    B, H, _, K = q_BH1K.shape
    E, group = load.num_heads, H // k_BGMK.shape[1]
    y_B1HK = q_BH1K.new_zeros((B, 1, H, K))
    mask_BH1M = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    for sample in range(B):
        routed = [count > 0 for count in load.counts[sample * E : (sample + 1) * E]]
        one = slice(sample, sample + 1)
        runs = _runs([True] * (H - E) + routed, group)
        for heads in _paired(runs) if group == 1 else runs:
            keys = heads
            if group > 1:
                keys = slice(heads.start // group, heads.start // group + 1)
            y = F.scaled_dot_product_attention(
                q_BH1K[one, heads],
                k_BGMK[one, keys],
                v_BGMK[one, keys],
                attn_mask=None if mask_BH1M is None else _part(mask_BH1M, one, heads),
                scale=scale,
                enable_gqa=group > 1,
            )
            y_B1HK[one, :, heads] = y.transpose(1, 2)
    return y_B1HK


def _runs(active: Sequence[bool], group: int) -> Iterator[slice]:
    """Neighbours that are active, of one key head where several share it."""
    first = None
    for head, is_active in enumerate([*active, False]):
        ends = not is_active or (group > 1 and head % group == 0)
        if first is not None and ends:
            yield slice(first, head)
            first = None
        if is_active and first is None:
            first = head


def _paired(runs: Iterable[slice]) -> Iterator[slice]:
    """The same heads, two that stand alone as one slice with a step: the kernel deals out heads."""
    alone = None
    for heads in runs:
        if heads.stop - heads.start > 1:
            yield heads
        elif alone is None:
            alone = heads.start
        else:
            yield slice(alone, heads.stop, heads.start - alone)
            alone = None
    if alone is not None:
        yield slice(alone, alone + 1)


def _part(mask_BH1M: Tensor, sample: slice, heads: slice) -> Tensor:
    """Of a mask whose first two dimensions may be 1."""
    B, H = mask_BH1M.shape[:2]
    return mask_BH1M[sample if B > 1 else slice(None), heads if H > 1 else slice(None)]
