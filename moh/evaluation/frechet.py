"""Fréchet distance between two sets of features, from streamed moments."""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches; float64 sums.

    The three sums add up: over processes by an all-reduce, over sets by ``+=``.

    Args:
        dim: width of a feature vector.
        device: where the sums are kept.

    Attributes:
        count: vectors seen, float64 scalar.
        total: their sum (D,).
        outer: sum of their outer products (D, D).
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.total = torch.zeros(dim, dtype=torch.float64, device=device)
        self.outer = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    def update(self, features_ND: Tensor) -> None:
        """Add a batch of feature vectors (N, D)."""
        features = features_ND.to(self.total)
        self.count += len(features)
        self.total += features.sum(0)
        self.outer += features.T @ features

    def __iadd__(self, other: FeatureStatistics) -> FeatureStatistics:
        self.count += other.count
        self.total += other.total
        self.outer += other.outer
        return self

    @property
    def mean(self) -> Tensor:
        """(D,)."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance (D, D).

        Raises:
            ValueError: fewer than two vectors.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs 2 feature vectors, got {int(self.count)}")
        centred = self.outer - torch.outer(self.total, self.mean)
        return centred / (self.count - 1)


def statistics_of(features_ND: Tensor) -> FeatureStatistics:
    """Statistics of features (N, D) that are all at hand."""
    statistics = FeatureStatistics(features_ND.shape[1], features_ND.device)
    statistics.update(features_ND)
    return statistics


def frechet_distance(reference: FeatureStatistics, generated: FeatureStatistics) -> float:
    """Squared Fréchet distance of the two Gaussians with these moments.

    ``|m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2))``. The last trace is the sum of the
    roots of the eigenvalues of ``C1^(1/2) C2 C1^(1/2)``, which is symmetric: no matrix square
    root, no imaginary parts, and covariances without full rank do no harm.

    Raises:
        ValueError: feature widths that differ, or too few features.
    """
    if reference.total.shape != generated.total.shape:
        raise ValueError(
            f"features of width {len(reference.total)} against width {len(generated.total)}"
        )
    shift = torch.square(reference.mean - generated.mean).sum()
    covariance1, covariance2 = reference.covariance, generated.covariance
    values, vectors = torch.linalg.eigh(covariance1)
    root = (vectors * _roots(values)) @ vectors.T
    product = root @ covariance2 @ root
    cross = _roots(torch.linalg.eigvalsh((product + product.T) / 2)).sum()
    return float(shift + covariance1.trace() + covariance2.trace() - 2 * cross)


def _roots(values: Tensor) -> Tensor:
    """Square roots of the eigenvalues of a covariance, rounding noise around zero cut to zero."""
    noise = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    return torch.where(values > noise, values, 0.0).sqrt()
