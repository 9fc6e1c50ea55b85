"""Training sequences from token shards: sources mixed by weight, in an order that is computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moh.config import TextConfig
from moh.data.order import generator, stable_seed
from moh.data.permutation import Permutation
from moh.data.reading import ReadAhead
from moh.data.shards import TokenSource
from moh.data.text import Tokens, load_tokenizer
from moh.errors import RunError

BLOCK = 10_000  # samples in which each source has its share: weights count to 0.01 %


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole shares of ``total`` in proportion to the weights; what is left over goes to the
    largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


class SequenceStream:
    """Endless shuffled passes over the sequences of one source.

    Sequences are consecutive pieces of ``seq_len`` tokens across documents and shards. Each pass
    has another permutation and begins at another offset below ``seq_len``. What a number stands
    for is a function of it, the seed and the source's name; nothing is loaded or kept for it.

    Raises:
        RunError: fewer tokens than a pass needs.
    """

    def __init__(self, source: TokenSource, name: str, seq_len: int, seed: int) -> None:
        self.source, self.name, self.seq_len, self.seed = source, name, seq_len, seed
        self.num_sequences = (source.num_tokens - seq_len + 1) // seq_len
        if self.num_sequences < 1:
            raise RunError(
                f"{source.folder}: data.seq_len {seq_len} needs at least {2 * seq_len - 1} "
                f"training tokens, it has {source.num_tokens}"
            )
        self._pass = lru_cache(maxsize=2)(self._make_pass)

    def _make_pass(self, number: int) -> tuple[Permutation, int]:
        offset = stable_seed(self.seed, "offset", self.name, number) % self.seq_len
        return Permutation(self.num_sequences, self.seed, self.name, number), offset

    def read(self, number: int) -> npt.NDArray[np.int64]:
        """Sequence ``number`` of this source: int64 (seq_len,)."""
        done, place = divmod(number, self.num_sequences)
        permutation, offset = self._pass(done)
        return self.source.read(offset + permutation[place] * self.seq_len, self.seq_len)


class MixtureStream:
    """Endless sequences of several sources in fixed proportions.

    Every :data:`BLOCK` samples hold each source in its share, in an order that the seed and the
    block's number give. A source that is used up begins again, see :class:`SequenceStream`.

    Args:
        streams: one a source.
        weights: of the sources, in any unit.
    """

    def __init__(
        self, streams: Sequence[SequenceStream], weights: Sequence[float], seed: int
    ) -> None:
        self.streams, self.seed = list(streams), seed
        self.shares = apportion(weights, BLOCK)
        # Place in a block's list -> source, and how many of the source come before it there.
        self._source = np.repeat(np.arange(len(self.streams)), self.shares)
        self._rank = np.concatenate([np.arange(share) for share in self.shares])
        self._order = lru_cache(maxsize=4)(self._make_order)
        self._ahead = ReadAhead(lambda first, count: self.read(range(first, first + count)))

    def _make_order(self, block: int) -> npt.NDArray[np.int64]:
        order = torch.randperm(BLOCK, generator=generator(self.seed, "mixture", block))
        return order.numpy()

    def place(self, number: int) -> tuple[int, int]:
        """Source of a sample, and its number among that source's samples."""
        block, within = divmod(number, BLOCK)
        place = int(self._order(block)[within])
        source = int(self._source[place])
        return source, block * self.shares[source] + int(self._rank[place])

    def read(self, sample_numbers: Iterable[int]) -> Tensor:
        """The sequences of these sample numbers: int64 (B, seq_len)."""
        rows = []
        for number in sample_numbers:
            source, of_source = self.place(number)
            rows.append(self.streams[source].read(of_source))
        return torch.from_numpy(np.stack(rows))

    def batch(self, sample_numbers: Iterable[int]) -> Tensor:
        """:meth:`read`; what a process asks for after these is read ahead."""
        if isinstance(sample_numbers, range) and sample_numbers.step == 1 and sample_numbers:
            return self._ahead(sample_numbers.start, len(sample_numbers))
        return self.read(sample_numbers)

    def describe(self, samples: int) -> dict[str, Any]:
        """For each source its tokens, its share, and the passes over it in ``samples``."""
        return {
            of.name: {
                "tokens": of.source.num_tokens,
                "share": share / BLOCK,
                "passes": round(samples * share / BLOCK / of.num_sequences, 4),
            }
            for of, share in zip(self.streams, self.shares, strict=True)
        }


@dataclass(frozen=True)
class ShardedText:
    """The token shards of a mixture.

    Attributes:
        tokenizer: a transformers tokenizer, the same for every source.
        sources: by name, with the weights beside them.
        validation: held-out documents of every source in proportion to its weight.
        validation_bytes: UTF-8 bytes of them, boundaries not counted.
        fingerprint: SHA-256 of every shard's checksum, the weights and the held-out part.
    """

    tokenizer: Any
    sources: dict[str, TokenSource]
    weights: dict[str, float]
    validation: Tokens
    validation_bytes: int
    fingerprint: str

    @classmethod
    def load(cls, config: TextConfig, vocab_size: int) -> ShardedText:
        """Open the shards of every source of a mixture.

        Args:
            config: with the folder, and the sources in it with their weights.
            vocab_size: of the model.

        Raises:
            RunError: a source that is missing, damaged, or of another tokenizer.
            ValueError: a tokenizer with more tokens than the model, or a wrong weight.
        """
        if config.root is None:
            raise RunError(
                f"data.root is not set: {config.name} needs the folder that scripts/tokenise.py "
                "wrote"
            )
        root = Path(config.root)
        # Not the folder's name: a run whose data were moved must go on with the same samples.
        weights = dict(config.sources) or {config.name: 1.0}
        _check_weights(weights)
        if missing := [name for name in config.sources if not (root / name).is_dir()]:
            raise RunError(
                f"{root} lacks {', '.join(missing)}: data.sources names a folder of shards for "
                f"each of {', '.join(weights)}"
            )
        sources = {name: TokenSource(root / name if config.sources else root) for name in weights}
        first = next(iter(sources.values()))
        for source in sources.values():
            if source.index["tokenizer_sha256"] != first.index["tokenizer_sha256"]:
                raise RunError(f"{source.folder} and {first.folder} are of different tokenizers")
        if first.index["vocab_size"] > vocab_size:
            raise ValueError(
                f"the tokens of {root} go up to {first.index['vocab_size']} > model.vocab_size "
                f"{vocab_size}"
            )
        shares = apportion(list(weights.values()), config.validation_tokens)
        held = [
            source.held_out(share) for source, share in zip(sources.values(), shares, strict=True)
        ]
        if not any(size for _, size in held):
            raise RunError(
                f"{root} holds no document that is held out, to score the model on: tokenise it "
                "with a larger --validation-share"
            )
        boundary = np.array([first.index["boundary"]], dtype=first.index["dtype"])
        identity = {
            "weights": weights,
            "sources": {name: source.index["fingerprint"] for name, source in sources.items()},
            "validation_tokens": config.validation_tokens,
        }
        return cls(
            tokenizer=load_tokenizer(first.folder / "tokenizer"),
            sources=sources,
            weights=weights,
            validation=np.concatenate([boundary, *(tokens for tokens, _ in held)]),
            validation_bytes=sum(size for _, size in held),
            fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        )

    def stream(self, seq_len: int, seed: int) -> MixtureStream:
        """The training sequences of a run."""
        streams = [
            SequenceStream(source, name, seq_len, seed) for name, source in self.sources.items()
        ]
        return MixtureStream(streams, list(self.weights.values()), seed)

    @property
    def train_tokens(self) -> int:
        """Training tokens of all sources."""
        return sum(source.num_tokens for source in self.sources.values())

    def token_counts(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """How often each token occurs in the mixture, sources weighted: (vocab_size,)."""
        total = np.zeros(vocab_size)
        for name, source in self.sources.items():
            counts = source.counts()
            total[: len(counts)] += self.weights[name] * counts / source.num_tokens
        return total / sum(self.weights.values()) * self.train_tokens


def _check_weights(weights: dict[str, float]) -> None:
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"data.sources.{name} {weight} must be above 0")
    for name, share in zip(weights, apportion(list(weights.values()), BLOCK), strict=True):
        if not share:
            raise ValueError(
                f"data.sources.{name} {weights[name]} is less than 1 in {BLOCK:,} of the mixture"
            )
