"""What ``checkpoint=`` names: a published file, a library's folder, a run, timm's own weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import nn

from moh.backbones.published.folders import CONFIG, check_same
from moh.backbones.published.load import load_published, weight_files
from moh.config import PRETRAINED, Config
from moh.data.classes import relabelling
from moh.errors import RunError
from moh.tasks.base import Task
from moh.training import checkpoint

CLASSES = "classes.json"  # beside a folder's config.json


@dataclass(frozen=True)
class Weights:
    """Weights somewhere on disk.

    Attributes:
        kind: ``file`` of published weights, ``folder`` with a ``config.json``, ``run`` of ours.
        path: that file, that folder, or the newest whole checkpoint of the run.
    """

    kind: Literal["file", "folder", "run"]
    path: Path

    @property
    def files(self) -> list[Path]:
        """The files that make up the weights, in order of name."""
        if self.kind == "file":
            return [self.path]
        if self.kind == "folder":
            return [*weight_files(self.path), self.path / CONFIG]
        return sorted(path for path in self.path.iterdir() if path.is_file())

    @property
    def sha256(self) -> str:
        """Of a file its own; of several, of their names and contents."""
        if self.kind == "file":
            return _sha256(self.path, self.path.stat().st_mtime_ns)
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(f"{path.name} {_sha256(path, path.stat().st_mtime_ns)}\n".encode())
        return digest.hexdigest()

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes that they were trained on, in order; None where nothing says.

        A run's record says it, and a file beside weights that were converted from one.
        """
        if self.kind == "file":
            return None
        is_run = self.kind == "run"
        record = self.path.parent.parent / "run.json" if is_run else self.path / CLASSES
        try:
            names = json.loads(record.read_text())["classes"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return tuple(names) if names else None

    def load_into(self, model: nn.Module, family: str, ema: bool) -> int | None:
        """Load them in place.

        Args:
            model: built with the heads of the weights.
            family: ``timm``, ``dit`` or ``llama``.
            ema: averaged weights where there are any.

        Returns:
            Samples that a run of ours has trained them on; None where nobody says.

        Raises:
            RunError: unreadable, holding code, of another model or of other heads; one line.
        """
        if self.kind == "run":
            return checkpoint.load_weights(self.path, model, ema)
        if self.kind == "folder":
            check_same(model, self.path)
        load_published(model, self.path, family, ema)
        return None


def locate(named: str | Path) -> Weights:
    """What a path is.

    Args:
        named: a file of weights; a folder of timm, diffusers or transformers; a run folder, its
            ``checkpoints`` or one of these.

    Raises:
        RunError: nothing of the kind.
    """
    path = Path(named)
    if path.is_file():
        # The file of a library's folder means the folder, whose config says what heads it has.
        beside = path.suffix == ".safetensors" and (path.parent / CONFIG).is_file()
        return Weights("folder", path.parent) if beside else Weights("file", path)
    if not path.is_dir():
        raise RunError(f"checkpoint {path} does not exist")
    if (path / CONFIG).is_file():
        return Weights("folder", path)
    place = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    whole = place if (place / checkpoint.MANIFEST).is_file() else checkpoint.newest(place)
    if whole is not None:
        return Weights("run", whole)
    if (path / "config.yaml").is_file():
        raise RunError(f"{path} has no checkpoint; train first (mode=both) or name a file")
    raise RunError(
        f"{path} is no checkpoint: neither a run folder nor a folder with {CONFIG} and weights"
    )


def identity(named: str) -> str:
    """A checkpoint's name by content: the SHA-256 of its files, or ``pretrained``."""
    return PRETRAINED if named == PRETRAINED else locate(named).sha256


def settle_classes(config: Config, folder: Path, task: Task) -> tuple[str, ...] | None:
    """Make the data agree with the classes that the weights of a run were trained on.

    Args:
        folder: of the run, whose weights these are where no others are named.

    Returns:
        What the weights were, or will be, trained on, for the run's record; None if unknown.

    Raises:
        RunError: the data are of other classes, or a training would go on with another order.
    """
    if config.mode != "eval":
        begun = checkpoint.newest(folder / "checkpoints")
        known = Weights("run", begun).classes if begun is not None else None
        if known and task.classes and task.classes != known:
            # Data of the same names may only be in another order.
            relabelling(known, task.classes, f"data.root={config.data.root}")
            raise RunError(
                f"data.root={config.data.root}: classes in another order than the run began with"
            )
        return known or task.classes
    if config.checkpoint == PRETRAINED:
        return None
    known = locate(config.checkpoint or folder).classes
    if known:
        task.take_classes(known)
    return known


def describe(named: str, model: nn.Module) -> dict[str, Any]:
    """A checkpoint as ``run.json`` holds it."""
    if named != PRETRAINED:
        return {"path": named, "sha256": locate(named).sha256}
    if hasattr(model, "generate"):  # of transformers: the record's "pretrained" says which
        return {"path": named, "sha256": None}
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    source = next((cfg[key] for key in ("file", "hf_hub_id", "url") if cfg.get(key)), None)
    return {"path": named, "sha256": None, "source": source}


@cache
def _sha256(path: Path, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
