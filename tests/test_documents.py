"""Documents: every form that corpora come in, what is skipped and why, tokens of the whole."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moh.data import plain_text
from moh.data.documents import Reading, Record, SkippedError, document, expand_sources
from moh.data.text import read_documents, train_tokenizer
from moh.data.tokenising import DocumentTokenizer
from moh.errors import RunError

TEXTS = ["first document", "zweites Dokument: Öl, 漢字 🙂", "third\nof two lines"]


def zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    # Two frames, as parallel compressors write them.
    ".zst": lambda raw: zstd(raw[:20]) + zstd(raw[20:]),
}


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def texts_of(path: Path, **options) -> list[str]:
    return [document(record, "text") for record in Reading(str(path), "text", **options)]


@pytest.fixture(scope="module")
def speeches():
    return read_documents()


@pytest.fixture(scope="module")
def tokenizer(speeches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text[:20000] for text in speeches[:10]], 600).save_pretrained(folder)
    return DocumentTokenizer(folder)


@pytest.mark.parametrize("packing", PACK)
def test_json_lines_and_plain_text_come_packed_in_every_way(packing, tmp_path):
    lines = tmp_path / f"a.jsonl{packing}"
    lines.write_bytes(PACK[packing](json_lines(TEXTS)))
    plain = tmp_path / f"a.b.txt{packing}"
    plain.write_bytes(PACK[packing]("\n\n".join(TEXTS).encode()))
    assert texts_of(lines) == TEXTS
    assert texts_of(plain) == ["\n\n".join(TEXTS)]
    assert texts_of(plain, blank_lines=True) == TEXTS
    assert expand_sources([str(tmp_path)]) == [str(plain), str(lines)]


def test_parquet_and_datasets_by_name(tmp_path, monkeypatch):
    path = tmp_path / "set" / "train.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "text": [*TEXTS, None]}), path)
    records = list(Reading(str(path), "text"))
    assert [document(record, "text") for record in records[:3]] == TEXTS
    with pytest.raises(SkippedError, match="no text under 'text'"):
        document(records[3], "text")
    with pytest.raises(RunError, match=r"no column 'body'; --text-key is one of n, text"):
        list(Reading(str(path), "body"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub = f"hub:{path.parent}"
    assert [record.data for record in Reading(hub, "text")][:3] == TEXTS
    with pytest.raises(RunError, match=r"cannot open data set .*nowhere") as caught:
        list(Reading("hub:nobody/nowhere", "text"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "not a JSON object"),
        (b'{"body": "x"}', "no text under 'text'"),
        (b'{"text": 3}', "no text under 'text'"),
        (b'{"text": " \\n\\t"}', "empty"),
        (b'{"text": "\xe9"}', "not UTF-8"),
        (b'{"text": "\\ud83d half"}', "not Unicode"),
    ],
)
def test_a_record_without_a_document_says_why(line, reason):
    with pytest.raises(SkippedError, match=reason):
        document(Record("line", line), "text")


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_a_file_that_is_cut_short_is_named(packing, tmp_path):
    path = tmp_path / f"a.jsonl{packing}"
    noise = np.random.default_rng(0).bytes(200_000).hex()
    raw = json_lines([noise[i : i + 4_000] for i in range(0, len(noise), 4_000)])
    path.write_bytes(PACK[packing](raw)[:-2000])
    with pytest.raises(RunError, match=rf"cannot read .*a\.jsonl\{packing} after \d+ records"):
        list(Reading(str(path), "text"))


def test_a_file_with_wrong_bytes_in_its_middle_is_named(tmp_path):
    noise = np.random.default_rng(0).bytes(100_000).hex().encode()
    raw = bytearray(gzip.compress(noise))
    raw[50_000:50_020] = b"\xff" * 20
    (tmp_path / "a.txt.gz").write_bytes(raw)
    with pytest.raises(RunError, match=r"cannot read .*a\.txt\.gz after 0 records") as caught:
        list(Reading(str(tmp_path / "a.txt.gz"), "text"))
    assert "\n" not in str(caught.value)


def test_sources_that_are_none_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text")
    (tmp_path / "a.json").write_text('[{"text": "x"},\n{"text": "y"}]')
    with pytest.raises(RunError, match=r"a\.csv: not one of \.jsonl"):
        expand_sources([str(tmp_path / "a.csv")])
    with pytest.raises(RunError, match="no text file there"):
        expand_sources([str(tmp_path / "no*.jsonl")])
    with pytest.raises(RunError, match="named twice"):
        expand_sources([str(tmp_path), str(tmp_path / "*.json")])
    with pytest.raises(RunError, match="one JSON array: one object a line is needed"):
        list(Reading(str(tmp_path / "a.json"), "text"))


def test_documents_are_text_whatever_is_written_in_them(tokenizer):
    texts = [*TEXTS, "what <|endoftext|> is"]
    encoded = tokenizer.encode([Record("text", text) for text in texts], "text")
    ends = np.cumsum(encoded.lengths)
    assert encoded.tokens[ends - 1].tolist() == [tokenizer.boundary] * 4
    assert (encoded.tokens == tokenizer.boundary).sum() == 4
    pieces = [tokenizer.tokenizer.decode(ids[:-1]) for ids in np.split(encoded.tokens, ends[:-1])]
    assert pieces == texts
    assert encoded.bytes.tolist() == [len(text.encode()) for text in texts]
    assert encoded.tokens.dtype == np.uint16


def test_skipped_records_are_counted_by_reason(tokenizer):
    records = [
        Record("text", ""),
        Record("text", "x"),
        Record("text", b"\xff"),
        Record("text", " "),
    ]
    encoded = tokenizer.encode(records, "text")
    assert encoded.skipped == Counter({"empty": 2, "not UTF-8": 1})
    assert len(encoded.lengths) == 1


def metaspace(folder: Path) -> DocumentTokenizer:
    """A tokenizer of LLaMA's kind: a space before every text, no splitting before the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"])
    made.train_from_iterator(["the people of the states and the laws of the union"] * 5, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(folder)
    return DocumentTokenizer(folder)


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_a_very_long_document_has_the_tokens_of_the_whole(
    kind, tokenizer, speeches, tmp_path, monkeypatch
):
    used = tokenizer if kind == "byte level" else metaspace(tmp_path)
    text = "the people of the states " * 300 if kind == "metaspace" else speeches[3][:30_000]
    # Stretches without a place to cut, and runs of spaces.
    text = f"{text}{'x' * 5000}  \n\n   {text}{'漢' * 3000}, {text}"
    whole = used.encode([Record("text", text)], "text")
    monkeypatch.setattr(plain_text, "PIECE", 1000)
    pieces = []
    plain = used._plain
    piece = plain._piece
    monkeypatch.setattr(plain, "_piece", lambda text: pieces.append(len(text)) or piece(text))
    cut = used.encode([Record("text", text)], "text")
    assert np.array_equal(cut.tokens, whole.tokens)
    assert max(pieces) < 20_000
    assert sum(size > 256 for size in pieces) > 10


def test_a_tokenizer_that_cannot_serve_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a folder"):
        DocumentTokenizer(tmp_path / "no")
    train_tokenizer(["x"], 300).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("bos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="has no begin token"):
        DocumentTokenizer(tmp_path, begin=True)
