"""Multiply-accumulates of a model: MHA or dense, and with only the selected heads computed.

Counted by PyTorch's own counter on the meta device, so nothing is allocated and no formula of a
backbone is repeated here. A forward pass takes seconds there, so each model is passed through once,
as MHA and with one of its equal blocks in the place of all; what its heads add is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moh.backbones.build import (
    build_model,
    is_mha,
    make_plan,
    router_options,
    without_pretrained,
)
from moh.backbones.convert import attention_layers, head_shapes, revert
from moh.config import (
    Config,
    DiTConfig,
    HeadsConfig,
    LlamaConfig,
    ModelConfig,
    TextConfig,
    TimmConfig,
)
from moh.evaluation.equal_blocks import pass_equal_blocks
from moh.heads import build_router


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
    plain = counted = _counted(model, HeadsConfig(), seq_len)
    routing, saved = 0.0, 0.0
    router_parameters, plan = 0, None
    if not is_mha(heads):
        counted = _counted(model, heads, seq_len)
        plan, options = make_plan(heads, counted.shapes), router_options(heads)
        assert plan is not None
        causal = 0.5 if isinstance(model, LlamaConfig) else 1.0
        for layer, of in zip(counted.layers, plan, strict=True):
            with torch.device("meta"):
                router = build_router(layer.width, of, options, lambda weight, generator: None)
            parameters = sum(parameter.numel() for parameter in router.parameters())
            router_parameters += parameters
            routing += layer.tokens * parameters
            projection = layer.tokens * layer.width * of.num_heads * of.head_dim
            unselected = 1 - of.num_active / of.num_heads
            saved += unselected * (causal * layer.core + 2 * projection)
    return Description(
        parameters=counted.parameters + router_parameters,
        router_parameters=router_parameters,
        activated_ratio=plan.activated_ratio if plan else 1.0,
        shared_share=plan.shared_share if plan else None,
        routed_layers=plan.routed_layers if plan else 0,
        layers=len(plain.layers),
        unit=counted.unit,
        mha_macs=plain.macs / plain.size,
        dense_macs=(counted.macs + routing) / counted.size,
        sparse_macs=(counted.macs + routing - saved) / counted.size,
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


@dataclass(frozen=True)
class _Layer:
    """An attention layer: multiply-accumulates of its core, tokens and their width."""

    core: float
    tokens: float
    width: int


@dataclass(frozen=True)
class _Counted:
    """A model without routers: what one forward pass of ``size`` units takes, and its layers."""

    parameters: int
    macs: float
    unit: str
    size: int
    layers: tuple[_Layer, ...]
    shapes: tuple[tuple[int, int], ...]


_COUNTED: dict[str, _Counted] = {}


def _counted(model: ModelConfig, heads: HeadsConfig, seq_len: int | None) -> _Counted:
    """Count a model with the attention layers that ``heads`` wants; once in a process."""
    own = heads.num_heads is not None or heads.head_dim is not None
    key = repr((model, seq_len, (heads.num_heads, heads.head_dim, heads.layers) if own else None))
    if key not in _COUNTED:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = build_model(model, heads if own else HeadsConfig())
            inputs, options = example_inputs(model, seq_len)
        causal = 0.5 if isinstance(model, LlamaConfig) else 1.0
        _COUNTED[key] = _count(revert(built) if own else built, inputs, options, causal)
    return _COUNTED[key]


def _count(
    model: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any], causal: float
) -> _Counted:
    """Pass a model without routers through once. It is of no use afterwards."""
    counter = FlopCounterMode(display=False)
    model.eval()
    stands_for = pass_equal_blocks(model)
    with counter, torch.no_grad(), torch.device("meta"):
        model(*inputs, **options)
    counts = counter.get_flop_counts()

    def macs(name: str) -> float:
        block = next((b for b in stands_for if name == b or name.startswith(f"{b}.")), None)
        if block is not None:
            name = stands_for[block] + name.removeprefix(block)
        return sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) / 2

    total = counter.get_total_flops() / 2 + sum(macs(block) for block in stands_for)
    layers = []
    for name, module, wiring in attention_layers(model):
        parts = [
            child
            for child, part in module.named_modules()
            if isinstance(part, nn.Linear | nn.Conv2d)
        ]
        # What no linear or convolution of the layer does.
        core = macs(name) - sum(macs(f"{name}.{child}") for child in parts)
        total -= (1 - causal) * core
        layers.append(_Layer(core, _tokens(macs, name, module), wiring.shape(module)[0]))
    text = "input_ids" in options
    return _Counted(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=total,
        unit="token" if text else "image",
        size=options["input_ids"].shape[1] if text else 1,
        layers=tuple(layers),
        shapes=tuple(head_shapes(model)),
    )


def _tokens(macs: Callable[[str], float], name: str, module: nn.Module) -> float:
    """Tokens of a layer, from the cost of its output projection."""
    for child in ("proj", "o_proj", "to_out.0"):
        if found := macs(f"{name}.{child}"):
            linear = module.get_submodule(child)
            assert isinstance(linear, nn.Linear)
            return found / (linear.in_features * linear.out_features)
    raise AssertionError(f"{name} has no output projection")
