"""What labels mean: the order of classes, their names, and the weights' own list of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moh.data.listing import LISTED
from moh.errors import RunError, some


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in order of label, whatever form the data have.

    Sorted by code point, as torchvision's ``ImageFolder`` sorts them (``kind1, kind10, kind2``):
    the order of the published ImageNet weights. Classes that are named 0 to n-1 have these labels.
    """
    unique = sorted(set(names))
    return tuple(sorted(unique, key=int)) if _are_numbers(unique) else tuple(unique)


def numbered(num_classes: int) -> tuple[str, ...]:
    """Names of classes that nobody names."""
    return tuple(str(number) for number in range(num_classes))


def real_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names that say what a class is; None where they are the labels themselves, or absent."""
    return None if names is None or _are_numbers(names) else tuple(names)


def _are_numbers(names: Sequence[str]) -> bool:
    return sorted(names) == sorted(numbered(len(names)))


def check_labels(
    labels: Sequence[int], num_classes: int, where: str, all_present: bool = False
) -> None:
    """Refuse labels that the model has no output for.

    Args:
        where: what to call them in a message.
        all_present: whether every class must have an image.

    Raises:
        RunError: one is out of range, or a class without an image; one line.
    """
    allowed = f"model.num_classes is {num_classes} (0..{num_classes - 1})"
    present = set(labels)
    if not present:
        raise RunError(f"{where}: there are none")
    if min(present) < 0:
        raise RunError(f"{where}: a label is {min(present)}, but {allowed}")
    if max(present) >= num_classes:
        raise RunError(f"{where}: labels reach {max(present)}, but {allowed}")
    absent = [str(label) for label in range(num_classes) if label not in present]
    if all_present and absent:
        raise RunError(f"{where}: no image has label {some(absent, LISTED)}, but {allowed}")


def relabelling(weights: Sequence[str], data: Sequence[str], where: str) -> Tensor | None:
    """From the data's labels to those of the weights, by name.

    Args:
        weights: class names, in the order of the model's outputs.
        data: class names, in the order of the data's labels.
        where: what to call the data in a message.

    Returns:
        int64 (classes,), the weights' label of each of the data's; None where they are the same.

    Raises:
        RunError: names that only one of the two has; one line.
    """
    if list(weights) == list(data):
        return None
    own = set(weights)
    unknown = [name for name in data if name not in own]
    if unknown or len(weights) != len(data):
        lacking = [name for name in weights if name not in set(data)]
        here, there = (some(names, LISTED) or "none" for names in (unknown, lacking))
        raise RunError(
            f"{where}: the weights were trained on other classes; only in the data: {here}; "
            f"only in the weights' list: {there}"
        )
    number = {name: label for label, name in enumerate(weights)}
    return torch.tensor([number[name] for name in data])
