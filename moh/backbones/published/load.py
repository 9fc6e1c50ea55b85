"""Load published weights into a model of this project, without running code from a file."""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from moh.errors import RunError

FAMILIES = {"timm": "vit", "dit": "dit", "llama": "llama"}
SHOWN = 8  # names of keys in one message; the rest are counted


def load_published(model: nn.Module, source: Path, family: str, ema: bool = True) -> None:
    """Load a published checkpoint in place.

    Args:
        model: built with the heads of the checkpoint.
        source: ``.pth``, ``.pt``, ``.bin`` or ``.safetensors`` file, or a transformers folder.
        family: ``timm``, ``dit`` or ``llama``: whose names to expect.
        ema: averaged weights where the file has both.

    Raises:
        RunError: unreadable, holding code, or of another model; every missing, unexpected or
            differently shaped key is named.
    """
    renames = import_module(f"moh.backbones.published.{FAMILIES[family]}")
    state = renames.from_published(read_state(source, ema))
    _check_keys(model.state_dict(), state, source)
    model.load_state_dict(state)


def read_state(source: Path, ema: bool = True) -> dict[str, Tensor]:
    """The state dict of a published file or folder, under its own names."""
    if source.is_dir():
        files = sorted(source.glob("*.safetensors")) or sorted(source.glob("pytorch_model*.bin"))
        if not files:
            raise RunError(f"{source} holds neither *.safetensors nor pytorch_model*.bin")
        state: dict[str, Tensor] = {}
        for file in files:
            state |= read_state(file, ema)
        return state
    try:
        if source.suffix == ".safetensors":
            return load_file(source)
        # Training checkpoints of DiT keep their command line in a Namespace: data, not code.
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            warnings.catch_warnings(action="ignore"),
        ):
            loaded = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise RunError(
            f"{source} is refused: it holds more than tensors and could run code"
        ) from None
    except (OSError, RuntimeError, SafetensorError, EOFError) as error:
        raise RunError(f"cannot read {source}: {_first_line(error)}") from None
    return _unwrap(loaded, source, ema)


def _unwrap(loaded: Any, source: Path, ema: bool) -> dict[str, Tensor]:
    order = ("ema", "model", "state_dict") if ema else ("model", "state_dict", "ema")
    for key in order:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise RunError(f"{source} is not a checkpoint: no dict of tensors, nor one under {order}")
    return {str(name).removeprefix("module."): value for name, value in loaded.items()}


def _check_keys(own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: Path) -> None:
    faults = []
    if missing := [name for name in own if name not in state]:
        faults.append(f"missing: {_names(missing)}")
    if extra := [name for name in state if name not in own]:
        faults.append(f"unexpected: {_names(extra)}")
    if other := [n for n in own if n in state and own[n].shape != state[n].shape]:
        shapes = [f"{n} {tuple(state[n].shape)} for {tuple(own[n].shape)}" for n in other]
        faults.append(f"of another shape: {_names(shapes)}")
    if faults:
        raise RunError(f"{source} does not fit the model; {'; '.join(faults)}")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
