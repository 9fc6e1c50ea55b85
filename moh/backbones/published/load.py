"""Read weights and put them into a model of this project, without running code from a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from moh.errors import RunError, some
from moh.torch_file import read_torch_file

FAMILIES = {"timm": "vit", "dit": "dit", "llama": "llama"}
SHOWN = 4  # names of keys in one message; the rest are counted

# Where training scripts keep their weights: averaged ones first, then the model's own.
_AVERAGED = ("ema", "state_dict_ema", "model_ema")
_OWN = ("model", "state_dict")
# What DDP and torch.compile put in front of every name.
_WRAPPERS = ("module.", "_orig_mod.")
# transformers, diffusers, timm
_WEIGHT_FILES = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.bin",
)


def load_published(
    model: nn.Module, source: Path, family: str, ema: bool = True, assign: bool = False
) -> None:
    """Load weights under their published names, or under ours, in place.

    Args:
        model: built with the heads of the checkpoint.
        source: ``.pth``, ``.pt``, ``.bin`` or ``.safetensors`` file, or a library's folder.
        family: ``timm``, ``dit`` or ``llama``: whose names to expect.
        ema: averaged weights where the file has both.
        assign: take the tensors themselves, with their type, instead of copying their values.

    Raises:
        RunError: unreadable, holding code, or of another model; every missing, unexpected or
            differently shaped key is named.
    """
    renames = import_module(f"moh.backbones.published.{FAMILIES[family]}")
    try:
        state = renames.from_published(read_state(source, ema))
    except ValueError as error:
        raise RunError(f"{source} does not fit the model; {error}") from None
    if family == "timm":
        state = _as_timm_reads_it(state, model)
    own = model.state_dict()
    tied = _tied(model) if not _tied(model) & state.keys() else set()
    _check_keys({name: value for name, value in own.items() if name not in tied}, state, source)
    model.load_state_dict(state, strict=not tied, assign=assign)
    if assign and tied:
        model.tie_weights()  # type: ignore[operator]


def read_state(source: Path, ema: bool = True) -> dict[str, Tensor]:
    """The state dict of a published file or folder, under its own names.

    Raises:
        RunError: see :func:`load_published`.
    """
    if source.is_dir():
        state: dict[str, Tensor] = {}
        for file in weight_files(source):
            state |= read_state(file, ema)
        return state
    if source.suffix != ".safetensors":
        return _unwrap(read_torch_file(source), source, ema)
    try:
        return load_file(source)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {source}: {_first_line(error)}") from None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights: those of its index, or the one it has.

    Raises:
        RunError: none, or a shard that the index names is not there.
    """
    for name in _WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise RunError(f"cannot read {index}: {_first_line(error)}") from None
            absent = [shard for shard in listed if not (folder / shard).is_file()]
            if absent:
                raise RunError(f"{folder} lacks {some(absent, SHOWN)} of {len(listed)} files")
            return [folder / shard for shard in listed]
        if (folder / name).is_file():
            return [folder / name]
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise RunError(f"{folder} holds neither *.safetensors nor pytorch_model*.bin")
    return files


def _unwrap(loaded: Any, source: Path, ema: bool) -> dict[str, Tensor]:
    order = _AVERAGED + _OWN if ema else _OWN + _AVERAGED
    for key in order:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise RunError(f"{source} is not a checkpoint: no dict of tensors, nor one under {order}")
    return {_unwrapped(str(name)): value for name, value in loaded.items()}


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _as_timm_reads_it(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Other projects' names as the model's module in timm translates them, if it has to."""
    translate = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if translate is None or state.keys() == model.state_dict().keys():
        return state
    try:
        return dict(translate(dict(state), model))
    except (KeyError, RuntimeError, AttributeError, ValueError, IndexError, TypeError):
        return state  # of another model: the check of names says how


def _tied(model: nn.Module) -> set[str]:
    """Names that a model shares with another parameter of its own, so that files leave them out."""
    config = getattr(model, "config", None)
    return {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()


def _check_keys(own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: Path) -> None:
    faults = key_faults(own, state)
    if faults:
        raise RunError(f"{source} does not fit the model; {'; '.join(faults)}")


def key_faults(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """How a state dict differs from a model's own in names and shapes; empty if it does not."""
    faults = []
    if missing := [name for name in own if name not in state]:
        faults.append(f"missing: {some(missing, SHOWN)}")
    if extra := [name for name in state if name not in own]:
        faults.append(f"unexpected: {some(extra, SHOWN)}")
    if other := [n for n in own if n in state and own[n].shape != state[n].shape]:
        shapes = [f"{n} {tuple(state[n].shape)} for {tuple(own[n].shape)}" for n in other]
        faults.append(f"of another shape: {some(shapes, SHOWN)}")
    return faults


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
