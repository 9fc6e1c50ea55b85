"""From which shape on sparse execution is the faster one, as measured.

``thresholds.json`` is written by ``scripts/benchmark.py calibrate``. A device that is not in it
was not measured: there ``auto`` means dense.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """What the faster execution depends on.

    Attributes:
        device: PyTorch's name of the kind.
        queries: N.
        keys: M.
        head_dim: K.
        instances: heads of all samples, B * H.
        skipped: heads that are not active over all heads.
        causal: whether a query sees about half of the keys.
        training: whether a backward pass follows.
    """

    device: str
    queries: int
    keys: int
    head_dim: int
    instances: int
    skipped: float
    causal: bool
    training: bool


# How it was measured, and for each device and kind of work from how many keys on sparse execution
# pays. Read once, with the module: torch.compile cannot trace the reading of a file.
MEASURED: dict[str, Any] = json.loads((files("moh.heads") / "thresholds.json").read_text())


UNEVEN = ", uneven"  # behind a kind of work: some heads have far more queries than others


def kind_of_work(queries: int, causal: bool, training: bool) -> str:
    """The file's name for a kind of work."""
    if queries == 1:
        return "one query"
    return f"{'causal' if causal else 'bidirectional'} {'training' if training else 'inference'}"


def sparse_is_faster(shape: Shape, uneven: bool = False) -> bool:
    """True where sparse execution was measured to be faster than dense.

    The file holds the least number of keys by heads of all samples and by skipped share; between
    two shares the number is interpolated, and below the least one sparse never pays. Measured at
    head width 64: narrower heads leave less work to skip for each row that is gathered, and need
    as many more keys.

    Args:
        uneven: whether the busiest head may have any number of times the queries of the others.
    """
    kinds = MEASURED["devices"].get(shape.device, {}).get("least_keys", {})
    kind = kind_of_work(shape.queries, shape.causal, shape.training)
    by_instances = (kinds.get(f"{kind}{UNEVEN}") if uneven else None) or kinds.get(kind)
    if not by_instances:
        return False
    measured = sorted(by_instances, key=int)
    reached = [known for known in measured if int(known) <= shape.instances] or measured[:1]
    size = shape.keys if shape.queries == 1 else min(shape.queries, shape.keys)
    size *= min(1.0, shape.head_dim / MEASURED["head_dim"])
    least = _interpolate(by_instances[reached[-1]], shape.skipped)
    return least is not None and size >= least


def _interpolate(least_keys: dict[str, float | None], skipped: float) -> float | None:
    """The least number of keys for a skipped share, geometrically between measured ones."""
    known = sorted((float(share), keys) for share, keys in least_keys.items())
    # Half a head of 32 decides nothing; 0.25 must hold for 1 - 0.75.
    reached = [point for point in known if point[0] <= skipped + 1e-9]
    if not reached:
        return None
    for (low, more), (high, fewer) in pairwise(known):
        if low <= skipped < high and more is not None and fewer is not None:
            return math.exp(
                math.log(more) + (math.log(fewer / more)) * (skipped - low) / (high - low)
            )
    return reached[-1][1]
