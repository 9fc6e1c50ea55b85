"""What labelled images must be to be called ImageNet-1k: its classes, in its order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

from timm.data import ImageNetInfo

from moh.data.archives import ShardReader
from moh.data.classes import check_labels, numbered, real_names
from moh.data.labelled import Images
from moh.data.listing import LISTED
from moh.data.readers import FolderReader
from moh.errors import RunError

VALIDATION_IMAGES = 50_000
# Names in words differ in spelling between sources; an order that is another agrees nowhere.
SAME_ORDER = 0.9

_SYNSET = re.compile(r"n\d{8}")


@cache
def synsets() -> tuple[str, ...]:
    """WordNet ids of the 1,000 classes in order."""
    return tuple(ImageNetInfo("imagenet-1k").label_names())


def is_imagenet(name: str, num_classes: int) -> bool:
    """True for a data set that calls itself ImageNet-1k and a model of its classes."""
    return name.startswith("imagenet-1k") and num_classes == len(synsets())


def check_classes(images: Images, name: str, num_classes: int, where: str) -> tuple[str, ...]:
    """Refuse images whose labels cannot mean what the model's outputs mean.

    Args:
        images: with or without class names.
        name: ``data.name``.
        num_classes: of the model.
        where: what to call the images in a message.

    Returns:
        Class names; where the images only number them ImageNet's own, or the numbers.

    Raises:
        RunError: another number of classes, other classes, or another order of them.
    """
    names = images.class_names
    if names is not None:
        kind = "class folders" if isinstance(images, FolderReader) else "classes"
        check_names(names, name, num_classes, f"{where} has {len(names)} {kind}")
    check_labels(images.labels, num_classes, where)
    if names is None:
        if is_imagenet(name, num_classes):
            if isinstance(images, ShardReader):
                _check_keys(images, where)
            return synsets()
        return numbered(num_classes)
    return names


def check_names(names: Sequence[str], name: str, num_classes: int, where: str) -> None:
    """Refuse classes that cannot be the model's.

    Args:
        where: the data and how many classes they have, in words.

    Raises:
        RunError: another number of classes, other classes, or another order of them.
    """
    if len(names) != num_classes:
        raise RunError(
            f"{where}, model.num_classes is {num_classes}"
            + (_missing(names) if num_classes == len(synsets()) else "")
        )
    if is_imagenet(name, num_classes) and tuple(names) != synsets():
        _check_words(names, where)


def known_names(names: Sequence[str], name: str, num_classes: int) -> tuple[str, ...] | None:
    """What a run records of the names that passed :func:`check_names`.

    ImageNet's classes have several spellings: its ids stand for all. None for mere numbers.
    """
    return synsets() if is_imagenet(name, num_classes) else real_names(names)


def _missing(names: Sequence[str]) -> str:
    """The ImageNet classes that are not there, empty where the names are not ImageNet's."""
    absent = [synset for synset in synsets() if synset not in set(names)]
    if not 0 < len(absent) < len(synsets()):
        return ""
    more = ", ..." if len(absent) > LISTED else ""
    return f"; missing: {', '.join(absent[:LISTED])}{more}"


def _check_words(names: Sequence[str], where: str) -> None:
    """Class names that are not WordNet ids: numbers, or words in ImageNet's order."""
    if list(names) == [str(number) for number in range(len(names))]:
        return
    info = ImageNetInfo("imagenet-1k")
    own = [info.index_to_description(number) for number in range(len(names))]
    same = sum(_first_word(a) == _first_word(b) for a, b in zip(names, own, strict=True))
    if same < SAME_ORDER * len(names):
        at = next(i for i, (a, b) in enumerate(zip(names, synsets(), strict=True)) if a != b)
        raise RunError(
            f"{where}: class {at} is {names[at]!r}, ImageNet's is {synsets()[at]} "
            f"({_first_word(own[at])}); classes must be its WordNet ids, or in their order"
        )


def _first_word(name: str) -> str:
    return name.split(",")[0].strip().lower().replace("_", " ")


def _check_keys(shards: ShardReader, where: str) -> None:
    """Keys that hold a WordNet id must have the label of that class."""
    number = {synset: index for index, synset in enumerate(synsets())}
    for key, label in zip(shards.keys, shards.labels, strict=True):
        found = _SYNSET.search(key)
        if found and number.get(found.group(), label) != label:
            raise RunError(
                f"{where}: {key} has label {label}, that class is {number[found.group()]}"
            )


def images_per_class(labels: Sequence[int], num_classes: int) -> str:
    """``50``, or the least and the most: ``48-50``."""
    counts = Counter(labels)
    least, most = (pick(counts[label] for label in range(num_classes)) for pick in (min, max))
    return f"{least}" if least == most else f"{least}-{most}"


def marks(name: str, num_classes: int, images: int) -> list[str]:
    """What must be said beside an accuracy on these images."""
    if is_imagenet(name, num_classes) and images != VALIDATION_IMAGES:
        return [f"{images:,} of {VALIDATION_IMAGES:,} images"]
    return []
