"""Mixture-of-Head attention (arXiv 2410.11842): the method, its backbones, its experiments.

``moh.heads`` is the method and needs torch alone; ``moh.convert(model, plan)`` puts it into a
built timm, diffusers or transformers model, ``moh.revert(model)`` takes it out again.
"""

from moh.backbones.convert import attention_layers, convert, head_plan, head_shapes, revert
from moh.heads import (
    HeadPlan,
    LayerPlan,
    RouterOptions,
    balance_loss,
    head_load,
    set_execution,
)

__version__ = "0.1.0"

__all__ = [
    "HeadPlan",
    "LayerPlan",
    "RouterOptions",
    "attention_layers",
    "balance_loss",
    "convert",
    "head_load",
    "head_plan",
    "head_shapes",
    "revert",
    "set_execution",
]
