"""From configuration to model: the baseline first, then its heads."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moh.backbones.convert import convert, head_shapes
from moh.config import DiTConfig, HeadsConfig, LlamaConfig, ModelConfig, TimmConfig
from moh.errors import RunError
from moh.heads import HeadPlan, RouterOptions


def is_mha(heads: HeadsConfig) -> bool:
    """True if the configuration keeps the library's own attention."""
    return heads.ratio is None and heads.num_shared is None and heads.top_k is None


def spread(
    values: Sequence[int] | None, layers: Sequence[int] | None, depth: int, key: str
) -> list[int] | None:
    """One value a layer from one value a group of layers.

    Raises:
        ValueError: the groups do not add up to ``depth`` layers.
    """
    if values is None:
        return None
    groups = list(layers) if layers is not None else [1] * len(values)
    if len(groups) != len(values):
        raise ValueError(
            f"heads.{key} has {len(values)} entries for {len(groups)} groups in heads.layers"
        )
    if sum(groups) != depth:
        raise ValueError(
            f"heads.{'layers' if layers is not None else key} covers {sum(groups)} layers, "
            f"the model has {depth}"
        )
    return [value for value, count in zip(values, groups, strict=True) for _ in range(count)]


def make_plan(heads: HeadsConfig, shapes: Sequence[tuple[int, int]]) -> HeadPlan | None:
    """The head plan of a configuration for a model with these (num_heads, head_dim) a layer.

    Returns:
        None for MHA.

    Raises:
        ValueError: a contradictory configuration or an impossible plan, with key and layer.
    """
    if is_mha(heads):
        return None
    num_heads, head_dim = [list(column) for column in zip(*shapes, strict=True)]
    if heads.ratio is not None:
        if heads.num_shared is not None or heads.top_k is not None:
            counts = "num_shared" if heads.num_shared is not None else "top_k"
            raise ValueError(
                f"heads.{counts} and heads.ratio exclude each other: heads={heads.name} sets "
                f"heads.ratio={heads.ratio:g}; take it out with heads.ratio=null"
            )
        try:
            return HeadPlan.from_ratio(num_heads, head_dim, heads.ratio, heads.shared_share)
        except ValueError as error:
            raise ValueError(f"heads.{error}") from None
    depth = len(shapes)
    shared = spread(heads.num_shared, heads.layers, depth, "num_shared")
    top_k = spread(heads.top_k, heads.layers, depth, "top_k")
    if shared is None or top_k is None:
        missing = "num_shared" if shared is None else "top_k"
        raise ValueError(f"heads.{missing} is missing: set num_shared and top_k, or ratio")
    try:
        return HeadPlan.from_groups([1] * depth, num_heads, head_dim, shared, top_k)
    except ValueError as error:
        raise ValueError(f"heads.{error}") from None


def router_options(heads: HeadsConfig) -> RouterOptions:
    """The router options of a configuration.

    Raises:
        ValueError: an unknown word.
    """
    return RouterOptions(
        kind=heads.router,  # type: ignore[arg-type]
        gate_scale=heads.gate_scale,  # type: ignore[arg-type]
        two_stage=heads.two_stage,
        selection=heads.selection,  # type: ignore[arg-type]
        straight_through=heads.straight_through,
        execution=heads.execution,  # type: ignore[arg-type]
    )


def build_model(
    model: ModelConfig, heads: HeadsConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build a model with the heads that the configuration asks for.

    The baseline draws from the global random stream at ``seed``; the routers from their own.
    So MHA and MoH of one seed start from the same weights. Under ``torch.device("meta")``
    nothing is drawn and nothing allocated.

    Args:
        dtype: of weights that are loaded (``model.pretrained`` of a LLaMA); the others are float32.

    Raises:
        ValueError: an unknown model or argument, or a plan that does not fit.
        RunError: weights that cannot be loaded.
    """
    torch.manual_seed(seed)
    if isinstance(model, TimmConfig):
        built = _build_timm(model)
    elif isinstance(model, DiTConfig):
        built = _build_dit(model, heads)
    elif isinstance(model, LlamaConfig):
        built = _build_llama(model, dtype)
    else:
        raise ValueError(f"model.family {model.family!r} is not one of timm, dit, llama")
    if is_mha(heads):  # of any architecture, with or without attention
        return built
    plan = make_plan(heads, head_shapes(built))
    assert plan is not None
    return convert(built, plan, router_options(heads), seed=seed)


def without_pretrained(model: ModelConfig) -> ModelConfig:
    """The same model with no weights of its own, for those that bring theirs."""
    if isinstance(model, TimmConfig):
        return dataclasses.replace(model, pretrained=False)
    if isinstance(model, LlamaConfig):
        return dataclasses.replace(model, pretrained=None)
    return model


def _build_timm(model: TimmConfig) -> nn.Module:
    import timm

    from moh.backbones.preparation import preparation
    from moh.backbones.transnext_model import TransNeXt

    wanted = preparation(model.name)
    arguments: dict[str, Any] = {
        "in_chans": model.in_chans,
        "num_classes": model.num_classes,
        "drop_path_rate": model.drop_path_rate,
        # Convolutional networks take any size and no such argument.
        "img_size": model.img_size if wanted["fixed_size"] else None,
        **model.args,
    }
    if "transnext" in model.name:
        known = inspect.signature(TransNeXt.__init__).parameters
        for key in model.args:
            if key not in known:
                raise ValueError(
                    f"model.args.{key} is not an argument of TransNeXt; known: {', '.join(known)}"
                )
    try:
        return timm.create_model(model.name, pretrained=model.pretrained, **arguments)
    except (OSError, RuntimeError) as error:
        if not model.pretrained:
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"no pretrained weights of {model.name}: {reason}; name a file with checkpoint="
        ) from None


def _build_dit(model: DiTConfig, heads: HeadsConfig) -> nn.Module:
    from moh.backbones.dit import DiT

    num_heads: int | list[int] = model.num_heads
    if not is_mha(heads) and heads.num_heads is not None:
        num_heads = spread(heads.num_heads, heads.layers, model.depth, "num_heads") or []
    return DiT(
        input_size=model.input_size,
        patch_size=model.patch_size,
        in_channels=model.in_channels,
        hidden_size=model.hidden_size,
        depth=model.depth,
        num_heads=num_heads,
        head_dim=heads.head_dim if not is_mha(heads) else None,
        mlp_ratio=model.mlp_ratio,
        num_classes=model.num_classes,
    )


def _build_llama(model: LlamaConfig, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig as TransformersConfig
    from transformers import LlamaForCausalLM

    import moh.backbones.llama  # noqa: F401 registers MoH-LLaMA with the Auto classes

    if model.pretrained is not None:
        from moh.backbones.llama_folder import load_llama

        return load_llama(model.pretrained, dtype)
    config = TransformersConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads or model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        initializer_range=model.initializer_range,
    )
    return LlamaForCausalLM(config)
