"""Parity of TransNeXt and MoH-TransNeXt: both attention layers, and models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moh import HeadPlan, balance_loss, convert
from moh.backbones.published.vit import from_published, to_published
from moh.backbones.transnext_attention import (
    AggregatedAttention,
    PositionBiasedAttention,
    TransNeXtAttention,
)
from moh.backbones.transnext_model import TransNeXt
from moh.backbones.transnext_positions import Size, relative_coords
from moh.heads import routers

Comparison = tuple[str, Tensor, Tensor]
Tensors = Mapping[str, Tensor]
_TABLE, _INDEX = "input/relative_coords_table", "input/relative_pos_index"


def check(case: Mapping[str, Any], tensors: Tensors) -> Iterator[Comparison]:
    """Yield (name, expected, ours) for each expected tensor of a ``vit`` file.

    The reference's relative coordinates are inputs of its layers; ours are computed, so these
    are compared too, pair by pair of query and key.
    """
    outputs = _layer(case, tensors) if "layer" in case else _model(case, tensors)
    for name, expected in tensors.items():
        if name == _TABLE:
            yield name, expected[tensors[_INDEX]], outputs[name]
        elif not name.startswith(("weights/", "input/")):
            if name not in outputs:
                raise ValueError(f"{name} is not an expected tensor of a vit file")
            yield name, expected, outputs[name].detach().reshape(expected.shape)


def _load(module: nn.Module, tensors: Tensors) -> None:
    """Load the weights by the conversion of published checkpoints, strictly."""
    prefix = "weights/"
    weights = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
    module.load_state_dict(from_published(weights))


def _convert(
    module: nn.Module,
    depths: Sequence[int],
    widths: Sequence[int],
    num_heads: Sequence[int],
    shared: Sequence[int],
    top_k: Sequence[int],
) -> None:
    head_dim = [width // heads for width, heads in zip(widths, num_heads, strict=True)]
    convert(module, HeadPlan.from_groups(depths, num_heads, head_dim, shared, top_k))


def _layer(case: Mapping[str, Any], tensors: Tensors) -> dict[str, Tensor]:
    layer = _build_layer(case, tensors)
    if case.get("attention") != "mha":
        plan = ([1], [case["dim"]], [case["num_heads"]])
        _convert(layer, *plan, [case["shared_heads"]], [case["routed_active_heads"]])
    _load(layer, tensors)
    outputs = {_TABLE: layer.coords_T2[layer.pair_index]}
    with torch.no_grad():
        outputs["output/y"] = layer.eval()(tensors["input/x"])
    x = tensors["input/x"].clone().requires_grad_()
    loss = layer.train()(x).square().mean()
    balance = balance_loss(layer)
    if balance is not None:
        outputs["train/balance_loss"] = balance
        loss = loss + 0.01 * balance
    loss.backward()
    assert x.grad is not None
    outputs["train/grad_x"] = x.grad
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    for name, gradient in to_published(gradients).items():
        outputs[f"train/grad/{name}"] = gradient
    return outputs


def _build_layer(case: Mapping[str, Any], tensors: Tensors) -> PositionBiasedAttention:
    side = case["resolution"]
    grid: Size = (side, side) if isinstance(side, int) else (side[0], side[1])
    layer_class: type[PositionBiasedAttention] = TransNeXtAttention
    options: dict[str, Any] = {}
    if case["layer"] == "aggregated":
        layer_class = AggregatedAttention
        keys = ("sr_ratio", "window_size", "fixed_pool_size")
        options = {key: case[key] for key in keys if key in case}
    query = "qkv" if layer_class is TransNeXtAttention else "q"
    options["qkv_bias"] = f"weights/{query}.bias" in tensors
    build = partial(layer_class, case["dim"], case["num_heads"], grid, **options)
    layer = build()
    if _TABLE in tensors:
        layer = build(pretrain_grid=_pretrain_grid(layer, tensors[_TABLE]))
    return layer


def _pretrain_grid(layer: PositionBiasedAttention, table_T2: Tensor) -> Size:
    """The grid that set the scale of the reference's coordinates; the files do not name it."""
    ours_T2, _ = relative_coords(layer.grid, layer.key_grid(), layer.grid)
    # The largest coordinate c stands for (2^(3 c) - 1) / 8 pretrain grids.
    ours, theirs = (2 ** (3 * table.amax(0).double()) - 1 for table in (ours_T2, table_T2))
    height, width = (
        round(1 + (side - 1) * ratio)
        for side, ratio in zip(layer.grid, (ours / theirs).tolist(), strict=True)
    )
    return height, width


def _model(case: Mapping[str, Any], tensors: Tensors) -> dict[str, Tensor]:
    x = tensors["input/x"]
    known = inspect.signature(TransNeXt).parameters
    model = TransNeXt(
        in_chans=x.shape[1],
        **{key: value for key, value in case.items() if key in known},
    )
    if case.get("attention") != "mha":
        sizes = (case["depths"], case["embed_dims"], case["num_heads"])
        _convert(model, *sizes, case["shared_head"], case["routed_head"])
    _load(model, tensors)
    with torch.no_grad():
        outputs = {"output/logits": model.eval()(x)}
        model.train()(x)
    losses = [r.balance_loss() for _, r in routers(model) if r.statistics is not None]
    outputs["train/balance_losses"] = torch.stack(losses) if losses else x.new_zeros(0)
    return outputs
