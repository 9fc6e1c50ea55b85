"""Text to token ids: exactly the tokenizer's, whatever is written in it and however long it is.

Every path from a document to ids goes through :class:`PlainText`: training text, held-out text and
token shards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from moh.errors import RunError

PIECE = 1 << 17  # characters that are tokenised at once
_SEEN = 128  # characters on each side of a cut by which it is judged
_TRIES = 64  # cuts that are tried before a piece grows
_UNUSED = "\uffff"  # no character: Unicode promises that no text holds it


def fast_backend(tokenizer: Any) -> Any:
    """The ``tokenizers.Tokenizer`` of a transformers tokenizer.

    Raises:
        RunError: it has none.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise RunError(f"tokenizer {tokenizer.name_or_path} has no fast form (tokenizer.json)")
    return tokenizer.backend_tokenizer


def num_ids(tokenizer: Any) -> int:
    """All ids of a fast tokenizer are below this; its length is less where numbers are left out."""
    vocabulary = fast_backend(tokenizer).get_vocab(with_added_tokens=True)
    return int(max(vocabulary.values())) + 1


class PlainText:
    """Ids of plain text by a fast transformers tokenizer, which stays as it is.

    What is written like a special token (``</s>``, ``<|im_start|>``) is not one. Added tokens that
    are not special are words like any other: GPT-NeoX has runs of spaces among them. No token is
    added before or after a text. A text longer than :data:`PIECE` characters is cut where the
    tokenizer itself has a border between two tokens, so that the ids are those of the whole while
    its memory stays bounded.

    Args:
        tokenizer: a transformers tokenizer.

    Attributes:
        vocab_size: ids are below it.
        dtype: the smallest of uint16 and uint32 that holds them.

    Raises:
        RunError: it is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size = num_ids(tokenizer)
        self.dtype: type[np.uint16] | type[np.uint32] = (
            np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        )
        self._backend = _without_special_tokens(fast_backend(tokenizer))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
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


def _without_special_tokens(backend: Any) -> Any:
    """A copy to which special tokens are text.

    ``encode_special_tokens`` keeps them from being looked for in the text. The model behind it may
    still hold them as pieces or words of its own (Unigram and WordLevel do), so they get names in
    it that no text has.
    """
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    special = {token.content for token in copy.get_added_tokens_decoder().values() if token.special}
    if any(copy.model.token_to_id(name) is not None for name in special):
        state = json.loads(copy.to_str()) | {"added_tokens": [], "post_processor": None}
        _rename(state["model"], special)
        copy.model = Tokenizer.from_str(json.dumps(state)).model
    return copy


def _rename(model: dict[str, Any], special: set[str]) -> None:
    """Rename tokens in the description of a model; their ids stay."""

    def name(token: str) -> str:
        return f"{_UNUSED}{token}{_UNUSED}" if token in special else token

    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {name(token): number for token, number in vocabulary.items()}
    else:  # Unigram: pieces and their scores
        model["vocab"] = [[name(piece), score] for piece, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = name(model["unk_token"])
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if special.isdisjoint((*pair, "".join(pair)))]
