"""Files of ``torch.save`` read without running what they may bring."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import warnings
from pathlib import Path
from typing import Any

import torch

from moh.errors import RunError, some

# A zip archive (PyTorch 1.6 and later), or a pickle of protocol 2 and later.
_MAGIC = (b"PK\x03\x04", b"\x80")
_SHOWN = 8  # names of what a pickle would call in one message


def read_torch_file(path: Path) -> Any:
    """What a file of ``torch.save`` holds; tensors are mapped where the file allows it.

    Raises:
        RunError: unreadable, no such file, or holding code, which is named; one line.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    if not start.startswith(_MAGIC):
        what = "it is empty" if not start else "neither PyTorch's file nor safetensors"
        raise RunError(f"{path} is not a checkpoint: {what}")
    try:
        return _load(path)
    except pickle.UnpicklingError as error:
        if names := _foreign(path):
            raise RunError(
                f"{path} is refused: it holds more than tensors and could run code ({names})"
            ) from None
        raise RunError(f"{path} is not a checkpoint: {_reason(error)}") from None
    # What a damaged pickle ends in is whatever its bytes happen to say.
    except Exception as error:
        raise RunError(f"cannot read {path}: {_reason(error)}") from None


def _load(path: Path) -> Any:
    # Training scripts keep their command line in a Namespace: data, not code.
    with (
        torch.serialization.safe_globals([argparse.Namespace]),
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            # Mapped, so that a checkpoint of gigabytes is not in memory beside the model.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of before PyTorch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)


def _foreign(path: Path) -> str:
    """Names of what a pickle would call, listed without calling it."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # of another form than PyTorch's zip archive: what was met first
        names = _called(path)
    names = [name for name in names if name != "argparse.Namespace"]
    return some(names, _SHOWN)


def _called(path: Path) -> list[str]:
    """What a plain pickle would call, read off its instructions."""
    found, words = [], [""]
    with path.open("rb") as file:
        try:
            for code, argument, _ in pickletools.genops(file):
                if code.name in ("GLOBAL", "INST"):
                    found.append(str(argument).replace(" ", "."))
                elif code.name == "STACK_GLOBAL":
                    found.append(".".join(words[-2:]))
                elif isinstance(argument, str):
                    words.append(argument)
        except ValueError:
            pass  # no pickle to its end: what was read before
    return sorted(set(found))


def _reason(error: Exception) -> str:
    """The first sentence of a message."""
    if "zip archive" in str(error):
        return "the file is incomplete or damaged"
    line = next(iter(str(error).strip().splitlines()), "")
    return line.partition(". ")[0] or type(error).__name__
