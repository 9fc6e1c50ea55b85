"""State dicts of DiT and MoH-DiT: the published names and this project's, both ways, exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_ROUTER = {"wg": "routed", "wg_0": "stage", "wg_1": "shared"}
_BLOCK = {
    "adaLN_modulation.1": "norm1.linear",
    "attn.proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    **{f"attn.{theirs}": f"attn.router.{ours}" for theirs, ours in _ROUTER.items()},
}
_MODEL = {
    "x_embedder.proj": "patch_embed.proj",
    "t_embedder.mlp.0": "timestep_embed.linear_1",
    "t_embedder.mlp.2": "timestep_embed.linear_2",
    "y_embedder.embedding_table": "label_embed",
    "final_layer.adaLN_modulation.1": "final_layer.modulation",
}
_FUSED = "attn.qkv"
_SPLIT = ("attn.to_q", "attn.to_k", "attn.to_v")
_NAME = re.compile(r"(?P<block>blocks\.\d+\.)?(?P<module>.+)\.(?P<leaf>weight|bias)")


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published DiT or MoH-DiT weights under the names of :class:`moh.backbones.dit.DiT`.

    Names that are not DiT's stay as they are, so that ``load_state_dict`` names each of them.
    """
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        block, module, leaf = _parse(name)
        if block and module == _FUSED:
            for split, rows in zip(_SPLIT, value.chunk(3), strict=True):
                converted[f"{block}{split}{leaf}"] = rows.contiguous()
        else:
            table = _BLOCK if block else _MODEL
            converted[f"{block}{table.get(module, module)}{leaf}"] = value
    return converted


def to_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of :func:`from_published`.

    Raises:
        ValueError: a layer lacks one of its query, key and value tensors.
    """
    block_names = {ours: theirs for theirs, ours in _BLOCK.items()}
    model_names = {ours: theirs for theirs, ours in _MODEL.items()}
    published: dict[str, Tensor] = {}
    for name, value in state.items():
        block, module, leaf = _parse(name)
        if block and module in _SPLIT:
            parts = [f"{block}{split}{leaf}" for split in _SPLIT]
            for part in parts:
                if part not in state:
                    raise ValueError(f"{name} has no {part} beside it")
            published[f"{block}{_FUSED}{leaf}"] = torch.cat([state[part] for part in parts])
        else:
            table = block_names if block else model_names
            published[f"{block}{table.get(module, module)}{leaf}"] = value
    return published


def _parse(name: str) -> tuple[str, str, str]:
    """(``blocks.3.`` or nothing, module, ``.weight``, ``.bias`` or nothing)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return "", name, ""
    return match["block"] or "", match["module"], f".{match['leaf']}"
