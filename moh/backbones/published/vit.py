"""Parameter names of the published TransNeXt and MoH-ViT checkpoints.

TransNeXt's names are this project's. MoH-ViT keeps its router weights beside the projections.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# Published module -> ours; W_r, W_h and W_s of the paper.
ROUTER = {"wg": "router.routed", "wg_0": "router.stage", "wg_1": "router.shared"}
# Functions of the image size alone: the model computes its own, a checkpoint's do not matter.
BUFFERS = ("relative_pos_index", "relative_coords_table", "seq_length_scale", "padding_mask")


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of a published state dict, of a model or of one attention layer, to ours."""
    return _rename(
        {name: value for name, value in state.items() if name.rpartition(".")[2] not in BUFFERS},
        {f"{published}.weight": f"{ours}.weight" for published, ours in ROUTER.items()},
    )


def to_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of our state dict, of a model or of one attention layer, to the published ones."""
    return _rename(
        state, {f"{ours}.weight": f"{published}.weight" for published, ours in ROUTER.items()}
    )


def _rename(state: Mapping[str, Tensor], endings: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace the ends of names, at the borders of name parts only."""
    renamed = {}
    for name, value in state.items():
        for old, new in endings.items():
            if f".{name}".endswith(f".{old}"):
                name = name.removesuffix(old) + new
                break
        renamed[name] = value
    return renamed
