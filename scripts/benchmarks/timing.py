"""Times of several ways to do one thing, taken in turns in one process."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any

import torch

Contender = Callable[[], object]
MIN_ROUNDS = 7


def interleave(
    contenders: Mapping[str, Contender], seconds: float, rounds: int, device: str
) -> dict[str, list[float]]:
    """Run all contenders round after round, in another order each time.

    What slows the machine for a while slows them all, so that a round's ratios are worth more
    than its times. The order is drawn (always the same draws): one that always followed the same
    other would find in the caches what that one left there.

    Args:
        seconds: no round starts after this long, once there are seven.
        rounds: at most.

    Returns:
        Seconds of each round by name. A first round, which warms up, is left out.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name]()
    _wait(device)
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        begun = time.perf_counter()
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.perf_counter() - begun > seconds:
                break
            for name in order.sample(names, len(names)):
                started = time.perf_counter()
                contenders[name]()
                _wait(device)
                times[name].append(time.perf_counter() - started)
    finally:
        gc.enable()
    return times


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def middle(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles: median, lower, upper."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = quantiles(values, n=4, method="inclusive")
    return median, lower, upper


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> list[float]:
    """The ratios of two contenders, round by round."""
    return [a / b for a, b in zip(times[one], times[other], strict=True)]


def summarize(times: Mapping[str, list[float]], limit: float) -> dict[str, Any]:
    """The numbers of one measurement: medians in ms, median ratios, quartiles of both.

    Args:
        limit: least possible ratio of MoH to MHA.

    Besides MoH's ways there may be a plain reference, and MHA with a reserved cache.
    """
    found: dict[str, Any] = {}
    names = ["mha", "dense", "sparse", "auto", "reference"]
    for name in names + ["reserved"] * ("reserved" in times):
        taken = times.get(name)
        found[f"{name}_ms"] = round(1e3 * middle(taken)[0], 4) if taken else None
    for name in ("dense", "sparse", "auto"):
        found[f"{name}_over_mha"] = round(middle(ratio(times, name, "mha"))[0], 4)
    best = min(found["dense_ms"], found["sparse_ms"])
    found["auto_over_best"] = round(found["auto_ms"] / best, 4)
    for other in ("reference", "reserved"):
        if times.get(other):
            found[f"auto_over_{other}"] = round(middle(ratio(times, "auto", other))[0], 4)
    found["limit"] = round(limit, 4)
    found["rounds"] = len(times["mha"])
    found["quartiles_ms"] = {
        name: [round(1e3 * value, 4) for value in middle(taken)[1:]]
        for name, taken in times.items()
        if taken
    }
    found["quartiles_over_mha"] = {
        name: [round(value, 4) for value in middle(ratio(times, name, "mha"))[1:]]
        for name in ("dense", "sparse", "auto")
    }
    return found
