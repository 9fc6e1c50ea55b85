"""Precision and recall of generated features (arXiv 1904.06991), and the inception score."""

from __future__ import annotations

import torch
from torch import Tensor


def precision_recall(
    reference_ND: Tensor, generated_MD: Tensor, k: int = 3, block: int = 1024
) -> tuple[float, float]:
    """Improved precision and recall.

    Around every feature lies a ball that reaches to its k-th nearest neighbour in its own set,
    itself excluded. Precision is the share of generated features inside any reference ball,
    recall the share of reference features inside any generated ball.

    Args:
        reference_ND: features of real images.
        generated_MD: features of generated images.
        k: neighbours.
        block: rows of a distance matrix held at a time.

    Returns:
        (precision, recall), each in [0, 1].

    Raises:
        ValueError: a set of k features or fewer.
    """
    # Distances to a common origin near both sets lose fewer digits in the product below.
    origin = reference_ND.double().mean(0)
    reference, generated = reference_ND.double() - origin, generated_MD.double() - origin
    reference_radii = _squared_radii(reference, k, block)
    generated_radii = _squared_radii(generated, k, block)
    precision = _covered_share(generated, reference, reference_radii, block)
    recall = _covered_share(reference, generated, generated_radii, block)
    return precision, recall


def _squared_distances(x_ND: Tensor, y_MD: Tensor) -> Tensor:
    """(N, M), never negative."""
    norms = x_ND.square().sum(1, keepdim=True) + y_MD.square().sum(1)
    return (norms - 2 * x_ND @ y_MD.T).clamp_min(0)


def _squared_radii(x_ND: Tensor, k: int, block: int) -> Tensor:
    """Squared distance (N,) of each feature to its k-th nearest other."""
    if len(x_ND) <= k:
        raise ValueError(f"the {k}-th nearest neighbour needs more than {k} features")
    radii = []
    for start in range(0, len(x_ND), block):
        rows = x_ND[start : start + block]
        distances = _squared_distances(rows, x_ND)
        distances[torch.arange(len(rows)), start + torch.arange(len(rows))] = torch.inf
        radii.append(distances.kthvalue(k, dim=1).values)
    return torch.cat(radii)


def _covered_share(x_ND: Tensor, centres_MD: Tensor, radii_M: Tensor, block: int) -> float:
    """Share of x inside any of the balls."""
    covered = 0
    for rows in torch.split(x_ND, block):
        covered += int((_squared_distances(rows, centres_MD) <= radii_M).any(1).sum())
    return covered / len(x_ND)


def inception_score(probs_NC: Tensor, split_size: int = 5000) -> float:
    """Inception score (arXiv 1606.03498): mean over consecutive splits, the last one the rest.

    Args:
        probs_NC: class probabilities of each generated image.
        split_size: images in a split (ADM's suite: 5,000).

    Returns:
        ``exp(mean KL(p(class | image) || p(class)))``, between 1 and the number of classes.
    """
    scores = []
    for probs in torch.split(probs_NC.double(), split_size):
        marginal = probs.mean(0, keepdim=True)
        # xlogy gives 0 for a probability of 0.
        divergence = torch.xlogy(probs, probs) - torch.xlogy(probs, marginal)
        scores.append(divergence.sum(1).mean().exp())
    return float(torch.stack(scores).mean())
