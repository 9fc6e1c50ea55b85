"""What a state dict is of: its family, and how many heads each layer shares and routes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_ROUTER = re.compile(r"(?P<layer>.+)\.(?P<part>wg|wg_0|wg_1|router\.(routed|stage|shared))\.weight")
_PARTS = {"wg": "routed", "wg_0": "stage", "wg_1": "shared"}


def family_of(state: Mapping[str, Tensor]) -> str:
    """``llama``, ``dit``, or ``timm`` for anything else; published names or ours."""
    if "model.embed_tokens.weight" in state:
        return "llama"
    if "final_layer.linear.weight" in state and "pos_embed" in state:
        return "dit"
    return "timm"


def heads_of(state: Mapping[str, Tensor]) -> list[str]:
    """Heads as the router weights show them, in words, a line a run of equal layers.

    How many routed heads a token selects (``top_k``) is in no tensor.
    """
    layers: dict[str, dict[str, int]] = {}
    for name, value in state.items():
        if match := _ROUTER.fullmatch(name):
            part = _PARTS.get(match["part"], match["part"].removeprefix("router."))
            layers.setdefault(match["layer"], {})[part] = len(value)
    runs: list[tuple[str, int]] = []
    for parts in layers.values():
        # A single shared head needs no weight; the stage's weight says that it is there.
        shared = parts.get("shared", int("stage" in parts))
        text = f"{shared} shared, {parts.get('routed', 0)} routed"
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return [f"{count} x ({text})" for text, count in runs]
