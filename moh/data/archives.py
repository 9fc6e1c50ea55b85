"""Labelled images in archives: class folders in ``.tar``, WebDataset's shards; read by position."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any

from moh.data.classes import in_order
from moh.data.labelled import Images
from moh.data.listing import is_hidden, is_picture, say_left_out
from moh.errors import RunError


class _InArchives(Images):
    """Images at known positions of archives, so that any process reads any of them."""

    def __init__(self) -> None:
        self._places: list[tuple[Path, str, int, int]] = []  # archive, path, position, bytes

    def name(self, index: int) -> str:
        archive, path, _, _ = self._places[index]
        return f"{archive}/{path}"

    def open(self, index: int) -> IO[bytes]:
        archive, _, position, size = self._places[index]
        with open(archive, "rb") as file:
            file.seek(position)
            return BytesIO(file.read(size))


class TarReader(_InArchives):
    """An archive of class folders, or a folder of archives: one a class, or of class folders.

    The class of an image is the folder that it lies in. An archive may hold archives of a class.

    Raises:
        RunError: no archive, a damaged one, or no image in it.
    """

    class_names: tuple[str, ...]

    def __init__(self, root: Path) -> None:
        super().__init__()
        archives = archives_in(root)
        chosen = validation_part(archives)
        if 1 < len(chosen) < len(archives):
            raise RunError(f"{root} mixes validation and other archives; put them apart")
        found, others = [], []
        for archive in chosen:
            top = archive.stem if len(chosen) > 1 else ""
            try:
                members = list(_members(archive, top))
            except (OSError, tarfile.TarError, ValueError) as error:
                raise RunError(f"cannot read archives in {root}: {error}") from None
            others += [f"{archive.name}/{path}" for path, _, _ in members if not is_picture(path)]
            pictures = [member for member in members if is_picture(member[0])]
            _check_depth(archive, [path for path, _, _ in pictures])
            found += [(archive, *member) for member in pictures]
        if not found:
            raise RunError(f"{root} has no image in a folder, or in an archive of a class")
        self.class_names = in_order(_class_of(path) for _, path, _, _ in found)
        number = {name: label for label, name in enumerate(self.class_names)}
        # The order of the same images in folders.
        found.sort(key=lambda place: (number[_class_of(place[1])], PurePosixPath(place[1]).parts))
        self._places = found
        self.labels = [number[_class_of(path)] for _, path, _, _ in found]
        say_left_out(root, others)


def _class_of(path: str) -> str:
    return PurePosixPath(path).parent.name


def _check_depth(archive: Path, paths: list[str]) -> None:
    """Refuse subfolders of some classes alone, which would pass for classes of their own."""
    first: dict[int, str] = {}
    for path in paths:
        first.setdefault(len(PurePosixPath(path).parts), path)
    if 1 in first:
        raise RunError(
            f"{archive}: {first[1]} lies in no class folder; data.form=webdataset reads shards"
        )
    if len(first) > 1:
        shallow, deep = first[min(first)], first[max(first)]
        raise RunError(
            f"{archive}: {shallow} and {deep} lie at different depths; the folder of an image is "
            "its class"
        )


def _members(archive: Path, top: str = "", nested: bool = True) -> Iterator[tuple[str, int, int]]:
    """Path, position and bytes of each file of an archive, without what is hidden.

    Args:
        top: folder that the paths are taken to lie in.
        nested: whether archives in it are opened too, each a folder of its name.
    """
    with open(archive, "rb") as file:
        yield from _members_of(file, 0, top, nested)


def _members_of(
    file: IO[bytes], start: int, top: str, nested: bool
) -> Iterator[tuple[str, int, int]]:
    with tarfile.open(fileobj=file, mode="r:") as opened:
        for member in opened:
            path = PurePosixPath(top, member.name)
            if member.isdir() or is_hidden(member.name):
                continue
            if not member.isreg() or member.issparse():
                raise ValueError(f"{path} is a link or another special file")
            if nested and path.suffix.lower() == ".tar":
                inner = opened.extractfile(member)
                assert inner is not None
                within = str(path.with_suffix(""))
                yield from _members_of(inner, start + member.offset_data, within, nested)
            else:
                yield str(path), start + member.offset_data, member.size


class ShardReader(_InArchives):
    """WebDataset shards: ``KEY.jpg`` beside ``KEY.cls``, or beside ``KEY.json`` with a label.

    Indexed once and read by position, so that each image is read exactly once however many
    processes there are; the webdataset library itself streams.

    Args:
        root: an archive, or a folder with some; of several those whose name says ``val``.

    Raises:
        RunError: no shard, a damaged one, an image without a class, or two of one key.
    """

    class_names = None

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.labels: list[int] = []
        lone = []
        for shard in validation_part(archives_in(root)):
            try:
                places, classes = _index_shard(shard)
            except (OSError, tarfile.TarError, ValueError) as error:
                raise RunError(f"cannot read shard {shard}: {error}") from None
            for key, (position, size) in places.items():
                if key not in classes:
                    raise RunError(f"{shard}: {key} has neither .cls nor a label in .json")
                self._places.append((shard, key, position, size))
                self.labels.append(classes[key])
            lone += [f"{shard.name}/{key}" for key in classes if key not in places]
        if not self.labels:
            raise RunError(f"{root} has no image with a class: KEY.jpg beside KEY.cls")
        say_left_out(root, lone, "labels without an image")

    @property
    def keys(self) -> list[str]:
        """Of each image."""
        return [key for _, key, _, _ in self._places]


def _index_shard(shard: Path) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Position and bytes of each image of a shard, and the class of each key."""
    places: dict[str, tuple[int, int]] = {}
    classes: dict[str, int] = {}
    with open(shard, "rb") as file:
        for path, position, size in _members(shard, nested=False):
            folder, _, name = path.rpartition("/")
            stem, _, kind = name.partition(".")
            key = f"{folder}/{stem}".lstrip("/")
            if is_picture(f"{stem}.{kind}") and "." not in kind:
                if key in places:
                    raise ValueError(f"two images of key {key}")
                places[key] = (position, size)
            elif kind.lower() in ("cls", "json"):
                file.seek(position)
                label = _label(file.read(size), kind.lower(), path)
                if kind.lower() == "cls" and label is not None:
                    classes[key] = label
                elif label is not None:
                    classes.setdefault(key, label)
    return places, classes


def _label(content: bytes, kind: str, path: str) -> int | None:
    """The class that a member states; None for a ``.json`` without one."""
    if kind == "cls":
        return int(content.decode())
    described: Any = json.loads(content)
    if not isinstance(described, dict) or "label" not in described:
        return None
    label = described["label"]
    if isinstance(label, str):
        return int(label)
    if isinstance(label, bool) or not isinstance(label, int):
        raise ValueError(f"the label in {path} is {label!r}, not a whole number")
    return label


def archives_in(root: Path) -> list[Path]:
    """An archive, or those of a folder in order of name.

    Raises:
        RunError: there is none.
    """
    if root.is_file():
        return [root]
    found = sorted(root.iterdir()) if root.is_dir() else []
    files = [p for p in found if p.suffix.lower() == ".tar" and not is_hidden(p.name)]
    if not files:
        raise RunError(f"{root} holds no .tar archive")
    return files


def validation_part(files: list[Path]) -> list[Path]:
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
