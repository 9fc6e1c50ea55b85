"""Writing token shards: whole folders, renamed into place one after the other."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moh.data.shards import (
    FILES,
    PARTS,
    SHARD,
    SHARDS,
    file_sha256,
    read_shard,
    shard_folder,
    shard_names,
)
from moh.data.text import Tokens
from moh.data.tokenising import DocumentTokenizer, Encoded
from moh.errors import RunError
from moh.runner import write_json

Integers = npt.NDArray[np.int64]


class Position(NamedTuple):
    """Where reading goes on: a file of the part, and records of it that are done."""

    file: int = 0
    record: int = 0


@dataclass
class _Half:
    """What is collected for the training or the held-out part of a shard."""

    tokens: list[Tokens] = field(default_factory=list)
    lengths: list[Integers] = field(default_factory=list)
    sizes: list[Integers] = field(default_factory=list)
    count: int = 0

    def add(self, tokens: Tokens, lengths: Integers, sizes: Integers) -> None:
        self.tokens.append(tokens)
        self.lengths.append(lengths)
        self.sizes.append(sizes)
        self.count += len(tokens)

    def arrays(self, boundary: int, dtype: Any) -> tuple[Tokens, Integers]:
        """Tokens with a boundary before the first, and (documents, 2): first token, bytes."""
        tokens = np.concatenate([np.array([boundary], dtype=dtype), *self.tokens])
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *self.lengths])
        sizes = np.concatenate([np.empty(0, dtype=np.int64), *self.sizes])
        starts = 1 + np.cumsum(lengths) - lengths
        return tokens, np.stack([starts, sizes], axis=1)


class ShardWriter:
    """Collects tokenised documents and writes them out a shard at a time.

    Args:
        part: number and count of the parts.
        plan: hash of everything that decides a shard.
        hold_out: every such document is held out; 0 for none.
    """

    def __init__(
        self,
        out: Path,
        part: tuple[int, int],
        plan: str,
        tokenizer: DocumentTokenizer,
        hold_out: int,
    ) -> None:
        self.out, self.part, self.plan, self.hold_out = out, part, plan, hold_out
        self.boundary, self.dtype = tokenizer.boundary, tokenizer.dtype
        self.vocab_size = tokenizer.vocab_size
        self.shards, self.documents, self.tokens, self.skipped = 0, 0, 0, Counter[str]()
        self.position: Position | None = Position()
        self._train, self._validation, self._reasons = _Half(), _Half(), Counter[str]()
        self._resume()

    @property
    def held(self) -> int:
        """Tokens that are not written yet."""
        return self._train.count

    @property
    def unwritten_skips(self) -> Counter[str]:
        """Records without a document since the last shard, by reason."""
        return self._reasons

    def add(self, encoded: Encoded, skipped: Counter[str]) -> None:
        """Take the documents of a batch, and what was skipped before it was tokenised."""
        self._reasons += encoded.skipped + skipped
        lengths, sizes = encoded.lengths, encoded.bytes
        number = self.documents + np.arange(len(lengths))
        self.documents += len(lengths)
        held = np.zeros(len(lengths), dtype=bool)
        if self.hold_out:
            held = number % self.hold_out == self.hold_out // 2
        if not held.any():
            self._train.add(encoded.tokens, lengths, sizes)
            return
        of_token = np.repeat(held, lengths)
        self._validation.add(encoded.tokens[of_token], lengths[held], sizes[held])
        self._train.add(encoded.tokens[~of_token], lengths[~held], sizes[~held])

    def write(self, following: Position | None) -> None:
        """Write what is collected as the next shard: aside, then renamed into place."""
        name = f"{self._prefix}{self.shards:05d}"
        target = shard_folder(self.out, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=target.parent))
        entry: dict[str, Any] = {"name": name, "plan": self.plan}
        try:
            for part, half in zip(PARTS, (self._train, self._validation), strict=True):
                tokens, documents = half.arrays(self.boundary, self.dtype)
                np.save(aside / f"{part}.npy", tokens)
                np.save(aside / f"{part}_documents.npy", documents)
                entry[part] = {
                    "tokens": len(tokens),
                    "documents": len(documents),
                    "bytes": int(documents[:, 1].sum()),
                }
                if part == "train":
                    np.save(aside / "counts.npy", np.bincount(tokens, minlength=self.vocab_size))
            entry["skipped"] = dict(self._reasons)
            entry["sha256"] = {file: file_sha256(aside / file) for file in FILES}
            entry["documents_so_far"] = self.documents
            entry["following"] = following
            write_json(aside / SHARD, entry)
            rename_folder(aside, target)
        except OSError as error:
            # NumPy says how much it could write, not why.
            why = error.strerror or "no space left on the device, or a limit on the size of files"
            raise RunError(f"cannot write {target}: {why}") from None
        finally:
            # Left where writing failed.
            shutil.rmtree(aside, ignore_errors=True)
        self._take(entry)
        self._train, self._validation, self._reasons = _Half(), _Half(), Counter[str]()

    def _resume(self) -> None:
        for path in (self.out / SHARDS).glob(f".{self._prefix}*"):
            shutil.rmtree(path)
        for name in shard_names(self.out):
            entry = read_shard(self.out, name)
            if entry["plan"] != self.plan:
                raise RunError(
                    f"{self.out} holds shards of other sources, another tokenizer or other "
                    "options: choose another folder, or delete it"
                )
            if not name.startswith(self._prefix):
                continue
            if name != f"{self._prefix}{self.shards:05d}":
                raise RunError(f"{shard_folder(self.out, name)}: the shard before it is missing")
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        self.shards += 1
        self.documents = entry["documents_so_far"]
        self.tokens += entry["train"]["tokens"]
        self.skipped += Counter(entry["skipped"])
        self.position = entry["following"] and Position(*entry["following"])

    @property
    def _prefix(self) -> str:
        return f"{part_name(self.part)}-"


def part_name(part: tuple[int, int]) -> str:
    """What the names of a part's shards begin with."""
    return f"{part[0]}of{part[1]}"


def rename_folder(aside: Path, target: Path) -> None:
    """Move a temporary folder into place, with the permissions that a new folder has."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(aside, 0o777 & ~mask)
    aside.rename(target)


def save_tokenizer(out: Path, tokenizer: DocumentTokenizer) -> None:
    """Keep the tokenizer beside its tokens."""
    target = out / "tokenizer"
    if target.is_dir():
        return
    aside = Path(tempfile.mkdtemp(prefix=".tokenizer.", dir=out))
    try:
        tokenizer.save(aside)
        rename_folder(aside, target)
    except OSError:
        # Another part was first.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
