"""Batch norm in a run that is split: the only layers whose output depends on other samples.

As in DDP and timm, statistics are those of one process's micro-batch. So runs of models with
batch norm depend on ``trainer.device_batch`` and on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.utils import distribute_bn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from moh import distribution


def has_batch_norm(model: nn.Module) -> bool:
    """True for a model that normalises over its batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


@contextmanager
def unchanged_statistics(model: nn.Module) -> Iterator[None]:
    """Running statistics are after this block what they were before it."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def average_statistics(model: nn.Module) -> None:
    """Make the running statistics of all processes their mean, in place.

    Running statistics are linear in those of the batches: it does not matter when this is done.
    """
    if distribution.world_size() > 1:
        distribute_bn(model, distribution.world_size(), reduce=True)
