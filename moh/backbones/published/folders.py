"""Folders that say what model their weights are of: timm's, diffusers' and transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moh.backbones.convert import attention_layers, converted_layers, head_plan
from moh.errors import RunError
from moh.heads import HeadPlan, RouterOptions, routers

CONFIG = "config.json"


@dataclass(frozen=True)
class Described:
    """What a folder's ``config.json`` says.

    Attributes:
        family: ``timm``, ``dit`` or ``llama``.
        build: the model it describes, without its weights.
    """

    family: str
    build: Callable[[], nn.Module]


def describe_folder(folder: Path) -> Described:
    """Read ``config.json``; no code of the folder is run.

    Raises:
        RunError: none, unreadable, or of a model that is not of this project's families.
    """
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    if "architecture" in config:
        return Described("timm", lambda: _timm(folder))
    if "_class_name" in config:
        return Described("dit", lambda: _dit(config, path))
    kind = config.get("model_type")
    if kind == "moh_llama" or (kind == "llama" and "auto_map" in config):
        return Described("llama", lambda: _moh_llama(config))
    if kind == "llama":
        return Described("llama", lambda: _llama(config))
    raise RunError(f"{path} describes no model of timm, DiT or LLaMA (model_type {kind!r})")


def check_same(model: nn.Module, folder: Path) -> None:
    """Refuse a folder of other heads than the model's, which shapes alone need not show.

    Raises:
        RunError: other heads, another router, or other settings of the language model.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        try:
            described = describe_folder(folder).build()
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, RunError):
                raise
            reason = str(error).splitlines()[0]
            raise RunError(f"{folder / CONFIG} makes no model: {reason}") from None
    ours, theirs = head_plan(model), head_plan(described)
    if ours != theirs:
        raise RunError(f"{folder} has other heads: {_difference(theirs, ours)}")
    if _shapes(model) != _shapes(described):
        raise RunError(f"{folder} has other numbers or widths of heads than the model")
    if _options(model) != _options(described):
        raise RunError(f"{folder}: {_options(described)}; the model: {_options(model)}")
    for key in ("rope_parameters", "rms_norm_eps", "hidden_act"):
        values = [getattr(getattr(m, "config", None), key, None) for m in (model, described)]
        if values[0] != values[1]:
            raise RunError(f"{folder} has {key} {values[1]}, the model {values[0]}")


def _difference(theirs: HeadPlan | None, ours: HeadPlan | None) -> str:
    """Where two head plans part."""
    if theirs is None or ours is None or len(theirs) != len(ours):
        return f"{theirs or 'plain MHA'}; the model: {ours or 'plain MHA'}"
    at = next(i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
    a, b = (f"{p.num_shared} shared, top {p.top_k}" for p in (theirs[at], ours[at]))
    return f"layer {at} has {a}; the model: {b}"


def _shapes(model: nn.Module) -> list[tuple[int, int]]:
    layers = converted_layers(model) or attention_layers(model)
    return [wiring.shape(module)[1:] for _, module, wiring in layers]


def _options(model: nn.Module) -> RouterOptions | None:
    found = next(routers(model), None)
    return found[1].options if found else None


def _timm(folder: Path) -> nn.Module:
    import timm

    import moh.backbones.timm_moh  # noqa: F401 registers its name with timm

    return timm.create_model(f"local-dir:{folder}")


def _dit(config: dict[str, Any], path: Path) -> nn.Module:
    from moh.backbones.dit import DiT

    if config["_class_name"] != DiT.__name__:
        raise RunError(f"{path} describes a {config['_class_name']}, not a {DiT.__name__}")
    model: nn.Module = DiT.from_config(config)
    return model


def _moh_llama(config: dict[str, Any]) -> nn.Module:
    from moh.backbones.llama import MoHLlamaConfig, MoHLlamaForCausalLM
    from moh.backbones.published.llama import config_from_published

    if config["model_type"] == MoHLlamaConfig.model_type:
        known = {key: value for key, value in config.items() if key != "model_type"}
        return MoHLlamaForCausalLM(MoHLlamaConfig(**known))
    # The published code fixes the heads and its config does not mention them.
    return MoHLlamaForCausalLM(config_from_published(config))


def _llama(config: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    known = {key: value for key, value in config.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(**known))
