"""Fréchet distance between two sets of features, from streamed moments."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from moh.distribution import sum_over_processes


class Gaussian:
    """Moments of a set of features, float64: what a Fréchet distance knows of it.

    Args:
        mean: (D,).
        covariance: unbiased (D, D).
        root: :attr:`root` where it is known already.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, root: Tensor | None = None) -> None:
        self.mean, self.covariance = mean, covariance
        self._root = root

    @cached_property
    def root(self) -> Tensor:
        """R (D, rank) with ``R R^T`` the covariance; noise around a zero eigenvalue is zero."""
        if self._root is not None:
            return self._root
        values, vectors = torch.linalg.eigh(self.covariance)
        noise = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
        return vectors[:, values > noise] * values[values > noise].sqrt()


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches; float64 sums.

    The three sums add up: over processes by :meth:`reduce`, over sets by ``+=``.

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

    def reduce(self) -> None:
        """Add up the sums of all processes, for all of them."""
        sum_over_processes(self.count, self.total, self.outer)

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

    def gaussian(self) -> Gaussian:
        """The moments as they are now."""
        return Gaussian(self.mean, self.covariance)


Moments = FeatureStatistics | Gaussian


def statistics_of(features_ND: Tensor) -> FeatureStatistics:
    """Statistics of features (N, D) that are all at hand."""
    statistics = FeatureStatistics(features_ND.shape[1], features_ND.device)
    statistics.update(features_ND)
    return statistics


def frechet_distance(reference: Moments, generated: Moments) -> float:
    """Squared Fréchet distance of the two Gaussians with these moments.

    ``|m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2))``. With ``C = R R^T`` the last trace is
    the sum of the singular values of ``R1^T R2``: no matrix square root, no imaginary parts, and
    covariances without full rank do no harm. (The eigenvalues of the product, whose roots these
    are, have half as many correct digits.)

    Raises:
        ValueError: feature widths that differ, or too few features.
    """
    one, two = (
        moments.gaussian() if isinstance(moments, FeatureStatistics) else moments
        for moments in (reference, generated)
    )
    if one.mean.shape != two.mean.shape:
        raise ValueError(f"features of width {len(one.mean)} against width {len(two.mean)}")
    shift = torch.square(one.mean - two.mean).sum()
    cross = torch.linalg.svdvals(one.root.T @ two.root).sum()
    traces = one.covariance.trace() + two.covariance.trace()
    return max(0.0, float(shift + traces - 2 * cross))
