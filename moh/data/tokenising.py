"""From documents to token ids: exactly the tokenizer's, however long a document is."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moh.data.documents import Record, SkippedError, document
from moh.data.text import Tokens
from moh.errors import RunError
from moh.signals import end_with_parent

PIECE = 1 << 17  # characters that are tokenised at once
_SEEN = 128  # characters on each side of a cut by which it is judged
_TRIES = 64  # cuts that are tried before a piece grows


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
    """A fast tokenizer that reads a document as text, whatever is written in it.

    What looks like a special token in a document is not one. A document longer than
    :data:`PIECE` characters is cut where the tokenizer itself has a border between two tokens, so
    that the ids are those of the whole while its memory stays bounded.

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
        from moh.data.text import load_tokenizer

        self.folder = Path(folder)
        self.tokenizer = load_tokenizer(self.folder)
        if not getattr(self.tokenizer, "is_fast", False):
            raise RunError(f"tokenizer {folder} has no fast form (tokenizer.json)")
        self._backend = self.tokenizer.backend_tokenizer
        self.sha256 = hashlib.sha256(f"{self._backend.to_str()} {begin}".encode()).hexdigest()
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.boundary = int(self.tokenizer.eos_token_id)
        self._begin: list[int] = []
        if begin:
            if self.tokenizer.bos_token_id is None:
                raise RunError(f"tokenizer {folder} has no begin token")
            self._begin = [int(self.tokenizer.bos_token_id)]
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype: type[np.uint16] | type[np.uint32] = (
            np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        )

    def save(self, folder: Path) -> None:
        """Save it as transformers does."""
        from moh.data.text import load_tokenizer

        # A fresh one: this one's special tokens are text to it.
        load_tokenizer(self.folder).save_pretrained(folder)

    def encode(self, records: list[Record], key: str) -> Encoded:
        """The documents of records, in order; those without text are counted by reason."""
        texts, skipped = [], Counter[str]()
        for record in records:
            try:
                texts.append(document(record, key))
            except SkippedError as error:
                skipped[str(error)] += 1
        ids = self._ids(texts)
        parts = [[*self._begin, *of, self.boundary] for of in ids]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        tokens: Tokens = np.empty(int(lengths.sum()), dtype=self.dtype)  # type: ignore[assignment]
        position = 0
        for part in parts:
            tokens[position : position + len(part)] = part
            position += len(part)
        sizes = np.array([len(text.encode()) for text in texts], dtype=np.int64)
        return Encoded(tokens, lengths, sizes, skipped)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        short = [text for text in texts if len(text) <= PIECE]
        found = iter(self._backend.encode_batch_fast(short, add_special_tokens=False))
        return [next(found).ids if len(text) <= PIECE else self._long(text) for text in texts]

    def _long(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            end, following = self._cut(text, start)
            ids += self._piece(text[start:end])
            start = following
        return ids

    def _piece(self, text: str) -> list[int]:
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _cut(self, text: str, start: int) -> tuple[int, int]:
        """Where a piece ends and where the next one starts."""
        limit = PIECE
        while start + limit < len(text):
            tries = 0
            for cut in range(start + limit, start + limit // 2, -1):
                if text[cut - 1].isalnum() and text[cut].isalnum():
                    continue
                # A tokenizer that puts a space before every text needs the one here dropped.
                for following in (cut, cut + 1) if text[cut] == " " else (cut,):
                    if self._splits(text, cut, following):
                        return cut, following
                tries += 1
                if tries == _TRIES:
                    break
            limit *= 2
        return len(text), len(text)

    def _splits(self, text: str, cut: int, following: int) -> bool:
        """Whether both sides, tokenised alone, give the tokens of the whole around the cut."""
        left, right = text[max(0, cut - _SEEN) : cut], text[following : cut + _SEEN]
        around = text[max(0, cut - _SEEN) : cut + _SEEN]
        return self._piece(left) + self._piece(right) == self._piece(around)


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
