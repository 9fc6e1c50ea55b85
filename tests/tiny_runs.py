"""Runs of four updates, for tests of everything that surrounds a model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from omegaconf import DictConfig

from moh.cli import compose_config
from moh.runner import run_id
from moh.training import checkpoint

TINY = {
    "vit": ["experiment=demo/vit/moh_50", "model.args.depths=[1,1]"],
    "timm": [
        "experiment=demo/vit/mha",
        "model=timm",
        "model.name=vit_tiny_patch16_224",
        "model.pretrained=false",
        "model.drop_path_rate=0",
        "model.num_classes=10",
    ],
    "dit": [
        "experiment=demo/dit/moh_50",
        "model.depth=1",
        "eval.samples=20",
        "eval.sampling_steps=2",
    ],
    "llm": [
        "experiment=demo/llm/moh_50",
        "model.num_hidden_layers=1",
        "eval.tasks=[]",
        "eval.data_root=null",
    ],
}


@cache
def shared_cache() -> Path:
    """Tokenised text and reference features, made once for all runs of the tests."""
    return Path(tempfile.mkdtemp(prefix="moh-test-cache-"))


def tiny(family: str, folder: Path, *more: str) -> DictConfig:
    """A run of four updates of 16 samples."""
    return compose_config(tiny_command(family, folder, *more))


def tiny_command(family: str, folder: Path, *more: str) -> list[str]:
    """What a user types for :func:`tiny`, behind ``python -m moh``."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    if not (folder / "runs" / "cache").exists():
        (folder / "runs" / "cache").symlink_to(shared_cache())
    return [
        *TINY[family],
        "trainer.samples=64",
        "trainer.global_batch=16",
        "trainer.log_every=1",
        "optim.warmup_samples=16",
        f"runs_dir={folder}/runs",
        f"results_dir={folder}/results",
        "logger.progress=false",
        "logger.wandb=disabled",
        *more,
    ]


def folder_of(config: DictConfig) -> Path:
    return Path(config.runs_dir) / run_id(config)


def weights(config: DictConfig) -> dict[str, torch.Tensor]:
    """Every tensor of a run's newest checkpoint: model, averages, optimiser."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    path = checkpoint.newest(folder_of(config) / "checkpoints")
    state: dict = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(str(path)),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}/{key}", item)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    walk("", state)
    return flat
