"""One measurement from its shape to one record."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.attention import attention_contenders, layer_contenders
from benchmarks.generate import GenerateShape, measure_generation
from benchmarks.models import ModelShape, model_contenders
from benchmarks.shape import AttentionShape
from benchmarks.timing import interleave, summarize
from moh.reporting import provenance


def measure(
    what: str, shape: AttentionShape | ModelShape | GenerateShape, seconds: float, rounds: int
) -> dict[str, Any]:
    """Time a shape.

    Args:
        what: ``attention``, ``layer``, ``model``, ``train`` or ``generate``.
        seconds, rounds: see :func:`benchmarks.timing.interleave`.
    """
    if isinstance(shape, GenerateShape):
        return measure_generation(shape, seconds, rounds)
    record: dict[str, Any] = {"what": what, **asdict(shape)}
    if isinstance(shape, ModelShape):
        contenders, limit = model_contenders(shape)
    else:
        plan = shape.plan
        record |= {
            "num_shared": plan.num_shared,
            "top_k": plan.top_k,
            "activated_ratio": round(plan.num_active / plan.num_heads, 4),
        }
        build = attention_contenders if what == "attention" else layer_contenders
        contenders, record["auto"] = build(shape)
        limit = shape.attention_limit if what == "attention" else shape.layer_limit
    times = interleave(contenders, seconds, rounds, shape.device)
    return record | summarize(times, limit)


def environment() -> dict[str, Any]:
    """What the times depend on."""
    hardware = provenance.hardware()
    return {
        "cpu": hardware["cpu"],
        "cores": hardware["cores"],
        "threads": torch.get_num_threads(),
        "gpu": hardware["gpu"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **provenance.code(),
    }
