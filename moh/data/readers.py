"""Labelled images wherever they lie, one at a time: folders, archives, shards, datasets' tables."""

from __future__ import annotations

import json
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

from moh.data.reading import open_picture
from moh.errors import RunError

LISTED = 6  # names in one message
PICTURES = ("jpg", "jpeg", "png", "webp")


class Images(ABC):
    """Images with their classes, read when asked for, by any number of processes.

    Attributes:
        labels: class of each image.
        class_names: one a class; None where the data number their classes and do not name them.
    """

    labels: Sequence[int]
    class_names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """Where an image lies, for people."""

    @abstractmethod
    def open(self, index: int) -> IO[bytes]:
        """The file of an image."""

    def image(self, index: int) -> Image.Image:
        """The image in RGB.

        Raises:
            RunError: it cannot be read; an image left out would move the score.
        """
        try:
            file = self.open(index)
        except (OSError, tarfile.TarError) as error:
            reason = str(error).splitlines()[0].replace(f"'{self.name(index)}'", "the file")
            raise RunError(f"cannot read image {self.name(index)}: {reason}") from None
        with file:
            return open_picture(file, self.name(index))


class _Folders(ImageFolder):
    """torchvision's, with classes named 0 to n-1 in order of number."""

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names, _ = super().find_classes(directory)
        if sorted(names) == sorted(str(number) for number in range(len(names))):
            names = sorted(names, key=int)
        return names, {name: number for number, name in enumerate(names)}


class FolderReader(Images):
    """A folder a class, classes in order of name.

    Raises:
        RunError: no such folder, or not of that form.
    """

    class_names: tuple[str, ...]

    def __init__(self, folder: Path) -> None:
        try:
            self._folders = _Folders(str(folder))
        except (OSError, FileNotFoundError) as error:
            raise RunError(
                f"cannot read images in {folder}: {_what_it_holds(folder, error)}"
            ) from None
        self.labels = self._folders.targets
        self.class_names = tuple(self._folders.classes)

    def name(self, index: int) -> str:
        return self._folders.samples[index][0]

    def open(self, index: int) -> IO[bytes]:
        return open(self.name(index), "rb")


def _what_it_holds(folder: Path, error: Exception) -> str:
    """Why a folder is not a folder a class."""
    if not folder.is_dir():
        return "no such folder"
    files = [path for path in folder.iterdir() if path.suffix.lower().lstrip(".") in PICTURES]
    if not files or any(path.is_dir() for path in folder.iterdir()):
        return str(error).splitlines()[0]
    return (
        f"{len(files):,} images and no class folders; torchvision.datasets.ImageNet(ROOT, 'val') "
        "sorts the archive as it is downloaded"
    )


class TarReader(Images):
    """An archive of class folders, or a folder of archives: one a class, or of class folders.

    timm's reader; its cache files are neither written nor read.

    Raises:
        RunError: no archive, a damaged one, or no image in it.
    """

    def __init__(self, root: Path) -> None:
        from timm.data.readers.reader_image_in_tar import ReaderImageInTar

        archives = _archives(root)
        chosen = _validation_part(archives)
        if len(chosen) == 1:
            root = chosen[0]
        elif len(chosen) < len(archives):
            raise RunError(f"{root} mixes validation and other archives; put them apart")
        try:
            self._reader: Any = ReaderImageInTar(str(root), cache_tarinfo=False)
        except (OSError, tarfile.TarError) as error:
            raise RunError(f"cannot read archives in {root}: {error}") from None
        except ValueError:  # of timm unpacking an empty list
            raise RunError(
                f"{root} has no image in a folder, or in an archive of a class"
            ) from None
        self.labels = [int(label) for label in self._reader.targets]
        known = self._reader.class_idx_to_name
        self.class_names = tuple(known[number] for number in range(len(known)))

    def name(self, index: int) -> str:
        return f"{self._reader.root}/{self._reader.filename(index)}"

    def open(self, index: int) -> IO[bytes]:
        return BytesIO(self._reader[index][0].read())


class ShardReader(Images):
    """WebDataset shards: ``KEY.jpg`` beside ``KEY.cls``, or beside ``KEY.json`` with a label.

    Indexed once and read by position, so that each image is read exactly once however many
    processes there are; the webdataset library itself streams.

    Args:
        root: an archive, or a folder with some; of several those whose name says ``val``.

    Raises:
        RunError: no shard, a damaged one, or an image without a class.
    """

    class_names = None

    def __init__(self, root: Path) -> None:
        self.shards = _validation_part(_archives(root))
        self.keys: list[str] = []
        self._places: list[tuple[int, int, int]] = []  # shard, position, bytes
        labels: list[int] = []
        for number, shard in enumerate(self.shards):
            try:
                places, classes = _index_shard(shard)
            except (OSError, tarfile.TarError, ValueError) as error:
                raise RunError(f"cannot read shard {shard}: {error}") from None
            for key, (position, size) in places.items():
                if key not in classes:
                    raise RunError(f"{shard}: {key} has neither .cls nor a label in .json")
                self.keys.append(key)
                self._places.append((number, position, size))
                labels.append(classes[key])
        if not labels:
            raise RunError(f"{root} has no image with a class: KEY.jpg beside KEY.cls")
        self.labels = labels

    def name(self, index: int) -> str:
        return f"{self.shards[self._places[index][0]]}/{self.keys[index]}"

    def open(self, index: int) -> IO[bytes]:
        shard, position, size = self._places[index]
        with open(self.shards[shard], "rb") as file:
            file.seek(position)
            return BytesIO(file.read(size))


def _index_shard(shard: Path) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Position and bytes of each image of a shard, and the class of each key."""
    places: dict[str, tuple[int, int]] = {}
    classes: dict[str, int] = {}
    with tarfile.open(shard, "r:") as archive:
        for member in archive:
            folder, _, file = member.name.rpartition("/")
            stem, _, kind = file.partition(".")
            key = f"{folder}/{stem}".lstrip("/")
            if kind.lower() in PICTURES:
                places[key] = (member.offset_data, member.size)
            elif kind in ("cls", "json"):
                content = archive.extractfile(member)
                assert content is not None
                text = content.read().decode()
                if kind == "cls":
                    classes[key] = int(text)
                elif "label" in (described := json.loads(text)):
                    classes.setdefault(key, int(described["label"]))
    return places, classes


class TableReader(Images):
    """Parquet files of a hub's data set, or a folder that ``datasets`` saved to disk.

    Columns ``image`` and ``label``; of several files or splits those whose name says ``val``.

    Raises:
        RunError: nothing of the kind there.
    """

    def __init__(self, root: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        try:
            table = _open_table(root)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise RunError(f"cannot read data set {root}: {str(error).splitlines()[0]}") from None
        for column in ("image", "label"):
            if column not in table.column_names:
                raise RunError(f"{root} has no column {column}; it has {table.column_names}")
        names = getattr(table.features["label"], "names", None)
        self.root, self.class_names = root, tuple(names) if names else None
        self.labels = np.asarray(table.with_format("numpy")["label"][:]).tolist()
        # Files as they are, so that every form of the same images is decoded alike.
        self._table = table.cast_column("image", datasets.Image(decode=False))

    def name(self, index: int) -> str:
        return f"{self.root}, row {index}"

    def open(self, index: int) -> IO[bytes]:
        stored = self._table[index]["image"]
        return BytesIO(stored["bytes"]) if stored["bytes"] else open(stored["path"], "rb")


def _open_table(root: Path) -> Any:
    from datasets import Dataset, DatasetDict, load_from_disk

    if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")):
        opened = load_from_disk(str(root))
        if not isinstance(opened, DatasetDict):
            return opened
        split = next((name for name in ("validation", "val") if name in opened), None)
        if split is None:
            raise RunError(f"{root} has no split validation; it has {', '.join(opened)}")
        return opened[split]
    files = [root] if root.is_file() else sorted(root.rglob("*.parquet"))
    if not files:
        raise RunError(f"{root} holds no .parquet file and is not saved by datasets")
    # Not load_dataset on the folder, which would prepare the training images too.
    return Dataset.from_parquet([str(path) for path in _validation_part(files)])


def _archives(root: Path) -> list[Path]:
    files = [root] if root.is_file() else sorted(root.glob("*.tar"))
    if not files:
        raise RunError(f"{root} holds no .tar archive")
    return files


def _validation_part(files: list[Path]) -> list[Path]:
    """Of several files those that say ``val``, if any says what it is.

    Raises:
        RunError: they are of another part alone.
    """
    if len(files) == 1:
        return files
    said = [path for path in files if re.search(r"val", path.name)]
    if not said and any(re.search(r"train|test", path.name) for path in files):
        raise RunError(f"{files[0].parent}: no file of {len(files)} says val in its name")
    return said or files


READERS: dict[str, type[Any]] = {
    "folder": FolderReader,
    "tar": TarReader,
    "webdataset": ShardReader,
    "datasets": TableReader,
}
