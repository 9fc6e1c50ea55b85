"""Precision and recall of generated features (arXiv 1904.06991), and the inception score."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def precision_recall(
    reference_ND: Tensor, generated_MD: Tensor, k: int = 3, block: int = 4096
) -> tuple[float, float]:
    """Improved precision and recall.

    Around every feature lies a ball that reaches to its k-th nearest neighbour in its own set,
    itself excluded. Precision is the share of generated features inside any reference ball,
    recall the share of reference features inside any generated ball. Distances are of float64:
    ADM's suite, whose definition this is, takes float16 where they are finite.

    Args:
        reference_ND: features of real images.
        generated_MD: features of generated images.
        k: neighbours.
        block: side of the piece of a distance matrix held at a time.

    Returns:
        (precision, recall), each in [0, 1].

    Raises:
        ValueError: a set of k features or fewer.
    """
    # Distances to a common origin near both sets lose fewer digits in the product below.
    origin = reference_ND.double().mean(0)
    reference, generated = (
        _blocks(features.double() - origin, block) for features in (reference_ND, generated_MD)
    )
    reference_radii, generated_radii = (_squared_radii(x, k) for x in (reference, generated))
    inside_any = [torch.zeros_like(radii, dtype=torch.bool) for radii in reference_radii]
    precise = 0
    for generated_block, generated_radius in zip(generated, generated_radii, strict=True):
        inside = torch.zeros_like(generated_radius, dtype=torch.bool)
        for i, reference_block in enumerate(reference):
            distances = _squared_distances(generated_block, reference_block)
            inside |= (distances <= reference_radii[i]).any(1)
            inside_any[i] |= (distances <= generated_radius[:, None]).any(0)
        precise += int(inside.sum())
    recalled = sum(int(inside.sum()) for inside in inside_any)
    return precise / len(generated_MD), recalled / len(reference_ND)


class _Block(NamedTuple):
    """Some rows of a set of features, and their squared lengths."""

    x_BD: Tensor
    squares_B: Tensor


def _blocks(x_ND: Tensor, size: int) -> list[_Block]:
    return [_Block(x_BD, x_BD.square().sum(1)) for x_BD in x_ND.split(size)]


def _squared_distances(rows: _Block, columns: _Block) -> Tensor:
    """(rows, columns), never negative."""
    product = rows.x_BD @ columns.x_BD.T
    # In place: these matrices are what fills the memory.
    product.mul_(-2).add_(rows.squares_B[:, None]).add_(columns.squares_B)
    return product.clamp_min_(0)


def _squared_radii(blocks: list[_Block], k: int) -> list[Tensor]:
    """Squared distance of each feature to its k-th nearest other, in the same blocks."""
    if sum(len(block.x_BD) for block in blocks) <= k:
        raise ValueError(f"the {k}-th nearest neighbour needs more than {k} features")
    nearest = [block.squares_B.new_full((len(block.x_BD), k), torch.inf) for block in blocks]
    for i, rows in enumerate(blocks):
        for j in range(i, len(blocks)):
            distances = _squared_distances(rows, blocks[j])
            if i == j:
                distances.fill_diagonal_(torch.inf)
            else:
                nearest[j] = _smallest(nearest[j], distances.T.contiguous())
            nearest[i] = _smallest(nearest[i], distances)
    return [distances_Bk[:, -1] for distances_Bk in nearest]


def _smallest(found_Bk: Tensor, distances_BM: Tensor) -> Tensor:
    """The k smallest of each row of both, ascending."""
    k = found_Bk.shape[1]
    new = distances_BM.topk(min(k, distances_BM.shape[1]), largest=False).values
    return torch.cat([found_Bk, new], dim=1).topk(k, largest=False).values


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
