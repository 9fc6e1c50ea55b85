"""TransNeXt and MoH-TransNeXt in timm's registry: ``timm.create_model("moh_transnext_small_75")``.

Importing this module registers the names. A ``moh_*`` model is the baseline of its size,
converted with the head budget that the authors released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from moh.backbones.convert import convert
from moh.backbones.published.vit import from_published
from moh.backbones.transnext_model import TransNeXt
from moh.heads import HeadPlan

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "micro": {
        "embed_dims": (48, 96, 192, 384),
        "num_heads": (2, 4, 8, 16),
        "depths": (2, 2, 15, 2),
    },
    "tiny": {
        "embed_dims": (72, 144, 288, 576),
        "num_heads": (3, 6, 12, 24),
        "depths": (2, 2, 15, 2),
    },
    "small": {
        "embed_dims": (72, 144, 288, 576),
        "num_heads": (3, 6, 12, 24),
        "depths": (5, 5, 22, 5),
    },
    "base": {
        "embed_dims": (96, 192, 384, 768),
        "num_heads": (4, 8, 16, 32),
        "depths": (5, 5, 23, 5),
    },
}

# A value a stage. conf/heads/transnext_*.yaml hold the same numbers for the recipes.
HEAD_BUDGETS: dict[str, dict[str, tuple[int, ...]]] = {
    "moh_transnext_small_75": {"num_shared": (3, 6, 3, 4), "top_k": (0, 0, 6, 12)},
    "moh_transnext_small_80": {"num_shared": (3, 6, 3, 8), "top_k": (0, 0, 6, 12)},
    "moh_transnext_base_75": {"num_shared": (4, 8, 4, 5), "top_k": (0, 0, 8, 16)},
    "moh_transnext_base_50": {"num_shared": (2, 2, 2, 4), "top_k": (2, 4, 6, 8)},
}


def _default_cfg(**source: str) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed1.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **source,
    }


default_cfgs = generate_default_cfgs(
    {
        f"transnext_{size}.in1k": _default_cfg(
            hf_hub_id=f"DaiShiResearch/transnext-{size}-224-1k",
            hf_hub_filename=f"transnext_{size}_224_1k.pth",
        )
        for size in SIZES
    }
    | {name: _default_cfg() for name in HEAD_BUDGETS}
)


def _checkpoint_filter(state: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    return from_published(state.get("model", state))


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a registered model; ``kwargs`` are timm's and :class:`TransNeXt`'s."""
    size = next(size for size in SIZES if f"transnext_{size}" in name)
    arguments: dict[str, Any] = {**SIZES[size], **kwargs}
    stages: Sequence[int] = arguments["embed_dims"]
    if pretrained:
        # The published weights know relative coordinates at this scale, whatever img_size is.
        arguments.setdefault("pretrain_size", _default_cfg()["input_size"][1:])

    def build(**options: Any) -> nn.Module:
        model = TransNeXt(**options)
        if name not in HEAD_BUDGETS:
            return model
        heads = options["num_heads"]
        head_dim = [width // count for width, count in zip(stages, heads, strict=True)]
        plan = HeadPlan.from_groups(options["depths"], heads, head_dim, **HEAD_BUDGETS[name])
        # Other routers for another torch.manual_seed, without drawing from that stream.
        return convert(model, plan, seed=torch.initial_seed())

    return build_model_with_cfg(
        build,
        name,
        pretrained,
        pretrained_filter_fn=_checkpoint_filter,
        feature_cfg={"out_indices": tuple(range(len(stages))), "feature_cls": "getter"},
        **arguments,
    )


# timm's decorator is untyped.
register: Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]] = register_model


@register
def transnext_micro(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """TransNeXt-Micro, 12.8 M parameters."""
    return _create("transnext_micro", pretrained, kwargs)


@register
def transnext_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """TransNeXt-Tiny, 28.2 M parameters."""
    return _create("transnext_tiny", pretrained, kwargs)


@register
def transnext_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """TransNeXt-Small, 49.7 M parameters."""
    return _create("transnext_small", pretrained, kwargs)


@register
def transnext_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """TransNeXt-Base, 89.7 M parameters."""
    return _create("transnext_base", pretrained, kwargs)


@register
def moh_transnext_small_75(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoH-ViT-S with 75 % of its heads active (paper, Table 1)."""
    return _create("moh_transnext_small_75", pretrained, kwargs)


@register
def moh_transnext_small_80(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoH-ViT-S with 80 % of its heads active (paper, Table 1)."""
    return _create("moh_transnext_small_80", pretrained, kwargs)


@register
def moh_transnext_base_75(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoH-ViT-B with 75 % of its heads active (paper, Table 1)."""
    return _create("moh_transnext_base_75", pretrained, kwargs)


@register
def moh_transnext_base_50(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoH-ViT-B with 50 % of its heads active (paper, Table 1)."""
    return _create("moh_transnext_base_50", pretrained, kwargs)
