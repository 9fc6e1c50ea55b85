"""Text: what is held out, a tokenizer that loses nothing, streams that only the seed decides."""

from __future__ import annotations

import lzma

import numpy as np
import pytest
import torch

from moh.config import TextConfig
from moh.data.text import (
    BOUNDARY,
    TextSet,
    TokenStream,
    encode_documents,
    read_documents,
    split_documents,
    train_tokenizer,
)
from moh.errors import RunError


@pytest.fixture(scope="module")
def speeches():
    return read_documents()


@pytest.fixture
def small_file(speeches, tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("\n\n".join(text[:2000] for text in speeches[:20]), encoding="utf-8")
    return path


def config(root=None, **changes):
    return TextConfig(
        name="text",
        root=None if root is None else str(root),
        seq_len=32,
        **{"validation_share": 0.2, **changes},
    )


def test_the_embedded_text_is_233_whole_speeches(speeches):
    assert len(speeches) == 233
    assert all("\n\n" not in text and text == text.strip() for text in speeches)
    assert sum(text.startswith(("Fellow", "To the ", "Mr. ")) for text in speeches) > 150


def test_held_out_documents_are_whole_spread_and_fixed(speeches):
    train, validation = split_documents(speeches, 0.02)
    assert [speeches.index(text) for text in validation] == [25, 75, 125, 175, 225]
    assert train + validation != speeches
    assert sorted(train + validation) == sorted(speeches)


@pytest.mark.parametrize(
    ("share", "count", "message"),
    [(0.0, 9, r"not in \(0, 0.5\]"), (0.6, 9, r"not in \(0, 0.5\]"), (0.02, 9, "none of 9")],
)
def test_a_share_that_leaves_nothing_is_refused(share, count, message):
    with pytest.raises(ValueError, match=message):
        split_documents(["x"] * count, share)


def test_documents_from_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.txt").write_text("first\n\nstill first")
    (tmp_path / "note.md").write_text("no document")
    assert read_documents(tmp_path) == ["first\n\nstill first", "second"]
    assert read_documents(tmp_path / "a.txt") == ["first", "still first"]
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"one\n \ntwo"))
    assert read_documents(tmp_path / "c.txt.xz") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content"), [("no.txt", None), ("torn.xz", b"\xfd7zXZ\x00"), ("latin.txt", b"\xe9")]
)
def test_text_that_cannot_be_read_is_one_line(name, content, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=name) as refused:
        read_documents(tmp_path / name)
    assert "\n" not in str(refused.value)


def test_the_tokenizer_loses_nothing_and_is_the_same_each_time(speeches):
    documents = [text[:3000] for text in speeches[:10]]
    tokenizer = train_tokenizer(documents, 400)
    assert len(tokenizer) == 400
    assert tokenizer.backend_tokenizer.to_str() == (
        train_tokenizer(documents, 400).backend_tokenizer.to_str()
    )
    strange = "  “Öl” \t\n\n漢字 \x02🙂" + documents[0]
    ids = encode_documents([strange, "next"], tokenizer)
    assert tokenizer.decode(ids) == f"{BOUNDARY}{strange}{BOUNDARY}next{BOUNDARY}"
    assert ids[0] == ids[-1] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(documents, 200)


def test_the_tokenizer_has_seen_the_training_part_alone(tmp_path):
    common = ["the people of the states"] * 9
    path = tmp_path / "text.txt"
    # Document 2 of every 5 is held out: it alone holds the word.
    path.write_text("\n\n".join([*common[:2], "zyzzyva " * 50, *common[:7]]))
    data = TextSet.load(config(path), 300, tmp_path)
    assert "zyzzyva" in data.tokenizer.decode(data.validation)
    assert "zyzzyva" not in data.tokenizer.decode(data.train)
    assert not any("zy" in token for token in data.tokenizer.get_vocab())


def test_the_cache_is_by_content_and_memory_mapped(small_file, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = TextSet.load(config(small_file), 300, cache)
    monkeypatch.setattr("moh.data.text.train_tokenizer", None)
    again = TextSet.load(config(small_file), 300, cache)
    monkeypatch.undo()
    assert isinstance(again.train, np.memmap)
    assert np.array_equal(again.train, first.train)
    assert again.fingerprint == first.fingerprint
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    others = [
        TextSet.load(config(small_file), 320, cache),
        TextSet.load(config(small_file, validation_share=0.25), 300, cache),
    ]
    small_file.write_text(small_file.read_text(encoding="utf-8") + " more", encoding="utf-8")
    others.append(TextSet.load(config(small_file), 300, cache))
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert len(list(cache.iterdir())) == 4


def test_bytes_are_those_of_the_documents(small_file, tmp_path):
    data = TextSet.load(config(small_file), 300, tmp_path)
    train, validation = split_documents(read_documents(small_file), 0.2)
    assert data.train_bytes == len("".join(train).encode())
    assert data.validation_bytes == len("".join(validation).encode())


def test_a_damaged_cache_is_named(small_file, tmp_path):
    TextSet.load(config(small_file), 300, tmp_path)
    shard = next(tmp_path.glob("text*/train.npy"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"train\.npy is damaged"):
        TextSet.load(config(small_file), 300, tmp_path)


def test_a_cache_that_cannot_be_written_leaves_nothing(small_file, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moh.data.text.np.save", full)
    cache = tmp_path / "cache"
    with pytest.raises(RunError, match="No space left on device"):
        TextSet.load(config(small_file), 300, cache)
    assert not list(cache.iterdir())


def test_a_given_tokenizer_is_used_and_checked(small_file, tmp_path):
    tokenizer = train_tokenizer(read_documents(small_file), 350)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = config(small_file, tokenizer=str(tmp_path / "tokenizer"))
    assert TextSet.load(settings, 400, tmp_path).tokenizer.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match=r"350 tokens > model\.vocab_size 300"):
        TextSet.load(settings, 300, tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        TextSet.load(config(small_file, tokenizer=str(tmp_path / "no")), 400, tmp_path)


def test_samples_are_functions_of_seed_and_number():
    tokens = np.arange(1000, dtype=np.uint16)
    stream = TokenStream(tokens, 32, seed=3)
    batch = stream.batch(range(100))
    assert batch.shape == (100, 32)
    assert batch.dtype == torch.int64
    # However it is cut into batches, in whatever order, by whomever.
    other = TokenStream(tokens, 32, seed=3)
    assert torch.equal(other.batch([70, 2, 99]), batch[[70, 2, 99]])
    assert torch.equal(torch.cat([other.batch(range(40)), other.batch(range(40, 100))]), batch)
    assert not torch.equal(TokenStream(tokens, 32, seed=4).batch(range(100)), batch)


def test_a_pass_covers_the_text_once_and_passes_differ():
    tokens = np.arange(1000, dtype=np.uint16)
    stream = TokenStream(tokens, 32, seed=0)
    n = stream.num_sequences
    passes = [stream.batch(range(i * n, (i + 1) * n)) for i in range(3)]
    for rows in passes:
        assert (rows.diff(dim=1) == 1).all()
        assert len(rows.unique()) == rows.numel() == n * 32 > 1000 - 2 * 32
    assert not torch.equal(passes[0], passes[1])
    # Another offset: the tokens without a prediction are others.
    assert len({int(rows.min()) % 32 for rows in passes}) > 1


def test_a_text_too_short_for_one_pass_is_refused():
    with pytest.raises(ValueError, match="needs at least 63 training tokens, the text has 62"):
        TokenStream(np.zeros(62, dtype=np.uint16), 32, seed=0)
    assert TokenStream(np.zeros(63, dtype=np.uint16), 32, seed=0).batch([0, 1, 5]).shape == (3, 32)
