"""Text stays text: no document makes a special token, and both data paths give the same ids."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moh.config import TextConfig
from moh.data.documents import Reading
from moh.data.shard_writer import ShardWriter
from moh.data.shards import TokenSource
from moh.data.text import (
    TextSet,
    encode_documents,
    load_tokenizer,
    read_documents,
    split_documents,
    train_tokenizer,
)
from moh.data.tokenising import DocumentTokenizer
from moh.errors import RunError

ADDED = ["<|endoftext|>", "</s>", "<s>", "<|im_start|>", "[UNK]", "[MASK]"]
OF_MODEL = ["[UNK]", "</s>", "<s>", "<|endoftext|>"]
WORDS = "the people of the states and the laws of the union"
KINDS = {
    "bpe": (models.BPE, trainers.BpeTrainer),
    "ignore_merges": (lambda **o: models.BPE(ignore_merges=True, **o), trainers.BpeTrainer),
    "unigram": (models.Unigram, trainers.UnigramTrainer),
    "word level": (models.WordLevel, trainers.WordLevelTrainer),
    "word piece": (models.WordPiece, trainers.WordPieceTrainer),
}


def byte_level() -> PreTrainedTokenizerFast:
    """The project's own BPE with special and other tokens added."""
    made = train_tokenizer([WORDS + " <|endoftext|> </s>"] * 5, 320)
    made.add_tokens([AddedToken(name, special=True) for name in ADDED[1:]], special_tokens=True)
    made.add_tokens([AddedToken("<tool>", special=False), AddedToken("    ", special=False)])
    return made


def of_model(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose model has the special tokens as pieces or words of its own."""
    model, trainer = KINDS[kind]
    made = Tokenizer(model() if kind == "unigram" else model(unk_token="[UNK]"))
    if kind in ("word level", "word piece"):
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "unigram":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    options = {"unk_token": "[UNK]"} if kind == "unigram" else {}
    learned = trainer(vocab_size=300, special_tokens=OF_MODEL, show_progress=False, **options)
    made.train_from_iterator([" ".join([WORDS, *OF_MODEL])] * 5, learned)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="[UNK]"
    )


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.special}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("place", ["{}", "what {} is", "x{}y", "{0}{0}", "line\n{}\n"])
def test_no_text_is_a_special_token_of_a_byte_level_bpe(name, place):
    tokenizer = byte_level()
    text = place.format(name)
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = encode_documents([text], tokenizer)
    assert ids[0] == ids[-1] == tokenizer.eos_token_id
    assert not special_ids(tokenizer) & set(ids[1:-1].tolist())
    assert tokenizer.decode(ids[1:-1]) == text
    # The tokenizer that others get still knows its special tokens.
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == before
    assert special_ids(tokenizer) & set(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_MODEL)
def test_no_text_is_a_special_token_that_the_model_has_as_a_word(kind, name):
    tokenizer = of_model(kind)
    special = special_ids(tokenizer) - {tokenizer.unk_token_id}  # any unknown word is unknown
    for text in (name, f"the {name} of", f"laws{name}laws", f"{name} {name}"):
        ids = encode_documents([text], tokenizer)[1:-1].tolist()
        assert ids
        assert not special & set(ids), text
        if kind == "unigram" and name != "[UNK]":
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
    usual = encode_documents([WORDS], tokenizer)[1:-1].tolist()
    assert usual == tokenizer(WORDS, add_special_tokens=False)["input_ids"]


def test_added_tokens_that_are_not_special_are_words():
    tokenizer = byte_level()
    ids = encode_documents(["a <tool>    b"], tokenizer).tolist()
    assert {tokenizer.convert_tokens_to_ids(name) for name in ("<tool>", "    ")} < set(ids)
    assert tokenizer.decode(ids[1:-1]) == "a <tool>    b"


def test_an_end_token_that_its_file_does_not_call_special_is_special(tmp_path):
    byte_level().save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in state["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path)
    ids = encode_documents(["what <|endoftext|> is"], tokenizer)
    assert (ids == tokenizer.eos_token_id).sum() == 2


def test_a_file_of_the_tokenizers_library_alone_serves(tmp_path):
    byte_level().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = DocumentTokenizer(tmp_path)
    text = " ".join(ADDED)
    ids = encode_documents([text], load_tokenizer(tmp_path))
    assert not special_ids(tokenizer.tokenizer) & set(ids[1:-1].tolist())
    assert tokenizer.tokenizer.decode(ids[1:-1]) == text


def test_a_bpe_trained_on_such_text_is_not_fooled(tmp_path):
    texts = [f"{WORDS} {name} {number}" for number in range(9) for name in ADDED]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(texts))
    config = TextConfig(name="text", root=str(path), seq_len=8, validation_share=0.2)
    data = TextSet.load(config, 400, tmp_path / "cache")
    train, validation = split_documents(texts, 0.2)
    boundary = data.tokenizer.eos_token_id
    for ids, of in ((data.train, train), (data.validation, validation)):
        assert (ids == boundary).sum() == len(of) + 1
        parts = np.split(ids, np.flatnonzero(ids == boundary))[1:-1]
        assert [data.tokenizer.decode(part[1:]) for part in parts] == of


def test_numbers_of_ids_that_are_left_out_count(tmp_path):
    made = byte_level()
    state = json.loads(made.backend_tokenizer.to_str())
    # 70,000 is beyond uint16, though there are few tokens.
    state["model"]["vocab"]["the"] = 70_000
    state["model"]["merges"] = []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert encode_documents(["x"], tokenizer).dtype == np.uint32
    (tmp_path / "text.txt").write_text("x\n\ny")
    config = TextConfig(
        name="text",
        root=str(tmp_path / "text.txt"),
        seq_len=2,
        validation_share=0.5,
        tokenizer=str(tmp_path / "tokenizer"),
    )
    with pytest.raises(ValueError, match=r"70001 tokens > model\.vocab_size 60000"):
        TextSet.load(config, 60_000, tmp_path / "cache")


PLAIN = [
    *("first </s> one", "two\r\nlines\r", "<|endoftext|>", "nul \x00 and 漢字 🙂", "\ta tab\t"),
    *("  spaces  ", "[UNK] <s>", "no-break space\xa0", "e\u0301 and é", "last"),
]
FORMS = {
    "a file": "\n\n".join(PLAIN),
    "a mark of byte order": "\ufeff" + "\n\n".join(PLAIN) + "\n",
    "carriage returns": "\r\n\r\n".join(PLAIN) + "\r\n",
    "blank lines with spaces": "\n \xa0\t\n".join(PLAIN) + "\n\n\n",
    "separators of information": "\n\x1c\n".join(PLAIN) + "\u3000\n",
    "empty documents": "\n\n\n \n\n".join(PLAIN),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(made)
    return made


def as_shards(sources, tokenizer: DocumentTokenizer, out: Path, blank_lines: bool):
    """What scripts/tokenise.py makes of files: training and held-out tokens."""
    writer = ShardWriter(out, (1, 1), "plan", tokenizer, hold_out=4)
    for source in sources:
        records = list(Reading(str(source), "text", blank_lines))
        writer.add(tokenizer.encode(records, "text"), Counter())
    writer.write(None)
    entry = json.loads((out / "shards/1of1-00000/shard.json").read_text())
    index = {"layout": 1, "vocab_size": tokenizer.vocab_size, "shards": [entry]}
    index["dtype"] = np.dtype(tokenizer.dtype).name
    (out / "index.json").write_text(json.dumps(index))
    source = TokenSource(out)
    return source.read(0, source.num_tokens), *source.held_out(10**9)


@pytest.mark.parametrize(
    ("form", "packing"),
    [*((form, "") for form in [*FORMS, "a folder"]), ("carriage returns", ".gz")],
)
def test_both_paths_give_the_same_ids_for_the_same_documents(form, packing, folder, tmp_path):
    if form == "a folder":
        root = tmp_path / "texts"
        root.mkdir()
        sources = [root / f"{number}.txt" for number in range(len(PLAIN))]
        for path, text in zip(sources, PLAIN, strict=True):
            path.write_bytes(f"\ufeff{text}\n\n{text}\r\n".encode())
    else:
        root = tmp_path / f"text.txt{packing}"
        raw = FORMS[form].encode()
        root.write_bytes(gzip.compress(raw) if packing else raw)
        sources = [root]
    tokenizer = DocumentTokenizer(folder)
    train, held, size = as_shards(sources, tokenizer, tmp_path / "out", form != "a folder")
    config = TextConfig(
        name="text", root=str(root), seq_len=8, validation_share=0.25, tokenizer=str(folder)
    )
    data = TextSet.load(config, 400, tmp_path / "cache")
    assert np.array_equal(data.train, train)
    assert np.array_equal(data.validation[1:], held)
    assert data.validation_bytes == size
    documents = read_documents(root)
    assert len(documents) == len(PLAIN)
    if form != "a folder":
        assert documents == [text.strip() for text in PLAIN]
    assert (data.train == tokenizer.boundary).sum() + (held == tokenizer.boundary).sum() == 11


def test_text_that_is_no_plain_text_is_read_as_shards_are_or_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": " one </s>\\n"}\n{"text": ""}\n{"text": "two"}\n')
    assert read_documents(path) == [" one </s>\n", "two"]
    path.write_text('{"text": "one"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(RunError, match=r"cannot read text .*a\.jsonl: not Unicode"):
        read_documents(path)


def test_the_embedded_text_keeps_its_ids():
    documents = read_documents()
    assert len(max(documents, key=len)) > 1 << 17  # one that is tokenised in pieces
    digest = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
    assert digest.startswith("a0d76f778f8b4bae")
    some = [documents[3][:20_000], max(documents, key=len)]
    tokenizer = train_tokenizer([some[0]], 500)
    ids = encode_documents(some, tokenizer)
    # As transformers gives them, which is what recorded runs were trained on.
    of = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
    assert ids.tolist() == [0, *of[0], 0, *of[1], 0]
