"""One query a sample, with cached keys: a step of generation.

The active heads of all samples are a few runs of neighbours, whose queries, keys and values are
slices. Nothing is gathered, and the keys of other heads are not read, which is what a step costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    Heads that share a key head are its queries: of one that is active all are computed, since
    they cost nothing beside reading the keys.

    Args:
        k_BGMK: each key head serves ``H / G`` heads in a row; likewise the values.
        load: of the routed heads, which are the last.
        attn_mask: as in ``F.scaled_dot_product_attention``, likewise ``scale``.

    Returns:
        (B, 1, H, K); zero for a head that is not active and shares its key head with none.
    """
    (B, H, _, K), (_, G, M, _) = q_BH1K.shape, k_BGMK.shape
    E, group = load.num_heads, H // G
    counts, shared = load.counts, [True] * (H - E)
    active = [head for b in range(B) for head in [*shared, *map(bool, counts[b * E : (b + 1) * E])]]
    if group > 1:
        active = [any(active[i : i + group]) for i in range(0, B * H, group)]
    mask = None if attn_mask is None else _of_key_heads(attn_mask, group)
    # Samples whose heads follow each other in memory are one sample with more heads.
    folds = _folds(k_BGMK) and _folds(v_BGMK) and (mask is None or mask.shape[:2] == (1, 1))
    samples = 1 if folds else B
    heads = B * G // samples
    q = q_BH1K.reshape(samples, heads, group, K)
    k, v = k_BGMK.view(samples, heads, M, -1), v_BGMK.view(samples, heads, M, -1)
    y = q.new_zeros((samples, heads, group, v.shape[-1]))
    for i in range(samples):
        one = slice(i, i + 1)
        q_i, k_i, v_i, y_i = (x[one] if samples > 1 else x for x in (q, k, v, y))
        mask_i = mask[one] if mask is not None and len(mask) > 1 else mask
        for part in _parts(active[i * heads : (i + 1) * heads]):
            y_i[:, part] = F.scaled_dot_product_attention(
                q_i[:, part],
                k_i[:, part],
                v_i[:, part],
                attn_mask=mask_i if mask_i is None or mask_i.shape[1] == 1 else mask_i[:, part],
                scale=scale,
            )
    return y.view(B, 1, H, -1)


def _of_key_heads(mask: Tensor, group: int) -> Tensor:
    """A mask of one query of each head as one of ``group`` queries of each key head."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask if group == 1 or mask.shape[1] == 1 else mask.unflatten(1, (-1, group)).squeeze(3)


def _folds(x_BGMK: Tensor) -> bool:
    B, G = x_BGMK.shape[:2]
    return B == 1 or x_BGMK.stride(0) == G * x_BGMK.stride(1)


def _parts(active: Sequence[bool]) -> Iterator[slice]:
    """The active heads as slices, an even number in each: the kernel deals heads out to threads.

    One that stands alone, or is left over from a run of neighbours, makes a slice with a step
    together with the next such one.
    """
    if all(active):
        yield slice(0, len(active))
        return
    first = alone = None
    for head, is_active in enumerate([*active, False]):
        if is_active:
            first = head if first is None else first
            continue
        if first is not None:
            stop = head
            if (stop - first) % 2:
                stop -= 1
                if alone is None:
                    alone = stop
                else:
                    yield slice(alone, stop + 1, stop - alone)
                    alone = None
            if stop > first:
                yield slice(first, stop)
            first = None
    if alone is not None:
        yield slice(alone, alone + 1)
