"""What generated images are compared with: pictures, or the statistics that ADM's files bring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moh.errors import RunError
from moh.evaluation.extraction import SetFeatures, cached_features
from moh.evaluation.features import FeatureExtractor
from moh.evaluation.frechet import Gaussian
from moh.evaluation.image_sets import (
    ARRAY,
    ImageSource,
    NpzImages,
    array_names,
    open_images,
    small_arrays,
)
from moh.tasks.base import Progress


@dataclass
class Reference:
    """What generated images are compared with.

    Attributes:
        images: whose features give precision and recall, and the moments where the file brings
            none; None if there are no pictures.
        label: in words, for the protocol.
        pooled, spatial: moments that the file brings, over a set that it does not hold.
    """

    images: ImageSource | None
    label: str
    pooled: Gaussian | None = None
    spatial: Gaussian | None = None

    @classmethod
    def of(cls, images: ImageSource, label: str | None = None) -> Reference:
        """All scores from the pictures of a set."""
        return cls(images, label or f"{len(images):,} images of {images.label}")

    @classmethod
    def open(cls, path: Path, features: type[FeatureExtractor]) -> Reference:
        """A folder of pictures, or an ``.npz`` in the form of ADM's reference batches.

        Such a file brings ``mu`` and ``sigma`` of the Inception features of a whole data set,
        ``mu_s`` and ``sigma_s`` of the spatial ones, and in ``arr_0`` some of its pictures; any
        of the three may be missing.

        Args:
            features: the network of the scores. The moments count for Inception only.

        Raises:
            RunError: neither, or arrays that are missing or of another shape.
        """
        if path.suffix != ".npz" or not path.is_file():
            return cls.of(open_images(path))
        names = array_names(path)
        moments = _stored_moments(path, names, features)
        images = NpzImages(path) if ARRAY in names else None
        if not moments:
            if images is None:
                listed = ", ".join(names) or "nothing"
                raise RunError(
                    f"{path} holds {listed}: features {features.name} need pictures in {ARRAY}"
                    + ("" if features.spatial_dim == 0 else ", or mu and sigma")
                )
            return cls.of(images)
        pictures = f", {len(images):,} images" if images is not None else ""
        label = f"the statistics of {path.name}{pictures}"
        return cls(images, label, moments["mu"], moments.get("mu_s"))

    def features(
        self,
        extractor: FeatureExtractor,
        batch: int,
        cache: Path | None,
        progress: Progress,
    ) -> SetFeatures:
        """Moments, and features for precision and recall; of the main process."""
        if self.images is None:
            assert self.pooled is not None
            return SetFeatures(self.pooled, self.spatial, torch.empty(0, extractor.dim))
        found = cached_features(self.images, extractor, batch, cache, progress)
        if self.pooled is not None:
            return SetFeatures(self.pooled, self.spatial, found.kept_KD)
        return found


def _stored_moments(
    path: Path, names: list[str], features: type[FeatureExtractor]
) -> dict[str, Gaussian]:
    """``mu`` and ``mu_s`` with their covariances, where a file has them and they count."""
    wanted = {"mu": ("sigma", features.dim), "mu_s": ("sigma_s", features.spatial_dim)}
    # The moments are of Inception features, the only ones with a spatial part.
    present = {n for pair in wanted.items() for n in (pair[0], pair[1][0])} & set(names)
    if not features.spatial_dim or not present:
        return {}
    found = {}
    for mean, (covariance, dim) in wanted.items():
        if mean == "mu_s" and not present & {mean, covariance}:
            continue
        if not {mean, covariance} <= present:
            raise RunError(f"{path} needs {mean} and {covariance}; it holds {', '.join(names)}")
        arrays = small_arrays(path, (mean, covariance))
        shapes = tuple(arrays[mean].shape), tuple(arrays[covariance].shape)
        if shapes != ((dim,), (dim, dim)):
            raise RunError(
                f"{path}: {mean} is {shapes[0]}, {covariance} {shapes[1]}; features "
                f"{features.name} give ({dim},) and ({dim}, {dim})"
            )
        found[mean] = Gaussian(arrays[mean], arrays[covariance])
    return found
