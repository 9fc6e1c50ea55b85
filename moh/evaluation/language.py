"""Language models: bits per byte of held-out text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.data.text import Tokens


@torch.inference_mode()
def bits_per_byte(
    model: nn.Module,
    tokens: Tokens,
    num_bytes: int,
    seq_len: int,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> float:
    """Bits that a model needs for each byte of a text.

    Windows of ``seq_len`` tokens begin every ``stride`` tokens, and each scores the tokens that
    no earlier one scored. So every token but the first counts once, and has at least
    ``seq_len - stride`` tokens of context (those of the first window all that there are).

    Args:
        model: transformers causal language model.
        tokens: (T,), see :func:`moh.data.text.encode_documents`. Its first token is the boundary
            before the first document, which is nobody's to predict.
        num_bytes: UTF-8 bytes of the text behind the tokens.
        seq_len: tokens.
        stride: tokens; default half of ``seq_len``.
        batch_size: windows computed together.
        progress: called with the windows that are done and all of them.

    Raises:
        ValueError: a stride that would leave tokens out, or fewer than two tokens.
    """
    total = len(tokens)
    if stride is None:
        stride = max(1, seq_len // 2)
    if total < 2 or not 0 < stride < seq_len:
        raise ValueError(
            f"bits per byte of {total} tokens with seq_len {seq_len} and stride {stride}: "
            "needs two tokens and a stride below seq_len"
        )
    seq_len = min(seq_len, total)
    starts = [*range(0, total - seq_len, stride), total - seq_len]
    scored_from = [1, *(start + seq_len for start in starts[:-1])]
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    nats = 0.0
    try:
        for first in range(0, len(starts), batch_size):
            progress(first, len(starts))
            chunk = starts[first : first + batch_size]
            windows = np.stack([tokens[start : start + seq_len] for start in chunk])
            ids_BN = torch.from_numpy(windows.astype(np.int64)).to(device)
            loss_BN = _next_token_loss(model, ids_BN)
            new_from = torch.tensor(scored_from[first : first + batch_size], device=device)
            position_BN = torch.tensor(chunk, device=device)[:, None] + torch.arange(
                1, seq_len, device=device
            )
            nats += float(loss_BN.double()[position_BN >= new_from[:, None]].sum())
    finally:
        model.train(training)
    return float(nats / np.log(2) / num_bytes)


def _next_token_loss(model: nn.Module, ids_BN: Tensor) -> Tensor:
    """Cross entropy in nats of tokens 1 to N-1: float32 (B, N-1)."""
    logits = model(input_ids=ids_BN, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids_BN[:, 1:], reduction="none")


def unigram_bits_per_byte(
    train: Tokens, validation: Tokens, num_bytes: int, vocab_size: int
) -> float:
    """Bits per byte of a model that knows only how frequent each token is.

    Frequencies are of the training tokens, each count plus one; the tokens scored are those that
    :func:`bits_per_byte` scores. A model that has learned anything is below.

    Args:
        num_bytes: UTF-8 bytes of the text behind ``validation``.
    """
    counts = np.bincount(train, minlength=vocab_size)
    return bits_per_byte_of_counts(counts, validation, num_bytes)


def bits_per_byte_of_counts(counts: npt.NDArray[Any], validation: Tokens, num_bytes: int) -> float:
    """:func:`unigram_bits_per_byte` of counts made before: one a token of the vocabulary."""
    bits = -np.log2((counts + 1.0) / (counts + 1.0).sum())
    return float(bits[np.asarray(validation[1:], dtype=np.int64)].sum() / num_bytes)
