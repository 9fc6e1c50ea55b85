"""From the records of a source to token ids with boundaries between the documents."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moh.data.documents import Record, SkippedError, document
from moh.data.plain_text import PlainText, fast_backend
from moh.data.text import Tokens, load_tokenizer
from moh.errors import RunError
from moh.signals import end_with_parent

RULES = 2  # of documents and their ids; a new number keeps shards made by other rules apart


@dataclass(frozen=True)
class Encoded:
    """Documents one after the other, a boundary after each.

    Attributes:
        tokens: (T,).
        lengths: tokens of each document, its boundary among them.
        bytes: UTF-8 bytes of each document.
        skipped: reason -> records.
    """

    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    skipped: Counter[str]


class DocumentTokenizer:
    """A tokenizer that reads documents as :class:`moh.data.plain_text.PlainText` does.

    Args:
        folder: of a transformers tokenizer.
        begin: whether its begin token stands before each document; its end token stands after.

    Attributes:
        vocab_size: ids are below it.
        boundary: id of the end token.
        sha256: of the tokenizer, and of ``begin``.

    Raises:
        RunError: it cannot be loaded, is not a fast one, or lacks the token.
    """

    def __init__(self, folder: str | Path, begin: bool = False) -> None:
        self.tokenizer = load_tokenizer(Path(folder))
        described = fast_backend(self.tokenizer).to_str()
        self.sha256 = hashlib.sha256(f"{described} {begin}".encode()).hexdigest()
        self._plain = PlainText(self.tokenizer)
        self.vocab_size, self.dtype = self._plain.vocab_size, self._plain.dtype
        self.boundary = int(self.tokenizer.eos_token_id)
        self._begin: list[int] = []
        if begin:
            if self.tokenizer.bos_token_id is None:
                raise RunError(f"tokenizer {folder} has no begin token")
            self._begin = [int(self.tokenizer.bos_token_id)]

    def save(self, folder: Path) -> None:
        """Save it as transformers does."""
        self.tokenizer.save_pretrained(folder)

    def encode(self, records: list[Record], key: str) -> Encoded:
        """The documents of records, in order; those without text are counted by reason."""
        texts, skipped = [], Counter[str]()
        for record in records:
            try:
                texts.append(document(record, key))
            except SkippedError as error:
                skipped[str(error)] += 1
        parts = [[*self._begin, *of, self.boundary] for of in self._plain.ids(texts)]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        tokens: Tokens = np.empty(int(lengths.sum()), dtype=self.dtype)  # type: ignore[assignment]
        position = 0
        for part in parts:
            tokens[position : position + len(part)] = part
            position += len(part)
        sizes = np.array([len(text.encode()) for text in texts], dtype=np.int64)
        return Encoded(tokens, lengths, sizes, skipped)


_worker: DocumentTokenizer | None = None


def start_worker(folder: str, begin: bool) -> None:
    """Load the tokenizer of a process once."""
    global _worker
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = DocumentTokenizer(folder, begin)


def encode_in_worker(records: list[Record], key: str) -> Encoded:
    """:meth:`DocumentTokenizer.encode` in a process that :func:`start_worker` began."""
    assert _worker is not None
    return _worker.encode(records, key)
