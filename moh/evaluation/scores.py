"""Scores of a generated set against a reference, by the names that they may carry."""

from __future__ import annotations

from typing import NamedTuple

from moh.evaluation.extraction import SetFeatures
from moh.evaluation.features import FeatureExtractor
from moh.evaluation.fidelity import inception_score, precision_recall
from moh.evaluation.frechet import frechet_distance

NEIGHBOURS = 3  # of precision and recall, as in ADM's suite


class Score(NamedTuple):
    """One number.

    Attributes:
        label: as a person reads it.
        detail: what its protocol adds to that of the set, or nothing.
    """

    label: str
    value: float
    higher_is_better: bool
    detail: str = ""


def scores(
    extractor: FeatureExtractor, reference: SetFeatures, generated: SetFeatures
) -> dict[str, Score]:
    """Every score that the network and the reference allow, by name, the Fréchet distance first.

    The names ``fid``, ``sfid``, ``inception_score``, ``precision`` and ``recall`` belong to
    Inception; any other network's scores carry its own.
    """
    own = extractor.metric.lower().replace("-", "_")
    suffix = "" if extractor.name == "inception" else f"_{extractor.name}"
    distance = frechet_distance(reference.pooled, generated.pooled)
    found = {own: Score(extractor.metric, distance, False)}
    if reference.spatial is not None and generated.spatial is not None:
        spatial = frechet_distance(reference.spatial, generated.spatial)
        found["sfid"] = Score("sFID", spatial, False, "first 7 channels of mixed_6/conv")
    if generated.probs_NC is not None:
        value = inception_score(generated.probs_NC)
        found["inception_score"] = Score("Inception score", value, True, "splits of 5,000")
    counts = len(reference.kept_KD), len(generated.kept_KD)
    if min(counts) > NEIGHBOURS:
        device = next(extractor.parameters()).device
        precision, recall = precision_recall(
            reference.kept_KD.to(device), generated.kept_KD.to(device), NEIGHBOURS
        )
        detail = f"k = {NEIGHBOURS}, {counts[0]:,} real and {counts[1]:,} generated images"
        found[f"precision{suffix}"] = Score("Precision", precision, True, detail)
        found[f"recall{suffix}"] = Score("Recall", recall, True, detail)
    return found
