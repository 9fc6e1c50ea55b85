"""Any timm model with heads as one entry of timm's registry, so that timm saves and loads it.

Importing this module registers ``moh``: ``timm.create_model("moh", base="deit_small_patch16_224",
head_plan=plan.to_dict())``. With timm's ``config.json`` beside them, weights of such a model load
by ``timm.create_model("local-dir:FOLDER", pretrained=True)``, or ``hf-hub:NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    save_for_hf,
)
from torch import nn

from moh.backbones.convert import convert, head_plan
from moh.backbones.transnext import HEAD_BUDGETS
from moh.backbones.transnext_model import TransNeXt
from moh.heads import HeadPlan, RouterOptions, routers

NAME = "moh"
default_cfgs = generate_default_cfgs({NAME: {}})
# timm's decorator is untyped.
register: Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]] = register_model


@register
def moh(
    pretrained: bool = False,
    base: str | None = None,
    head_plan: Sequence[Mapping[str, int]] | None = None,
    router: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A timm model, converted.

    Args:
        pretrained: weights of the converted model, which ``pretrained_cfg`` names.
        base: name of the model in timm's registry.
        head_plan: :meth:`moh.HeadPlan.to_dict`.
        router: fields of :class:`moh.RouterOptions`; None for the defaults.
        kwargs: timm's, and the base model's.

    Raises:
        ValueError: no base or no heads, or heads that do not fit the base.
    """
    if base is None or head_plan is None:
        raise ValueError(f"timm model {NAME} needs base=NAME and head_plan=[...]")
    plan = HeadPlan.from_dict(head_plan)

    def build(**options: Any) -> nn.Module:
        model = timm.create_model(base, **options)
        return convert(model, plan, RouterOptions(**(router or {})), seed=torch.initial_seed())

    return build_model_with_cfg(build, NAME, pretrained, **kwargs)


def save_timm(model: nn.Module, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` as timm does for a hub.

    Args:
        model: made by ``timm.create_model``, converted or not.
        folder: made where it does not exist.
    """
    plan = head_plan(model)
    pretrained_cfg: Any = model.pretrained_cfg
    architecture = pretrained_cfg["architecture"]
    config: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    if plan is not None and architecture not in (NAME, *HEAD_BUDGETS):
        options = next(routers(model))[1].options
        config = {"pretrained_cfg": {"architecture": NAME}}
        arguments = {"base": architecture, "head_plan": plan.to_dict(), "router": asdict(options)}
    if isinstance(model, TransNeXt):
        # At another image size the weights still mean coordinates at this scale.
        arguments["pretrain_size"] = list(model.pretrain_size)
    save_for_hf(
        model, str(folder), model_config=config, model_args=arguments, safe_serialization=True
    )
