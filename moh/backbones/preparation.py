"""How a timm model's own weights want their images: its ``pretrained_cfg`` as plain values."""

from __future__ import annotations

from functools import cache
from typing import Any

import timm
from timm.data import resolve_data_config
from timm.models import resolve_model_input_args

import moh.backbones.transnext  # noqa: F401 registers its names with timm
from moh.errors import nearest


@cache
def preparation(model: str) -> dict[str, Any]:
    """Size, normalisation and crop that the published accuracy of a timm model belongs to.

    Args:
        model: a name of timm's registry, with or without a tag, or ``local-dir:FOLDER`` or
            ``hf-hub:NAME``, whose ``config.json`` is read.

    Returns:
        ``size`` (pixels), ``channels``, ``mean``, ``std``, ``crop_pct``, ``crop_mode``,
        ``interpolation``, ``num_classes`` of the weights, ``fixed_size``: whether the model is
        built for one size.

    Raises:
        ValueError: no such model, or one that wants images that are not square.
    """
    cfg = _pretrained_cfg(model)
    # Test size and crop, where a model names them: what timm's own results are measured with.
    data = resolve_data_config(pretrained_cfg=cfg, use_test_size=True)
    channels, height, width = data["input_size"]
    if height != width:
        raise ValueError(f"model.name {model!r} wants images of {height}x{width}, not square ones")
    return {
        "size": height,
        "channels": channels,
        "mean": [float(value) for value in data["mean"]],
        "std": [float(value) for value in data["std"]],
        "crop_pct": float(data["crop_pct"]),
        "crop_mode": data["crop_mode"],
        "interpolation": data["interpolation"],
        "num_classes": cfg.get("num_classes"),
        "fixed_size": bool(cfg.get("fixed_input_size", False)),
    }


def check_name(model: str) -> None:
    """Refuse a name that timm does not know.

    Raises:
        ValueError: with the nearest names that it knows.
    """
    if ":" not in model and not timm.is_model(model.split(".")[0]):
        close = nearest(model, timm.list_models())
        raise ValueError(f"model.name {model!r} is not a timm model{close}")


def _pretrained_cfg(model: str) -> dict[str, Any]:
    check_name(model)
    try:
        return dict(resolve_model_input_args(model)["pretrained_cfg"])
    except (ValueError, RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"model.name {model!r}: {lines[0]}") from None
