"""Labelled images in folders and in datasets' tables, and which reader a form has."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from moh.data.archives import ShardReader, TarReader, validation_part
from moh.data.classes import in_order
from moh.data.labelled import Images
from moh.data.listing import LISTED, PICTURES, files_under, is_hidden, is_picture, say_left_out
from moh.errors import RunError, some


class FolderReader(Images):
    """A folder a class, classes in the order of :func:`moh.data.classes.in_order`.

    Images may lie in subfolders of a class. Hidden files and folders are passed over; other files
    that are no pictures by their names are said to be left out.

    Attributes:
        root: the folder.
        samples: path and label of each image.

    Raises:
        RunError: no such folder, or not of that form.
    """

    class_names: tuple[str, ...]

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.samples: list[tuple[str, int]] = []
        try:
            self._read()
        except OSError as error:
            reason = "no such folder" if not folder.is_dir() else str(error)
            raise RunError(f"cannot read images in {folder}: {reason}") from None
        self.labels = [label for _, label in self.samples]

    def _read(self) -> None:
        with os.scandir(self.root) as entries:
            seen = [(entry.name, entry.is_dir()) for entry in entries if not is_hidden(entry.name)]
        self.class_names = in_order(name for name, is_folder in seen if is_folder)
        others = [name for name, is_folder in seen if not is_folder]
        if not self.class_names:
            raise RunError(f"cannot read images in {self.root}: {_no_classes(others)}")
        empty = []
        for label, name in enumerate(self.class_names):
            pictures, rest = files_under(self.root / name)
            self.samples += [(path, label) for path in pictures]
            others += [os.path.relpath(path, self.root) for path in rest]
            if not pictures:
                empty.append(name)
        if empty:
            raise RunError(
                f"cannot read images in {self.root}: no image ({_suffixes()}) of class "
                f"{some(empty, LISTED)}"
            )
        say_left_out(self.root, sorted(others), "not pictures in a class folder")

    def name(self, index: int) -> str:
        return self.samples[index][0]

    def open(self, index: int) -> IO[bytes]:
        return open(self.name(index), "rb")


def _suffixes() -> str:
    return ", ".join(sorted(PICTURES))


def _no_classes(files: list[str]) -> str:
    """Why a folder is not a folder a class."""
    pictures = sum(map(is_picture, files))
    if not pictures:
        return "no class folders"
    return (
        f"{pictures:,} images and no class folders; torchvision.datasets.ImageNet(ROOT, 'val') "
        "sorts the archive as it is downloaded"
    )


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
        except IndexError:  # of datasets opening a table without rows
            raise RunError(f"{root} holds no row") from None
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise RunError(f"cannot read data set {root}: {str(error).splitlines()[0]}") from None
        for column in ("image", "label"):
            if column not in table.column_names:
                raise RunError(f"{root} has no column {column}; it has {table.column_names}")
        names = getattr(table.features["label"], "names", None)
        self.root, self.class_names = root, tuple(names) if names else None
        self.labels = _whole_numbers(table, root)
        try:
            # Files as they are, so that every form of the same images is decoded alike.
            self._table = table.cast_column("image", datasets.Image(decode=False))
        except Exception as error:
            # Arrow raises a type of its own for each kind of column.
            raise RunError(
                f"{root}: column image holds {table.features['image']}, not image files "
                f"({str(error).splitlines()[0]})"
            ) from None

    def name(self, index: int) -> str:
        return f"{self.root}, row {index}"

    def open(self, index: int) -> IO[bytes]:
        stored = self._table[index]["image"]
        if stored is None or not (stored["bytes"] or stored["path"]):
            raise RunError(f"cannot read image {self.name(index)}: the row has none")
        return BytesIO(stored["bytes"]) if stored["bytes"] else open(stored["path"], "rb")


def _whole_numbers(table: Any, root: Path) -> list[int]:
    """The column ``label``, which must be a whole number in each row.

    Raises:
        RunError: no rows, or something else in it.
    """
    if not len(table):
        raise RunError(f"{root} holds no row")
    column = table.data.column("label")
    if column.null_count:
        raise RunError(f"{root}: column label is empty in {column.null_count} rows")
    if str(column.type).removeprefix("u") not in ("int8", "int16", "int32", "int64"):
        raise RunError(f"{root}: column label holds {column.type}, not one whole number an image")
    return np.asarray(table.with_format("numpy")["label"][:]).tolist()


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
    files = (
        [root]
        if root.is_file()
        else [
            path
            for path in sorted(root.rglob("*.parquet"))
            if not is_hidden(str(path.relative_to(root)))
        ]
    )
    if not files:
        raise RunError(f"{root} holds no .parquet file and is not saved by datasets")
    # Not load_dataset on the folder, which would prepare the training images too.
    return Dataset.from_parquet([str(path) for path in validation_part(files)])


READERS: dict[str, type[Any]] = {
    "folder": FolderReader,
    "tar": TarReader,
    "webdataset": ShardReader,
    "datasets": TableReader,
}
