"""The number format of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Evaluate in this precision: ``fp32``, or autocast to ``bf16`` or ``fp16``.

    ``fp32`` means it: PyTorch's convolutions would otherwise use TF32 on a GPU.
    """
    if name in DTYPES:
        with torch.autocast(device.type, dtype=DTYPES[name]):
            yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def precision_marks(name: str) -> list[str]:
    """What must be said beside a score in this precision."""
    return [f"{name} autocast"] if name in DTYPES else []
