"""Checkpoints: written aside, renamed when whole, checked before use."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from moh import distribution
from moh.backbones.convert import head_plan
from moh.errors import RunError

MANIFEST = "manifest.json"
NEARLY_FULL = 16 * 2**20  # bytes


def save(
    folder: Path,
    samples: int,
    model: nn.Module,
    optimizer: Optimizer,
    ema: nn.Module | None,
    scaler: torch.amp.GradScaler | None,
    origin: Mapping[str, Any] | None = None,
    keep: int = 2,
    keep_at: Collection[int] = (),
) -> Path:
    """Write a checkpoint and drop all but the ``keep`` newest and those at ``keep_at``.

    Args:
        folder: the run's ``checkpoints`` folder.
        samples: seen so far; names the checkpoint.
        origin: what a run that goes on from here must have in common with this one, plain data.

    Raises:
        RunError: it could not be written (a full disk, no permission); what was there stays.
    """
    target = folder / f"{samples:013d}"
    aside = folder / f".{target.name}.tmp"

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        plan = head_plan(model)
        extra = {
            "samples": samples,
            "head_plan": plan.to_dict() if plan else None,
            "scaler": scaler.state_dict() if scaler else None,
            "origin": dict(origin or {}),
        }
        (aside / "extra.json").write_text(json.dumps(extra))
        sizes = {path.name: path.stat().st_size for path in aside.iterdir()}
        (aside / MANIFEST).write_text(json.dumps(sizes))
        for path in aside.iterdir():
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        _sync(folder)
        for old in sorted(folder.glob("[0-9]*"))[:-keep]:
            if int(old.name) not in keep_at:
                shutil.rmtree(old, ignore_errors=True)

    try:
        distribution.on_main(begin)
        with _quiet():
            dcp.state_dict_saver.save(
                _state(model, optimizer, ema), checkpoint_id=str(aside), no_dist=_alone()
            )
        distribution.on_main(finish)
    except (OSError, RunError, dcp.api.CheckpointException) as error:
        reason = _reason(error, folder)
        if distribution.is_main():
            shutil.rmtree(aside, ignore_errors=True)
        raise RunError(f"cannot write checkpoint {target}: {reason}") from None
    return target


def _reason(error: BaseException, folder: Path) -> str:
    """One line; of a failure that every process reports, the main one's or the first."""
    if isinstance(error, dcp.api.CheckpointException):
        error = error.failures[min(error.failures)][0]
    # PyTorch's writer tells of a full disk as of a wrong position in its file.
    if shutil.disk_usage(folder).free < NEARLY_FULL:
        return os.strerror(errno.ENOSPC)
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; torn ones are named and passed over."""
    for path in sorted(folder.glob("[0-9]*"), reverse=True):
        if whole(path):
            return path
        if distribution.is_main():
            print(f"{path} is not whole; trying the one before it")
    return None


def whole(path: Path) -> bool:
    """True if every file of the checkpoint has the size it was written with."""
    try:
        sizes = json.loads((path / MANIFEST).read_text())
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def origin(path: Path) -> dict[str, Any]:
    """What :func:`save` was told of the run; empty for checkpoints of earlier versions."""
    found: dict[str, Any] = json.loads((path / "extra.json").read_text()).get("origin", {})
    return found


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    ema: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> int:
    """Restore a checkpoint in place; without an optimizer only the weights.

    Returns:
        Samples seen.

    Raises:
        RunError: it is of another model, or of other heads.
    """
    extra = json.loads((path / "extra.json").read_text())
    plan = head_plan(model)
    # Plans may share every shape and differ in top_k alone, which no tensor would show.
    if extra["head_plan"] != (plan.to_dict() if plan else None):
        raise RunError(f"checkpoint {path} does not fit this model: it has other heads")
    state = _state(model, optimizer, ema)
    try:
        with _quiet():
            dcp.state_dict_loader.load(state, checkpoint_id=str(path), no_dist=_alone())
    except (dcp.api.CheckpointException, RuntimeError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RunError(f"checkpoint {path} does not fit this model: {reason}") from None
    if optimizer is None:
        set_model_state_dict(model, state["model"])
    else:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    if ema is not None:
        set_model_state_dict(ema, state["ema"])
    if scaler is not None and extra["scaler"]:
        scaler.load_state_dict(extra["scaler"])
    return int(extra["samples"])


def load_weights(path: Path, model: nn.Module, ema: bool) -> int:
    """Put the weights of a checkpoint into a model, the averaged ones if it has them and ``ema``.

    Returns:
        Samples seen.

    Raises:
        RunError: it is of another model, or of other heads.
    """
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    if not ema or not any(name.startswith("ema.") for name in names):
        return load(path, model)
    average = AveragedModel(model)
    samples = load(path, model, ema=average)
    model.load_state_dict(average.module.state_dict())
    return samples


def _state(model: nn.Module, optimizer: Optimizer | None, ema: nn.Module | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if optimizer is None:
        state["model"] = get_model_state_dict(model)
    else:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    if ema is not None:
        state["ema"] = get_model_state_dict(ema)
    return state


def _alone() -> bool:
    return distribution.world_size() == 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's reminder that no process group exists, where there shall be none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
