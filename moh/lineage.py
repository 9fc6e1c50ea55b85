"""What other runs have trained: rows that evaluate it instead of training anew."""

from __future__ import annotations

import json
from pathlib import Path

from moh.config import Config
from moh.errors import RunError


def trained_weights(config: Config) -> Path:
    """What ``weights_of`` and ``weights_at`` name: a run's folder, or one of its checkpoints.

    Raises:
        RunError: no such run was trained, or several differ in their settings.
    """
    name, at = config.weights_of, config.weights_at
    folders = sorted((Path(config.runs_dir) / str(name)).glob(f"seed{config.seed}-*"))
    if at is None:
        found = [folder for folder in folders if _trained(folder)]
        wanted = f"{name} is not trained with seed {config.seed}"
    else:
        kept = [folder / "checkpoints" / f"{at:013d}" for folder in folders]
        found = [folder for folder in kept if folder.is_dir()]
        wanted = f"{name} with seed {config.seed} has no checkpoint at sample {at}"
    if not found:
        raise RunError(
            f"{config.name}: {wanted} in {config.runs_dir}; run it first "
            f"(python -m moh experiment={name} seed={config.seed}) or set checkpoint="
        )
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise RunError(f"{config.name}: several runs fit; choose one with checkpoint=: {listed}")
    return found[0]


def _trained(folder: Path) -> bool:
    """True if the run has trained its whole budget, evaluated or not."""
    try:
        return bool(json.loads((folder / "run.json").read_text())["share"] >= 1)
    except (OSError, ValueError, KeyError, TypeError):
        return False
