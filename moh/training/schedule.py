"""Learning rate as a function of the samples seen."""

from __future__ import annotations

import math

from moh.config import OptimConfig


def learning_rate(optim: OptimConfig, samples: int, total: int) -> float:
    """Linear warm-up, then constant or a half cosine down to ``min_lr``.

    Args:
        samples: seen before the update.
        total: the run's budget.
    """
    if samples < optim.warmup_samples:
        return optim.warmup_lr + (optim.lr - optim.warmup_lr) * samples / optim.warmup_samples
    if optim.schedule == "constant":
        return optim.lr
    passed = (samples - optim.warmup_samples) / max(1, total - optim.warmup_samples)
    return optim.min_lr + (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * min(passed, 1))) / 2
