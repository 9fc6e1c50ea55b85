"""Weights and config of the published MoH-LLaMA3: plain LLaMA, and a fixed choice of heads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moh.backbones.llama import MoHLlamaConfig
from moh.heads import HeadPlan

_LAYER = (
    r"(self_attn\.[qkvo]_proj\.(weight|bias)|mlp\.(gate|up|down)_proj\.(weight|bias)|"
    r"(input|post_attention)_layernorm\.weight)"
)
_LLAMA = re.compile(
    rf"lm_head\.weight|model\.(embed_tokens|norm)\.weight|model\.layers\.\d+\.{_LAYER}"
)
_ROUTER = re.compile(r"model\.layers\.\d+\.self_attn\.router\.")
# A table of frequencies that older LLaMA files store and that is computed today.
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published MoH-LLaMA3 weights under the names of :class:`moh.backbones.llama`.

    The router has no parameters, so these are plain LLaMA's names and stay as they are, and so do
    learned routers of ours.

    Raises:
        ValueError: a name that is neither.
    """
    kept = {name: value for name, value in state.items() if not _COMPUTED.match(name)}
    _checked({name: value for name, value in kept.items() if not _ROUTER.match(name)})
    return kept


def to_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of :func:`from_published`.

    Raises:
        ValueError: a name that is not LLaMA's; router weights have no place in this format.
    """
    return _checked(dict(state))


def _checked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    foreign = [name for name in state if not _LLAMA.fullmatch(name)]
    if foreign:
        raise ValueError(f"not names of a LLaMA: {', '.join(foreign)}")
    return state


def config_from_published(
    config: Mapping[str, Any],
    num_shared: int | Sequence[int] | None = None,
    top_k: int | Sequence[int] | None = None,
) -> MoHLlamaConfig:
    """The config of a published continue-tuned model, with the heads its inference code fixes.

    Args:
        config: the published ``config.json`` as a dict.
        num_shared: shared heads, one number or one a layer; default half of the heads, the first
            of each layer.
        top_k: routed heads that a token selects; default a quarter of the heads.

    Raises:
        ValueError: heads that do not make a plan.
    """
    # auto_map names code that would be executed from the published folder.
    known = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    moh = MoHLlamaConfig(**known)
    heads, depth = moh.num_attention_heads, moh.num_hidden_layers
    plan = HeadPlan.from_groups(
        [1] * depth,
        [heads] * depth,
        [moh.head_dim] * depth,
        _per_layer(heads // 2 if num_shared is None else num_shared, depth),
        _per_layer(heads // 4 if top_k is None else top_k, depth),
    )
    moh.head_plan, moh.router = plan.to_dict(), {"kind": "query_norm"}
    return moh


def _per_layer(value: int | Sequence[int], depth: int) -> list[int]:
    return [value] * depth if isinstance(value, int) else list(value)
