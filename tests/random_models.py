"""Runs of small models with every source of randomness that training has."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from tiny_runs import tiny

HEADS = ("heads=moh_ratio", "heads.ratio=0.5")
SIZES = "patch_size:14,embed_dim:32,depth:2,num_heads:4"

# Name -> family and settings of a run of tests/tiny_runs.py.
RANDOM_MODELS = {
    "dropout after projections": ("timm", *HEADS, f"+model.args={{{SIZES},proj_drop_rate:0.2}}"),
    "dropout of attention": ("timm", *HEADS, f"+model.args={{{SIZES},attn_drop_rate:0.2}}"),
    "dropout of attention, MHA": ("timm", f"+model.args={{{SIZES},attn_drop_rate:0.2}}"),
    "dropout of positions": ("timm", *HEADS, f"+model.args={{{SIZES},pos_drop_rate:0.2}}"),
    "dropout of classes": ("timm", *HEADS, f"+model.args={{{SIZES},drop_rate:0.2}}"),
    "patch dropout": ("timm", *HEADS, f"+model.args={{{SIZES},patch_drop_rate:0.25}}"),
    "stochastic depth": ("timm", *HEADS, f"+model.args={{{SIZES}}}", "model.drop_path_rate=0.4"),
    "Mixup": ("vit", "task.mixup=0.8"),
    "TransNeXt": (
        "vit",
        "model.drop_path_rate=0.4",
        "+model.args.proj_drop_rate=0.2",
        "+model.args.attn_drop_rate=0.2",
    ),
    "random heads": ("vit", "heads.selection=random"),
}


def random_run(name: str, folder: Path, *more: str) -> DictConfig:
    """Four updates of 16 samples of one of ``RANDOM_MODELS``."""
    family, *settings = RANDOM_MODELS[name]
    return tiny(family, folder, *settings, "mode=train", "trainer.threads=1", *more)
