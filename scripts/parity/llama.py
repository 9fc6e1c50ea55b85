"""Parity of the LLaMA family with the authors' MoH-LLaMA3 inference code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moh.backbones.llama import MoHLlamaForCausalLM
from moh.backbones.published.llama import config_from_published, from_published, to_published

PREFILL = 5  # tokens in the reference's first cached call; then one at a time
HEADS = ("shared_heads", "routed_active_heads")


def check(case: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Rebuild a case and compute every tensor it expects.

    Args:
        case: what to build, the file's own description.
        tensors: ``weights/``, inputs and expected tensors by name.

    Yields:
        Name, expected tensor, ours.

    Raises:
        ValueError: an expected tensor that this family does not have, or a weight that the model
            does not have or lacks.
    """
    prefix = "weights/"
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    model = _build(case, weights)
    ids = tensors["input/ids"]
    inputs = {"input/ids", "padded/attention_mask", "padded/position_ids"}
    grads: dict[str, Tensor] | None = None
    for name, expected in tensors.items():
        if name.startswith(prefix) or name in inputs:
            continue
        if name == "output/logits":
            yield name, expected, _logits(model, ids)
        elif name == "padded/logits":
            mask = tensors["padded/attention_mask"]
            ours = _logits(
                model, ids, attention_mask=mask, position_ids=tensors["padded/position_ids"]
            )
            yield name, expected[mask.bool()], ours[mask.bool()]
        elif name == "cached/logits":
            yield name, expected, _cached_logits(model, ids)
        elif name.startswith("train/"):
            grads = grads or _train(model, ids)
            key = name.removeprefix("train/")
            if key not in grads:
                raise ValueError(f"expected tensor {name} is of no parameter of the model")
            yield name, expected, grads[key].reshape(expected.shape)
        else:
            raise ValueError(f"expected tensor {name} is unknown to the llama family")


def _build(case: dict[str, Any], weights: dict[str, Tensor]) -> MoHLlamaForCausalLM:
    described = ("family", "model", "note", "layer", *HEADS)
    config = config_from_published(
        {key: value for key, value in case.items() if key not in described},
        *(case.get(key) for key in HEADS),
    )
    # The reference has no straight-through term.
    config.router = {**(config.router or {}), "straight_through": False}
    model = MoHLlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(from_published(weights), strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"weights missing: {missing}; unexpected: {unexpected}")
    back = to_published(model.state_dict())
    assert all(torch.equal(back[name], value) for name, value in weights.items() if name in back)
    return model


@torch.no_grad()
def _logits(model: MoHLlamaForCausalLM, ids: Tensor, **kwargs: Tensor) -> Tensor:
    return model.eval()(ids, **kwargs).logits


@torch.no_grad()
def _cached_logits(model: MoHLlamaForCausalLM, ids: Tensor) -> Tensor:
    model.eval()
    pieces, cache = [], None
    steps = [ids[:, n : n + 1] for n in range(PREFILL, ids.shape[1])]
    for piece in (ids[:, :PREFILL], *steps):
        out = model(piece, cache=cache, use_cache=True)
        pieces.append(out.logits)
        cache = out.cache
    return torch.cat(pieces, dim=1)


def _train(model: MoHLlamaForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """``loss`` and ``grad/NAME`` of one training step."""
    model.train()
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {f"grad/{k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}
