"""Parity of the generation metrics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moh.evaluation.fidelity import inception_score, precision_recall
from moh.evaluation.frechet import frechet_distance, statistics_of


def check(case: dict, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, expected, ours) for each expected tensor of a ``metrics`` file."""
    ours: dict[str, float] = {}
    if "features/reference" in tensors:
        reference, generated = tensors["features/reference"], tensors["features/generated"]
        ours["frechet_distance"] = frechet_distance(
            statistics_of(reference), statistics_of(generated)
        )
        ours["precision"], ours["recall"] = precision_recall(reference, generated, case["k"])
    if "probabilities" in tensors:
        ours["inception_score"] = inception_score(
            tensors["probabilities"], case["inception_score_split"]
        )
    for name, expected in tensors.items():
        if name != "probabilities" and not name.startswith("features/"):
            yield name, expected, torch.full_like(expected, ours[name])
