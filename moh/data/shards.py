"""Token shards on disk, written by ``scripts/tokenise.py``: what they hold and how to read them.

A source is a folder: ``index.json``, ``tokenizer/`` and ``shards/NAME/``, a folder a shard, renamed
into place when it is whole. In it ``train.npy`` and ``validation.npy`` are token ids: a boundary,
then documents, a boundary after each. ``*_documents.npy`` are int64 (documents, 2): the place of
each one's first token, and its UTF-8 bytes. ``counts.npy`` is how often each token occurs in
``train.npy``. ``shard.json`` says all of this in numbers, with checksums.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moh.data.text import Tokens
from moh.errors import RunError

INDEX = "index.json"
SHARDS = "shards"
SHARD = "shard.json"
LAYOUT = 1
PARTS = ("train", "validation")
FILES = (
    "train.npy",
    "train_documents.npy",
    "validation.npy",
    "validation_documents.npy",
    "counts.npy",
)


class TokenSource:
    """The shards of one source, memory-mapped, as one long array.

    Attributes:
        folder: where it lies.
        index: its ``index.json``.

    Raises:
        RunError: no index, or a shard that is missing, truncated or of another run of the script;
            one line that names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._arrays: list[Tokens] = []
        for entry in self.index["shards"]:
            check_shard(folder, entry)
            self._arrays.append(self._map(entry, "train"))
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)]).tolist()

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.folder.name

    @property
    def num_tokens(self) -> int:
        """Training tokens, boundaries among them."""
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Training tokens ``start`` to ``start + count - 1``: int64 (count,)."""
        pieces = []
        while count:
            shard = bisect_right(self._starts, start) - 1
            within = start - self._starts[shard]
            piece = self._arrays[shard][within : within + count]
            if not len(piece):
                raise IndexError(f"token {start} of {self.num_tokens}")
            pieces.append(np.asarray(piece, dtype=np.int64))
            start, count = start + len(piece), count - len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def held_out(self, limit: int) -> tuple[Tokens, int]:
        """Whole held-out documents of at most ``limit`` tokens, one at least, if there is one.

        Returns:
            Their tokens, a boundary after each but none before the first; their UTF-8 bytes.
        """
        parts: list[Tokens] = []
        size = left = 0
        for entry in self.index["shards"]:
            tokens, documents = self._map(entry, "validation"), self._documents(entry)
            if not len(documents):
                continue
            ends = np.append(documents[1:, 0], len(tokens))
            fits = int(np.searchsorted(ends - documents[0, 0], limit - left, side="right"))
            fits = max(fits, 0 if parts else 1)
            if not fits:
                break
            parts.append(tokens[documents[0, 0] : ends[fits - 1]])
            size += int(documents[:fits, 1].sum())
            left += len(parts[-1])
            if fits < len(documents):
                break
        held_out: Tokens = np.concatenate(parts or [np.empty(0, dtype=self.index["dtype"])])
        return held_out, size

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each token occurs in the training part: (vocabulary,)."""
        total = np.zeros(self.index["vocab_size"], dtype=np.int64)
        for entry in self.index["shards"]:
            total += _load(self.folder, entry, "counts.npy", None)
        return total

    def _map(self, entry: dict[str, Any], part: str) -> Tokens:
        tokens: Tokens = _load(self.folder, entry, f"{part}.npy", "r")
        if len(tokens) != entry[part]["tokens"] or tokens.dtype != self.index["dtype"]:
            raise RunError(
                f"{shard_folder(self.folder, entry['name']) / part}.npy holds {len(tokens)} "
                f"{tokens.dtype}, {self.folder / INDEX} says otherwise: scripts/tokenise.py "
                "OUT --verify checks every shard"
            )
        return tokens

    def _documents(self, entry: dict[str, Any]) -> npt.NDArray[np.int64]:
        array: npt.NDArray[np.int64] = _load(self.folder, entry, "validation_documents.npy", None)
        return array


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a source.

    Raises:
        RunError: there is none, or it is not one; one line.
    """
    path = folder / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        whole = index["layout"] == LAYOUT and {"shards", "dtype", "vocab_size"} <= set(index)
    except OSError as error:
        hint = "scripts/tokenise.py writes it when all its parts are done"
        raise RunError(f"cannot read {path}: {error.strerror}; {hint}") from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise RunError(f"{path} is not the index of token shards of this version")
    return index


def shard_folder(folder: Path, name: str) -> Path:
    """Where a shard of a source lies."""
    return folder / SHARDS / name


def read_shard(folder: Path, name: str) -> dict[str, Any]:
    """The ``shard.json`` of a shard.

    Raises:
        RunError: it is missing or damaged; one line.
    """
    path = shard_folder(folder, name) / SHARD
    try:
        entry: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise RunError(f"{path} is damaged") from None
    return entry


def check_shard(folder: Path, entry: dict[str, Any]) -> None:
    """Compare a shard on disk with what the index says of it, without reading its tokens.

    Raises:
        RunError: it is another; one line.
    """
    if read_shard(folder, entry["name"])["sha256"] != entry["sha256"]:
        raise RunError(f"{shard_folder(folder, entry['name'])} is not of {folder / INDEX}")


def _load(folder: Path, entry: dict[str, Any], name: str, mode: Any) -> Any:
    path = shard_folder(folder, entry["name"]) / name
    try:
        return np.load(path, mmap_mode=mode, allow_pickle=False)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise RunError(f"{path} is damaged ({error})") from None


def verify_shard(folder: Path, entry: dict[str, Any], vocab_size: int, boundary: int) -> None:
    """Read all of a shard and compare it with its checksums and counts.

    Raises:
        RunError: the first thing that is not as ``shard.json`` says; one line.
    """
    where = shard_folder(folder, entry["name"])
    check_shard(folder, entry)
    for name in FILES:
        if file_sha256(where / name) != entry["sha256"][name]:
            raise RunError(f"{where / name} is damaged (its checksum is another)")
    for part in PARTS:
        tokens = _load(folder, entry, f"{part}.npy", "r")
        documents = _load(folder, entry, f"{part}_documents.npy", None)
        found = len(tokens), len(documents), int(documents[:, 1].sum())
        said = tuple(entry[part][key] for key in ("tokens", "documents", "bytes"))
        if found != said:
            raise RunError(f"{where}: {part} holds {found} tokens, documents, bytes, not {said}")
        if int(tokens.max()) >= vocab_size:
            raise RunError(f"{where}: {part} holds a token that is not of the tokenizer")
        starts = documents[:, 0]
        if tokens[0] != boundary or (tokens[starts - 1] != boundary).any():
            raise RunError(f"{where}: {part} has a document without a boundary before it")
    counts = _load(folder, entry, "counts.npy", None)
    if int(counts.sum()) != entry["train"]["tokens"]:
        raise RunError(f"{where}: the token counts are not those of its tokens")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None


def shard_names(folder: Path) -> Iterator[str]:
    """Names of the whole shards of a source, in order."""
    inside = folder / SHARDS
    if inside.is_dir():
        yield from sorted(path.name for path in inside.iterdir() if (path / SHARD).is_file())
