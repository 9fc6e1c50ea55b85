"""MHA -> MoH and back, on a model that is already built.

Every MoH model of this project is made here: the baseline is built first, by its own library and
from its own random stream, and then converted. So both share every original parameter, by name
and by value, and differ in nothing but the heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moh.heads import HeadPlan, RouterOptions, build_router, routers

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Wiring:
    """How one attention class becomes MoH: the whole contact between the method and a library.

    Attributes:
        mha: the library's attention class.
        moh: its subclass that adds ``router`` and gates the heads before the output projection.
        shape: attention module -> (width of its input, number of heads, width of a head).
        init: fills a router weight in place, as the family's published models do.
        eligible: which instances are multi-head self-attention; others are left alone.
    """

    mha: type[nn.Module]
    moh: type[nn.Module]
    shape: Callable[[Any], tuple[int, int, int]]
    init: Callable[[Tensor, torch.Generator | None], object]
    eligible: Callable[[Any], bool] = lambda module: True


@dataclass(frozen=True)
class ModelHooks:
    """What a model class does beside its attention layers when it is converted or reverted.

    Attributes:
        model: the class these hooks are for, subclasses included.
        convert: called with (model, plan, options) after the layers are converted.
        revert: called with (model) after the layers are reverted.
    """

    model: type[nn.Module]
    convert: Callable[[Any, HeadPlan, RouterOptions], None]
    revert: Callable[[Any], None]


_WIRINGS: dict[type[nn.Module], Wiring] = {}
_HOOKS: list[ModelHooks] = []

# Library -> the module of ours that wires it. Imported when a model of that library turns up, so
# that a timm user never waits for transformers.
_FAMILIES = {
    "timm": ("moh.backbones.vit",),
    "diffusers": ("moh.backbones.dit",),
    "transformers": ("moh.backbones.llama",),
}


NONE_KNOWN = (
    "has no attention layer that can be converted; known: timm's Attention, TransNeXt's two, "
    "diffusers' Attention (self-attention), transformers' LlamaAttention"
)


def register_wiring(wiring: Wiring) -> None:
    """Make :func:`convert` recognise an attention class."""
    _WIRINGS[wiring.mha] = wiring


def register_hooks(hooks: ModelHooks) -> None:
    """Make :func:`convert` and :func:`revert` call a model class's hooks."""
    _HOOKS.append(hooks)


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module, Wiring]]:
    """The layers that can be converted, first layer first: name, module, wiring."""
    for library, modules in _FAMILIES.items():
        if library in sys.modules:
            for module in modules:
                import_module(module)
    found = []
    for name, module in model.named_modules():
        wiring = _WIRINGS.get(type(module))
        if wiring is not None and wiring.eligible(module):
            found.append((name, module, wiring))
    return found


def converted_layers(model: nn.Module) -> list[tuple[str, nn.Module, Wiring]]:
    """The MoH layers of a converted model, first layer first: name, module, wiring."""
    by_moh = {wiring.moh: wiring for wiring in _WIRINGS.values()}
    return [
        (name, module, by_moh[type(module)])
        for name, module in model.named_modules()
        if type(module) in by_moh
    ]


def head_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(number of heads, width of a head) of each layer that can be converted, first layer first.

    What a plan for the model must agree with; ``HeadPlan.from_ratio(*zip(*head_shapes(model)),
    ratio=0.75)`` makes one.

    Raises:
        ValueError: no such layer.
    """
    shapes = [wiring.shape(module)[1:] for _, module, wiring in attention_layers(model)]
    if not shapes:
        raise ValueError(f"{type(model).__name__} {NONE_KNOWN}")
    return shapes


def is_converted(model: nn.Module) -> bool:
    """True if the model has routers."""
    return next(routers(model), None) is not None


def convert(
    model: Model, plan: HeadPlan, options: RouterOptions | None = None, seed: int = 0
) -> Model:
    """Turn a built timm, diffusers or transformers model into MoH, in place.

    No original parameter is touched, and neither is the global random stream: routers draw from
    a generator of their own. :func:`revert` gives the model back.

    Args:
        model: any model whose self-attention layers are of a known class: timm's ``Attention``
            (ViT, DeiT), this project's TransNeXt, diffusers' ``Attention`` (DiT), transformers'
            ``LlamaAttention``.
        plan: a head budget for each of these layers, first layer first.
        options: how gates are formed; the released models' way by default.
        seed: of the router weights.

    Returns:
        The same object.

    Raises:
        ValueError: no attention layer of a known class, a model already converted, or a plan
            that does not fit the model, with the first layer that disagrees.
    """
    if not isinstance(plan, HeadPlan):
        raise ValueError(f"plan must be a HeadPlan, not {type(plan).__name__}")
    if is_converted(model):
        raise ValueError(f"{type(model).__name__} is MoH already; call revert first")
    layers = attention_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} {NONE_KNOWN}")
    if len(plan) != len(layers):
        raise ValueError(
            f"the head plan has {len(plan)} layers, {type(model).__name__} has {len(layers)}"
        )
    for index, ((name, module, wiring), layer) in enumerate(zip(layers, plan, strict=True)):
        shape = wiring.shape(module)[1:]
        if shape != (layer.num_heads, layer.head_dim):
            raise ValueError(
                f"layer {index} ({name}) has {shape[0]} heads of width {shape[1]}, "
                f"its plan {layer.num_heads} of width {layer.head_dim}"
            )
    options = options or RouterOptions()
    generator = torch.Generator().manual_seed(seed)
    for (_, module, wiring), layer in zip(layers, plan, strict=True):
        width = wiring.shape(module)[0]
        reference = next(module.parameters())
        # Drawn on the CPU in float32, so that a seed means the same weights everywhere.
        device = "meta" if reference.is_meta else "cpu"
        with torch.device(device), torch.random.fork_rng(devices=[]):
            router = build_router(width, layer, options, wiring.init, generator)
        module.router = router.to(device=reference.device, dtype=reference.dtype)
        module.router.train(module.training)
        module.__class__ = wiring.moh
    for hooks in _HOOKS:
        if isinstance(model, hooks.model):
            hooks.convert(model, plan, options)
    return model


def revert(model: Model) -> Model:
    """Undo :func:`convert`, in place: the library's own attention, the routers gone.

    Raises:
        ValueError: the model has no MoH layer.
    """
    if not is_converted(model):
        raise ValueError(f"{type(model).__name__} has no MoH layer to revert")
    for _, module, wiring in converted_layers(model):
        del module.router
        module.__class__ = wiring.mha
    for hooks in _HOOKS:
        if isinstance(model, hooks.model):
            hooks.revert(model)
    return model


def head_plan(model: nn.Module) -> HeadPlan | None:
    """The head plan of a converted model, None for plain MHA."""
    layers = tuple(router.plan for _, router in routers(model))
    return HeadPlan(layers) if layers else None
