"""From how many keys on sparse execution pays: ``moh/heads/thresholds.json``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

import moh.heads
from benchmarks.attention import attention_contenders
from benchmarks.measure import environment
from benchmarks.shape import AttentionShape
from benchmarks.timing import interleave, middle, ratio
from moh.heads.thresholds import UNEVEN, kind_of_work
from moh.runner import write_text

PATH = Path(moh.heads.__file__).parent / "thresholds.json"
HEADS, HEAD_DIM, SHARED_SHARE = 20, 64, 0.4
BATCHES = (1, 4)
LONG = 1024  # keys from which on the batch makes no difference
SKIPPED = (0.1, 0.25, 0.5)
TOKENS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
CACHED = (256, 1024, 4096, 8192, 16384, 32768)
LONGEST_TRAINED = 8192  # keys; what has not paid up to here is never taken
# A gain this large twice in a row, or any at this many keys, needs no longer sequences.
CLEAR, FAR = 0.85, 4096
SECONDS, ROUNDS = 3.0, 25


def run(device: str) -> None:
    """Measure sparse over dense attention and write from how many keys on it pays."""
    kinds = [(True, False, False, "even")] + [
        (False, causal, training, "even") for causal in (False, True) for training in (False, True)
    ]
    # Only on a CPU are selections counted, and only of bidirectional attention does it matter.
    if device == "cpu":
        kinds += [(False, False, training, "skewed") for training in (False, True)]
    ratios: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for cached, causal, training, load in kinds:
        kind = kind_of_work(1 if cached else 2, causal, training)
        kind += UNEVEN if load == "skewed" else ""
        ratios[kind] = {}
        for batch in BATCHES:
            by_skipped = ratios[kind][str(batch * HEADS)] = {}
            for skipped in SKIPPED:
                found = _ratios(device, kind, batch, cached, causal, training, skipped, load)
                if batch > 1:
                    alone = ratios[kind][str(HEADS)][str(skipped)]
                    found |= {int(n): value for n, value in alone.items() if int(n) > LONG}
                by_skipped[str(skipped)] = {str(size): value for size, value in found.items()}
    where = environment()
    measured = json.loads(PATH.read_text())
    measured["devices"][device] = {
        "machine": where["gpu"] or f"{where['cpu']}, {where['threads']} threads",
        "torch": where["torch"],
        "commit": where["commit"],
        "shape": f"{HEADS} heads of width {HEAD_DIM}, float32",
        # By heads of all samples and skipped share; null where sparse never pays.
        "least_keys": {
            kind: {
                instances: {skipped: least_keys(by_size) for skipped, by_size in found.items()}
                for instances, found in by_instances.items()
            }
            for kind, by_instances in ratios.items()
        },
        # By heads of all samples, skipped share and keys.
        "sparse_over_dense": ratios,
    }
    write_text(PATH, json.dumps(measured, indent=1) + "\n")
    print(f"written: {PATH}", file=sys.stderr)


def least_keys(by_size: dict[str, float]) -> int | None:
    """From how many keys on to take sparse, so that the worst choice at a measured size is best.

    Args:
        by_size: sparse over dense by number of keys.

    Returns:
        Where the ratio passes one between two sizes, on logarithmic axes; None for never.
    """
    sizes = sorted(by_size, key=int)
    ratios = [by_size[size] for size in sizes]

    def worst(first: int) -> float:
        return max([1 / ratio for ratio in ratios[:first]] + ratios[first:])

    # Of equally good ones the largest.
    first = min(range(len(sizes), -1, -1), key=worst)
    if first == len(sizes):
        return None
    if first and ratios[first - 1] > 1 > ratios[first]:
        before, after = int(sizes[first - 1]), int(sizes[first])
        part = math.log(ratios[first - 1]) / math.log(ratios[first - 1] / ratios[first])
        return round(before * (after / before) ** part)
    return int(sizes[first])


def _ratios(
    device: str,
    kind: str,
    batch: int,
    cached: bool,
    causal: bool,
    training: bool,
    skipped: float,
    load: str,
) -> dict[int, float]:
    found: dict[int, float] = {}
    sizes = CACHED if cached else TOKENS
    most = LONG if batch > 1 else LONGEST_TRAINED if training else max(sizes)
    sizes = tuple(size for size in sizes if size <= most)
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
            load=load,
        )
        contenders: dict[str, Any] = attention_contenders(shape)[0]
        times = interleave(
            {name: contenders[name] for name in ("dense", "sparse")}, SECONDS, ROUNDS, device
        )
        found[size] = round(middle(ratio(times, "sparse", "dense"))[0], 3)
        print(
            f"{kind:32} batch {batch}  {skipped:4.0%} skipped  {size:6} keys  "
            f"sparse/dense {found[size]:.3f}",
            file=sys.stderr,
            flush=True,
        )
        del contenders, times
        if device == "cuda":
            torch.cuda.empty_cache()
        last = list(found.values())[-2:]
        if max(last) < (1 if size >= FAR else CLEAR) and len(last) > 1:
            break
    return found
