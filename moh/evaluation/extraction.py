"""Features of a set of images: extracted by all processes, kept for sets that many runs need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moh import distribution
from moh.data.order import stable_seed
from moh.evaluation.features import FeatureExtractor
from moh.evaluation.frechet import FeatureStatistics, Gaussian, Moments
from moh.evaluation.image_sets import ImageSource
from moh.tasks.base import Progress

# Features kept for precision and recall; of larger sets evenly spaced ones.
KEPT = 50_000


@dataclass
class SetFeatures:
    """What the scores need of a set of images.

    Attributes:
        pooled: moments of the pooled features.
        spatial: moments of the spatial features, None where the network has none.
        kept_KD: pooled features of at most :data:`KEPT` images, in order.
        probs_NC: class probabilities in order, None where they were not asked for.
    """

    pooled: Moments
    spatial: Moments | None
    kept_KD: Tensor
    probs_NC: Tensor | None = None


@torch.inference_mode()
def extract(
    source: ImageSource,
    extractor: FeatureExtractor,
    batch: int,
    progress: Progress,
    phase: str = "features",
    with_probs: bool = False,
) -> SetFeatures:
    """Features of a set, its batches shared out to the processes.

    Sums are of float64 and added up over the processes, features are gathered in order: nothing
    depends on the number of processes but the last bits of the sums.

    Returns:
        The moments on every process, ``kept_KD`` and ``probs_NC`` on the main one only.
    """
    pooled = FeatureStatistics(extractor.dim)
    spatial = FeatureStatistics(extractor.spatial_dim) if extractor.spatial_dim else None
    wanted = _kept(len(source))
    parts: dict[int, tuple[Tensor, Tensor | None]] = {}
    own = distribution.share_of(range(0, len(source), batch))
    for done, start in enumerate(own, 1):
        found = extractor(source.read(start, min(start + batch, len(source))))
        features_BD = found.pooled_BD.cpu()
        pooled.update(features_BD)
        if spatial is not None and found.spatial_BS is not None:
            spatial.update(found.spatial_BS.cpu())
        kept = wanted[start : start + len(features_BD)]
        probs = found.probs_BC.cpu() if with_probs and found.probs_BC is not None else None
        parts[start] = (features_BD[kept], probs)
        progress(phase, min(done * batch * distribution.world_size(), len(source)), len(source))
    pooled.reduce()
    if spatial is not None:
        spatial.reduce()
    gathered: dict[int, tuple[Tensor, Tensor | None]] = {}
    for share in distribution.gather_to_main(parts) or []:
        gathered |= share
    in_order = [gathered[start] for start in sorted(gathered)]
    kept_KD = torch.cat([kept for kept, _ in in_order] or [torch.empty(0, extractor.dim)])
    probs_BC = [probs for _, probs in in_order if probs is not None]
    return SetFeatures(pooled, spatial, kept_KD, torch.cat(probs_BC) if probs_BC else None)


def _kept(total: int) -> Tensor:
    """Which of ``total`` images stand for the set in precision and recall, bool (total,)."""
    wanted = torch.zeros(total, dtype=torch.bool)
    count = min(total, KEPT)
    wanted[torch.arange(count) * total // count] = True
    return wanted


def cached_features(
    source: ImageSource,
    extractor: FeatureExtractor,
    batch: int,
    cache: Path | None,
    progress: Progress,
    phase: str = "reference",
) -> SetFeatures:
    """:func:`extract` of a set that many runs are compared with, kept between them.

    Args:
        cache: folder of the files; None keeps nothing.
    """
    what = (source.fingerprint(), extractor.name, extractor.weights_sha256, KEPT)
    path = cache / f"features-{stable_seed(*what):016x}.safetensors" if cache else None
    # Either all processes find it or none.
    found = _load(path) if path is not None and distribution.is_main() else None
    anyone = torch.tensor(int(found is not None))
    distribution.sum_over_processes(anyone)
    if anyone:
        empty = SetFeatures(FeatureStatistics(0), None, torch.empty(0, 0))
        return found or empty
    features = extract(source, extractor, batch, progress, phase)
    features.pooled = _gaussian(features.pooled)
    if features.spatial is not None:
        features.spatial = _gaussian(features.spatial)
    if path is not None and distribution.is_main():
        _save(features, path)
    return features


def _gaussian(moments: Moments) -> Gaussian:
    return moments.gaussian() if isinstance(moments, FeatureStatistics) else moments


_PARTS = ("mean", "covariance", "root")


def _save(features: SetFeatures, path: Path) -> None:
    tensors = {"kept": features.kept_KD.contiguous()}
    for name, moments in (("pooled", features.pooled), ("spatial", features.spatial)):
        if moments is not None:
            for part in _PARTS:
                # The root takes seconds, and every distance to this set needs it.
                tensors[f"{name}.{part}"] = getattr(moments, part).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _load(path: Path) -> SetFeatures | None:
    """What :func:`_save` wrote, None if it is not there or not whole."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError):
        return None

    spatial = None
    try:
        pooled, kept = (Gaussian(*(stored[f"pooled.{part}"] for part in _PARTS)), stored["kept"])
        if "spatial.mean" in stored:
            spatial = Gaussian(*(stored[f"spatial.{part}"] for part in _PARTS))
    except KeyError:
        return None
    return SetFeatures(pooled, spatial, kept)
