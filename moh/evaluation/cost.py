"""Multiply-accumulates of a model: MHA or dense, and with only the selected heads computed.

Counted by PyTorch's own counter on the meta device, so nothing is allocated and no formula of a
backbone is repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moh.backbones.build import build_model, without_pretrained
from moh.backbones.convert import attention_layers, converted_layers, head_plan, head_shapes
from moh.config import (
    Config,
    DiTConfig,
    HeadsConfig,
    LlamaConfig,
    ModelConfig,
    TextConfig,
    TimmConfig,
)
from moh.heads import Router, routers


@dataclass(frozen=True)
class Description:
    """Sizes and cost of one model.

    Attributes:
        parameters, router_parameters: counts.
        activated_ratio, shared_share: fractions; 1.0 and None for MHA.
        routed_layers, layers: counts.
        unit: what one forward pass is for: ``image`` or ``token``.
        mha_macs: of the MHA baseline, a unit.
        dense_macs: all heads computed, then gated; equals ``mha_macs`` for MHA.
        sparse_macs: the attention core, the query projection and the output projection for the
            selected heads alone; keys and values of every head, since any token may want them.
    """

    parameters: int
    router_parameters: int
    activated_ratio: float
    shared_share: float | None
    routed_layers: int
    layers: int
    unit: str
    mha_macs: float
    dense_macs: float
    sparse_macs: float


def describe_model(
    model: ModelConfig, heads: HeadsConfig, seq_len: int | None = None
) -> Description:
    """Build a model on the meta device and count.

    Args:
        seq_len: tokens of a sequence, for language models; causal attention counts half of the
            square.

    Raises:
        ValueError: a model or plan that cannot be built.
    """
    model = without_pretrained(model)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        built = build_model(model, heads)
        plain = build_model(model, HeadsConfig())
        inputs, options = example_inputs(model, seq_len)
    unit, size = (
        ("token", options["input_ids"].shape[1]) if "input_ids" in options else ("image", 1)
    )
    plan = head_plan(built)
    causal = 0.5 if isinstance(model, LlamaConfig) else 1.0
    mha, _ = _count(plain, inputs, options, causal)
    dense, saved = _count(built, inputs, options, causal)
    return Description(
        parameters=sum(p.numel() for p in built.parameters()),
        router_parameters=sum(p.numel() for _, r in routers(built) for p in r.parameters()),
        activated_ratio=plan.activated_ratio if plan else 1.0,
        shared_share=plan.shared_share if plan else None,
        routed_layers=plan.routed_layers if plan else 0,
        layers=len(head_shapes(plain)),
        unit=unit,
        mha_macs=mha / size,
        dense_macs=dense / size,
        sparse_macs=(dense - saved) / size,
    )


def training_flops(config: Config) -> float:
    """:func:`flops_of_sample` of a run."""
    seq_len = config.data.seq_len if isinstance(config.data, TextConfig) else None
    return flops_of_sample(describe_model(config.model, config.heads, seq_len), seq_len)


def flops_of_sample(model: Description, seq_len: int | None = None) -> float:
    """Floating-point operations of one training sample: forward and backward pass, all heads.

    Two for each multiply-accumulate; the backward pass is twice the forward pass. What activation
    checkpointing recomputes does not count.
    """
    return 6 * model.dense_macs * (seq_len or 1)


def example_inputs(
    model: ModelConfig, seq_len: int | None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of one forward pass of one image or sequence, without values."""
    if isinstance(model, TimmConfig):
        return (torch.empty(1, model.in_chans, model.img_size, model.img_size),), {}
    if isinstance(model, DiTConfig):
        one = torch.zeros(1, dtype=torch.int64)
        x = torch.empty(1, model.in_channels, model.input_size, model.input_size)
        return (x, one, one), {}
    assert isinstance(model, LlamaConfig)
    length = seq_len or model.max_position_embeddings
    ids = torch.zeros(1, length, dtype=torch.int64)
    # A ready mask, since transformers looks into the positions to make one and meta has no values.
    mask = torch.zeros(1, 1, length, length)
    return (), {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def _count(
    model: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any], causal: float
) -> tuple[float, float]:
    """Multiply-accumulates of a forward pass, and those that unselected heads took.

    Sparse execution leaves out the share of the unselected heads in a layer's core (what no linear,
    convolution or router of it does), in its query projection and in its output projection.
    """
    counter = FlopCounterMode(display=False)
    model.eval()
    with counter, torch.no_grad(), torch.device("meta"):
        model(*inputs, **options)
    counts = counter.get_flop_counts()
    root = type(model).__name__

    def macs(name: str) -> float:
        return sum(counts.get(f"{root}.{name}" if name else root, {}).values()) / 2

    total, saved = float(counter.get_total_flops()) / 2, 0.0
    for name, module, wiring in attention_layers(model) + converted_layers(model):
        layers = [
            child
            for child, part in module.named_modules()
            if isinstance(part, nn.Linear | nn.Conv2d | Router) and "router." not in child
        ]
        core = macs(name) - sum(macs(f"{name}.{child}") for child in layers)
        total -= (1 - causal) * core
        router = getattr(module, "router", None)
        if isinstance(router, Router):
            width, num_heads, head_dim = wiring.shape(module)
            tokens = _tokens(counts, f"{root}.{name}", module)
            projection = tokens * width * num_heads * head_dim
            unselected = 1 - router.plan.num_active / router.plan.num_heads
            saved += unselected * (causal * core + 2 * projection)
    return total, saved


def _tokens(counts: Any, name: str, module: nn.Module) -> float:
    """Tokens of a layer, from the cost of its output projection."""
    for child in ("proj", "o_proj", "to_out.0"):
        flops = sum(counts.get(f"{name}.{child}", {}).values())
        if flops:
            linear = module.get_submodule(child)
            assert isinstance(linear, nn.Linear)
            return flops / 2 / (linear.in_features * linear.out_features)
    raise AssertionError(f"{name} has no output projection")
