"""From which shape on sparse execution is the faster one, as measured.

``thresholds.json`` is written by ``scripts/benchmark.py calibrate``. A device that is not in it
was not measured: there ``auto`` means dense.
"""

from __future__ import annotations

import json
from importlib.resources import files
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


# How it was measured, and for each device and kind of work a list of steps. Read once, with the
# module: torch.compile cannot trace the reading of a file.
MEASURED: dict[str, Any] = json.loads((files("moh.heads") / "thresholds.json").read_text())


def kind_of_work(queries: int, causal: bool, training: bool) -> str:
    """The file's name for a kind of work."""
    if queries == 1:
        return "one query"
    return f"{'causal' if causal else 'bidirectional'} {'training' if training else 'inference'}"


def sparse_is_faster(shape: Shape) -> bool:
    """True where sparse execution was measured to be faster than dense.

    A step ``[skipped, keys, instances]`` says that with this share of heads skipped, or more, and
    this many heads of all samples, or more, sparse is faster from this many keys on. Measured at
    head width 64: narrower heads leave less work to skip for each row that is gathered, and need
    as many more keys.
    """
    steps = MEASURED["devices"].get(shape.device, {}).get("steps", {})
    kind = kind_of_work(shape.queries, shape.causal, shape.training)
    size = shape.keys if shape.queries == 1 else min(shape.queries, shape.keys)
    size *= min(1.0, shape.head_dim / MEASURED["head_dim"])
    return any(
        # Half a head of 32 decides nothing; 0.25 must hold for 1 - 0.75.
        shape.skipped >= skipped - 1e-9 and size >= keys and shape.instances >= instances
        for skipped, keys, instances in steps.get(kind, [])
    )
