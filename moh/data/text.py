"""Token sequences: documents, a byte-level BPE trained on them, memory-mapped streams."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moh.config import TextConfig
from moh.data.documents import EmptyError, Reading, SkippedError, document
from moh.data.order import ShuffledOrder, stable_seed
from moh.data.plain_text import PlainText, fast_backend, num_ids
from moh.errors import RunError

EMBEDDED = Path(__file__).parent / "embedded" / "state_of_the_union.txt.xz"
BOUNDARY = "<|endoftext|>"  # between documents; also begin, end and padding of a sequence
TEXT_KEY = "text"  # of a document in a line of JSON or a table
_LAYOUT = 2  # of the cache; a new number makes old caches be built again

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def read_documents(root: str | Path | None = None) -> list[str]:
    """The documents of a text set, in order.

    Args:
        root: a text file (``.xz`` allowed) whose documents are separated by blank lines, or a
            folder with one document in each ``.txt`` file, in order of name. None: the embedded
            State of the Union addresses, whole speeches in order of file name.

    Raises:
        RunError: nothing to read there, or not UTF-8.
    """
    path = EMBEDDED if root is None else Path(root)
    if not path.exists():
        raise RunError(f"cannot read text {path}: no such file or folder")
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    documents = []
    for file in files:
        for record in Reading(str(file), TEXT_KEY, blank_lines=not path.is_dir()):
            try:
                documents.append(document(record, TEXT_KEY))
            except EmptyError:
                continue
            except SkippedError as error:
                raise RunError(f"cannot read text {file}: {error}") from None
    if not documents:
        raise RunError(f"no text in {path}: needs a text file or a folder of .txt files")
    return documents


def split_documents(
    documents: Sequence[str], validation_share: float
) -> tuple[list[str], list[str]]:
    """Training and validation documents.

    Every n-th document, ``n = round(1 / validation_share)``, is held out, the first of them in
    the middle of the first n. So whole documents are held out, and from the whole set.

    Raises:
        ValueError: a share that leaves either part empty.
    """
    if not 0 < validation_share <= 0.5:
        raise ValueError(f"data.validation_share {validation_share} is not in (0, 0.5]")
    every = round(1 / validation_share)
    held_out = [i % every == every // 2 for i in range(len(documents))]
    if not any(held_out):
        raise ValueError(
            f"data.validation_share {validation_share} holds out none of {len(documents)} "
            f"documents; the least that works is {1 / len(documents):.3f}"
        )
    train = [text for text, held in zip(documents, held_out, strict=True) if not held]
    return train, [text for text, held in zip(documents, held_out, strict=True) if held]


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE: lossless on any text, and the same for the same documents.

    Args:
        documents: training documents only.
        vocab_size: most tokens, :data:`BOUNDARY` among them.

    Returns:
        A transformers ``PreTrainedTokenizerFast``.

    Raises:
        ValueError: fewer tokens than there are bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"model.vocab_size {vocab_size} is too small for a byte-level tokenizer: at least "
            f"{len(alphabet) + 1}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOUNDARY,
        eos_token=BOUNDARY,
        pad_token=BOUNDARY,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(documents: Sequence[str], tokenizer: Any) -> Tokens:
    """One array of all documents, the tokenizer's end token before the first and after each."""
    plain = PlainText(tokenizer)
    boundary = [tokenizer.eos_token_id]
    parts = [boundary, *(part for ids in plain.ids(documents) for part in (ids, boundary))]
    return np.concatenate([np.asarray(part, dtype=plain.dtype) for part in parts])


class TokenStream:
    """Endless shuffled passes over the sequences of a token array.

    A sequence is ``seq_len`` tokens; transformers shifts them itself, so inputs and labels are
    the same ids, and each sequence trains ``seq_len - 1`` predictions. Sequences do not overlap.
    Each pass begins at another offset below ``seq_len``, so that a token that has no prediction
    in one pass (the first of a sequence) has one in the next. What a sample number stands for is
    a function of it and the seed alone; the array is never loaded.

    Args:
        tokens: (T,), memory-mapped or not.
        seq_len: tokens.
        seed: of the order.

    Raises:
        ValueError: fewer tokens than a pass needs.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int) -> None:
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.num_sequences = (len(tokens) - seq_len + 1) // seq_len
        if self.num_sequences < 1:
            raise ValueError(
                f"data.seq_len {seq_len} needs at least {2 * seq_len - 1} training tokens, "
                f"the text has {len(tokens)}"
            )
        self._order = ShuffledOrder(self.num_sequences, seed)

    def batch(self, sample_numbers: Iterable[int]) -> Tensor:
        """The sequences of these sample numbers: int64 (B, seq_len)."""
        rows = []
        for number in sample_numbers:
            index = int(self._order.take(number, 1)[0])
            offset = stable_seed(self.seed, "offset", number // self.num_sequences) % self.seq_len
            start = offset + index * self.seq_len
            rows.append(np.asarray(self.tokens[start : start + self.seq_len], dtype=np.int64))
        return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True)
class TextSet:
    """A tokenised text set.

    Attributes:
        tokenizer: a transformers tokenizer.
        train, validation: memory-mapped token arrays, see :func:`encode_documents`.
        train_bytes, validation_bytes: UTF-8 bytes of the documents, boundaries not counted.
        fingerprint: SHA-256 of the documents, the split and the tokenizer.
    """

    tokenizer: Any
    train: Tokens
    validation: Tokens
    train_bytes: int
    validation_bytes: int
    fingerprint: str

    @classmethod
    def load(
        cls, config: TextConfig, vocab_size: int, cache_dir: str | Path | None = None
    ) -> TextSet:
        """Read, split and tokenise a text set, or take it from the cache.

        Args:
            config: where the text is, the share that is held out, the tokenizer.
            vocab_size: of the model; the size of the BPE where ``config`` names no tokenizer.
            cache_dir: where token arrays and trained tokenizers are kept, by content; default
                ``$MOH_CACHE_DIR`` or ``~/.cache/moh``.

        Raises:
            RunError: text, tokenizer or cache that cannot be read.
            ValueError: a tokenizer with more tokens than the model, or a share out of range.
        """
        documents = read_documents(config.root)
        train, validation = split_documents(documents, config.validation_share)
        tokenizer = None if config.tokenizer is None else load_tokenizer(Path(config.tokenizer))
        if tokenizer is not None and (size := num_ids(tokenizer)) > vocab_size:
            raise ValueError(
                f"data.tokenizer {config.tokenizer} has {size} tokens > "
                f"model.vocab_size {vocab_size}"
            )
        kind = f"bpe {vocab_size}" if tokenizer is None else fast_backend(tokenizer).to_str()
        # The same text keeps its fingerprint where the layout of the cache changes.
        key = json.dumps([1, train, validation, kind])
        fingerprint = hashlib.sha256(key.encode()).hexdigest()
        folder = cache_folder(cache_dir) / f"text{_LAYOUT}-{fingerprint[:16]}"
        if not folder.is_dir():
            tokenizer = tokenizer or train_tokenizer(train, vocab_size)
            _write_cache(folder, tokenizer, train, validation)
        return cls(
            tokenizer=tokenizer or load_tokenizer(folder / "tokenizer"),
            train=_open_tokens(folder / "train.npy"),
            validation=_open_tokens(folder / "validation.npy"),
            train_bytes=_num_bytes(train),
            validation_bytes=_num_bytes(validation),
            fingerprint=fingerprint,
        )

    @property
    def train_tokens(self) -> int:
        """Training tokens."""
        return len(self.train)

    def token_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each token occurs in the training part: (vocab_size,)."""
        return np.bincount(self.train, minlength=vocab_size)


def _num_bytes(documents: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where things are kept that can be made again: ``$MOH_CACHE_DIR`` or ``~/.cache/moh``."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("MOH_CACHE_DIR") or Path.home() / ".cache" / "moh")


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise RunError(f"tokenizer {folder} is not a folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot load tokenizer {folder}: {str(error).splitlines()[0]}") from None
    if tokenizer.eos_token_id is None:
        raise RunError(f"tokenizer {folder} has no end token to put between documents")
    return tokenizer


def _write_cache(
    folder: Path, tokenizer: Any, train: Sequence[str], validation: Sequence[str]
) -> None:
    """Write a cache folder aside and rename it, so that none is ever half-written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            tokenizer.save_pretrained(aside / "tokenizer")
            np.save(aside / "train.npy", encode_documents(train, tokenizer))
            np.save(aside / "validation.npy", encode_documents(validation, tokenizer))
            aside.rename(folder)
        finally:
            # Left where writing failed or another process was first.
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():
            raise RunError(f"cannot write cache {folder}: {error.strerror or error}") from None


def _open_tokens(path: Path) -> Tokens:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RunError(
            f"{path} is damaged ({error}); delete {path.parent} and it is made again"
        ) from None
