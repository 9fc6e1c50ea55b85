"""From how many keys on sparse execution pays: ``moh/heads/thresholds.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import moh.heads
from benchmarks.attention import attention_contenders
from benchmarks.measure import environment
from benchmarks.shape import AttentionShape
from benchmarks.timing import interleave, middle, ratio
from moh.heads.thresholds import kind_of_work
from moh.runner import write_text

PATH = Path(moh.heads.__file__).parent / "thresholds.json"
HEADS, HEAD_DIM, SHARED_SHARE = 20, 64, 0.4
BATCHES = (1, 4)
LONG = 1024  # keys from which on the batch makes no difference
SKIPPED = (0.1, 0.25, 0.5)
TOKENS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
CACHED = (256, 1024, 4096, 8192, 16384, 32768)
# Sparse must win by this much: a ratio nearer to one is worth nothing, and may be noise.
MARGIN = 0.97
# In a layer the projections between two calls push what sparse execution needs out of the caches:
# of short sequences that takes some per cent, which attention alone does not show.
SHORT, SHORT_MARGIN = 256, 0.9
# A gain this large twice in a row needs no longer sequences to be believed.
CLEAR = 0.85
SECONDS, ROUNDS = 3.0, 25


def run(device: str) -> None:
    """Measure sparse over dense attention and write the steps of this device."""
    kinds = [(1, False, False)] + [
        (0, causal, training) for causal in (False, True) for training in (False, True)
    ]
    ratios: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for queries, causal, training in kinds:
        kind = kind_of_work(queries, causal, training)
        ratios[kind] = {}
        for batch in BATCHES:
            by_skipped = ratios[kind][str(batch)] = {}
            for skipped in SKIPPED:
                found = _ratios(device, batch, bool(queries), causal, training, skipped)
                by_skipped[str(skipped)] = {str(size): value for size, value in found.items()}
    where = environment()
    measured = json.loads(PATH.read_text())
    measured["devices"][device] = {
        "machine": where["gpu"] or f"{where['cpu']}, {where['threads']} threads",
        "torch": where["torch"],
        "commit": where["commit"],
        "shape": f"{HEADS} heads of width {HEAD_DIM}, float32",
        "steps": {
            kind: [
                [*step, int(batch) * HEADS if int(batch) > 1 else 1]
                for batch, found in by_batch.items()
                for step in steps(found)
            ]
            for kind, by_batch in ratios.items()
        },
        # By batch, skipped share and keys.
        "sparse_over_dense": ratios,
    }
    write_text(PATH, json.dumps(measured, indent=1) + "\n")
    print(f"written: {PATH}", file=sys.stderr)


def steps(ratios: dict[str, dict[str, float]]) -> list[list[float]]:
    """Steps ``[skipped, keys]`` from sparse over dense by skipped share and number of keys.

    The number of keys is the least from which on every larger one that was measured pays.
    """
    found = []
    for skipped, by_size in ratios.items():
        paying = None
        for size in sorted(by_size, key=int, reverse=True):
            if by_size[size] > (SHORT_MARGIN if int(size) < SHORT else MARGIN):
                break
            paying = int(size)
        if paying is not None:
            found.append([float(skipped), paying])
    return found


def _ratios(
    device: str, batch: int, cached: bool, causal: bool, training: bool, skipped: float
) -> dict[int, float]:
    found: dict[int, float] = {}
    sizes = CACHED if cached else TOKENS
    if batch > 1:  # what pays for one sample pays for several
        sizes = tuple(size for size in sizes if size <= LONG)
    for size in sizes:
        shape = AttentionShape(
            tokens=size,
            queries=1 if cached else size,
            heads=HEADS,
            head_dim=HEAD_DIM,
            batch=batch,
            key_heads=HEADS,
            ratio=1 - skipped,
            shared_share=SHARED_SHARE,
            causal=causal,
            backward=training,
            dtype="fp32",
            device=device,
        )
        contenders: dict[str, Any] = attention_contenders(shape)[0]
        times = interleave(
            {name: contenders[name] for name in ("dense", "sparse")}, SECONDS, ROUNDS, device
        )
        found[size] = round(middle(ratio(times, "sparse", "dense"))[0], 3)
        kind = kind_of_work(shape.queries, causal, training)
        print(
            f"{kind:24} batch {batch}  {skipped:4.0%} skipped  {size:6} keys  "
            f"sparse/dense {found[size]:.3f}",
            file=sys.stderr,
            flush=True,
        )
        del contenders, times
        if device == "cuda":
            torch.cuda.empty_cache()
        if len(found) > 1 and max(list(found.values())[-2:]) < CLEAR:
            break
    return found
