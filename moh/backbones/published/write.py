"""Write a model for others: as a folder of its library, or in the form its authors published."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moh.backbones.convert import head_plan, revert
from moh.backbones.published.load import FAMILIES
from moh.errors import RunError

# The published MoH-LLaMA3 brings its attention as code; its config points there.
AUTO_MAP = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}


def write_ours(model: nn.Module, family: str, target: Path) -> None:
    """Write a folder that timm, diffusers or transformers loads, heads included.

    Args:
        model: of this project, or of its library.
        family: ``timm``, ``dit`` or ``llama``.
        target: must not exist; it appears when it is whole.

    Raises:
        RunError: it exists, or cannot be written.
    """

    def write(folder: Path) -> None:
        if family == "timm":
            from moh.backbones.timm_moh import save_timm

            save_timm(model, folder)
        else:
            model.save_pretrained(folder)  # type: ignore[operator]

    _aside(target, write)


def write_published(model: nn.Module, family: str, target: Path) -> None:
    """Write the authors' form: a ``.pth`` (ViT), a ``.pt`` (DiT), a folder (LLaMA).

    Args:
        model: of this project; a LLaMA is reverted in place.
        family: ``timm``, ``dit`` or ``llama``.
        target: must not exist; it appears when it is whole.

    Raises:
        RunError: it exists, cannot be written, or the form has no place for these heads.
    """
    renames = import_module(f"moh.backbones.published.{FAMILIES[family]}")
    try:
        state = renames.to_published(model.state_dict())
    except ValueError as error:
        raise RunError(f"the published form has no place for this model: {error}") from None
    if family == "llama":
        _aside(target, _llama_writer(model))
        return
    # The authors' evaluation reads "model"; DiT's sampler takes the state dict itself.
    content = {"model": state} if family == "timm" else state
    _aside(target, lambda path: torch.save(content, path))


def _llama_writer(model: nn.Module) -> Callable[[Path], None]:
    from moh.backbones.published.llama import config_from_published

    plan = head_plan(model)
    if plan is not None:
        revert(model)
        config: Any = model.config
        fixed = config_from_published(config.to_dict()).head_plan
        assert fixed is not None
        if fixed != plan.to_dict():
            raise RunError(
                f"the published LLaMA code fixes its heads ({fixed[0]} in each layer); this "
                "model has others: --to ours"
            )

    def write(folder: Path) -> None:
        model.save_pretrained(folder)  # type: ignore[operator]
        if plan is not None:
            path = folder / "config.json"
            config = json.loads(path.read_text()) | {"auto_map": AUTO_MAP}
            path.write_text(json.dumps(config, indent=2) + "\n")

    return write


def _aside(target: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target and rename, so that nothing half-written bears its name."""
    if target.exists():
        raise RunError(f"{target} exists; choose another name or remove it")
    aside = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        for file in [aside] if aside.is_file() else aside.rglob("*.*"):
            file.chmod(0o666 & ~_umask())  # safetensors makes files for their owner alone
        os.replace(aside, target)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        aside.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
