"""Token shards: made by a script that may be killed, mixed by weight, the same for everybody."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import script_runs
import torch
from test_documents import zstd

from moh.cli import compose_config
from moh.config import TextConfig
from moh.data.mixture import BLOCK, MixtureStream, SequenceStream, ShardedText, apportion
from moh.data.permutation import Permutation
from moh.data.shards import TokenSource
from moh.data.text import read_documents, train_tokenizer
from moh.errors import RunError
from moh.runner import run

SEQ = 32


@pytest.fixture(scope="module")
def speeches():
    return [text[:6000] for text in read_documents()[:60]]


@pytest.fixture(scope="module")
def tokenizer(speeches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(speeches[:5], 400).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(speeches, tmp_path_factory):
    """Three files of 20 documents each; among them two records that hold none."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) + "\n" for text in speeches]
    lines[3] += "{torn\n"
    lines[30] += json.dumps({"text": " "}) + "\n"
    parts = ["".join(lines[i : i + 20]).encode() for i in (0, 20, 40)]
    (folder / "a.jsonl").write_bytes(parts[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(parts[1]))
    (folder / "c.jsonl.zst").write_bytes(zstd(parts[2]))
    return folder


def arguments(corpus, tokenizer, out, *more):
    return (
        *(out, "--source", corpus, "--tokenizer", tokenizer, "--workers", 1),
        *("--validation-share", 0.05, "--shard-tokens", 20_000, *more),
    )


@pytest.fixture(scope="module")
def made(corpus, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "speeches"
    said = script_runs.finish("tokenise", *arguments(corpus, tokenizer, out))
    os.symlink(out, out.parent / "again")
    assert "skipped records: 1 empty, 1 not JSON" in said
    return out


def test_shards_hold_every_document_once_with_boundaries(made, speeches):
    source = TokenSource(made)
    index = source.index
    assert index["dtype"] == "uint16"
    assert index["skipped"] == {"empty": 1, "not JSON": 1}
    assert len(index["shards"]) > 2
    from moh.data.text import load_tokenizer

    tokenizer = load_tokenizer(made / "tokenizer")
    tokens = source.read(0, source.num_tokens)
    found = Counter(tokenizer.decode(tokens).split("<|endoftext|>")) - Counter([""] * 99)
    held, held_bytes = source.held_out(10**9)
    of_held = tokenizer.decode(held).split("<|endoftext|>")[:-1]
    assert of_held == [speeches[i] for i in (10, 30, 50)]
    assert found + Counter(of_held) == Counter(speeches)
    assert held_bytes == sum(len(text.encode()) for text in of_held)
    assert index["train"]["bytes"] + held_bytes == sum(len(text.encode()) for text in speeches)
    assert np.array_equal(source.counts(), np.bincount(tokens, minlength=400))


def test_held_out_documents_are_whole_however_few(made):
    source = TokenSource(made)
    held, size = source.held_out(1)
    boundary = source.index["boundary"]
    assert (held == boundary).sum() == 1
    assert held[-1] == boundary
    both, more = source.held_out(len(held) + 3000)
    assert 1 < (both == boundary).sum() < 3 or len(both) > len(held)
    assert np.array_equal(both[: len(held)], held)
    assert more > size


def test_verification_finds_what_changed(made, tmp_path):
    copy = tmp_path / "copy"
    os.system(f"cp -r {made} {copy}")
    assert "every shard is right" in script_runs.finish("tokenise", copy, "--verify")
    shard = sorted((copy / "shards").iterdir())[1]
    raw = bytearray((shard / "train.npy").read_bytes())
    raw[-5] ^= 1
    (shard / "train.npy").write_bytes(raw)
    said = script_runs.finish("tokenise", copy, "--verify", status=1)
    assert f"{shard.name}/train.npy is damaged" in said.replace("\n", "")


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_shards(made, corpus, tokenizer, tmp_path):
    out = tmp_path / "killed"
    command = arguments(corpus, tokenizer, out)
    for death in range(6):
        # Between two shards, and while one is being written.
        shard = f"1of1-{(death + 1) // 2:05d}"
        names = (f".{shard}.*/train*", shard) if death % 2 else (shard,)
        script_runs.kill(
            *("tokenise", *command),
            when=lambda names=names: any(path for n in names for path in out.glob(f"shards/{n}")),
        )
    assert not (out / "index.json").exists()
    said = script_runs.finish("tokenise", *command)
    assert "goes on after" in said
    assert script_runs.files(out) == script_runs.files(made)
    assert not list((out / "shards").glob(".*"))
    # Another share is another set of shards.
    said = script_runs.finish("tokenise", *command, "--validation-share", 0.1, status=1)
    assert "holds shards of other sources, another tokenizer or other options" in said


def test_a_full_disk_leaves_nothing_half_written(made, corpus, tokenizer, tmp_path):
    out = tmp_path / "full"
    command = arguments(corpus, tokenizer, out)
    with script_runs.small_files(40_000):
        said = script_runs.finish("tokenise", *command, status=1)
    assert "shards/1of1-00000: no space left on the device, or a limit" in said
    assert not list(out.glob("shards/*")) + list(out.glob("shards/.*"))
    script_runs.finish("tokenise", *command)
    assert script_runs.files(out) == script_runs.files(made)


def test_parts_make_the_same_tokens_as_one(made, corpus, tokenizer, tmp_path):
    out = tmp_path / "parts"
    command = arguments(corpus, tokenizer, out, "--validation-share", 0)
    assert "1 of 2 parts are not done yet (1of2)" in script_runs.finish(
        "tokenise", *command, "--part", "2/2"
    )
    with pytest.raises(RunError, match=r"index\.json: No such file .* when all its parts are done"):
        TokenSource(out)
    script_runs.finish("tokenise", *command, "--part", "1/2")
    both, one = TokenSource(out), TokenSource(made)
    assert both.index["train"]["documents"] == 60
    total = both.counts() - one.counts() - np.bincount(one.held_out(10**9)[0], minlength=400)
    # The boundary before the first document of each shard is all that differs.
    total[both.index["boundary"]] -= len(both.index["shards"]) - len(one.index["shards"])
    assert not total.any()


def test_mistakes_of_a_command_are_one_line(corpus, tokenizer, tmp_path):
    out = tmp_path / "out"
    wrong = script_runs.finish(
        "tokenise", *arguments(corpus, tokenizer, out, "--text-key", "body"), status=1
    )
    assert "no text under 'body'" in wrong
    assert "--text-key" in wrong
    assert "no text file there" in script_runs.finish(
        "tokenise", *arguments(tmp_path / "none", tokenizer, out), status=1
    )
    (tmp_path / "torn.jsonl.gz").write_bytes((corpus / "b.jsonl.gz").read_bytes()[:-300])
    command = arguments(tmp_path / "torn.jsonl.gz", tokenizer, tmp_path / "torn")
    said = script_runs.finish("tokenise", *command, status=1)
    assert "cannot read" in said
    assert "--skip-damaged" in said
    said = script_runs.finish("tokenise", *command, "--skip-damaged")
    assert "1 the rest of a damaged file" in said
    assert TokenSource(tmp_path / "torn").index["train"]["documents"] > 5
    most = script_runs.finish(
        "tokenise", *arguments(corpus, tokenizer, tmp_path / "most", "--max-tokens", 30_000)
    )
    assert "1 shards" in most or "2 shards" in most


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 4097])
def test_the_computed_order_is_a_permutation(size):
    order = [Permutation(size, 7, "x")[i] for i in range(size)]
    assert sorted(order) == list(range(size))
    if size > 100:
        assert order != [Permutation(size, 8, "x")[i] for i in range(size)]
        # Neighbours are not neighbours any more.
        steps = np.abs(np.diff(order))
        assert abs(steps.mean() / size - 1 / 3) < 0.03


def test_the_computed_order_takes_no_memory_for_billions():
    order = Permutation(10**11, 0)
    items = [order[i] for i in range(2000)]
    assert len(set(items)) == 2000
    thirds = np.bincount(np.array(items) * 3 // 10**11, minlength=3)
    assert thirds.min() > 550


def test_shares_are_those_of_the_weights():
    paper = [4.24, 3.50, 4.37, 3.19, 10.94, 61.28, 12.48]
    assert apportion(paper, BLOCK) == [424, 350, 437, 319, 1094, 6128, 1248]
    assert apportion([1, 1, 1], 10) == [4, 3, 3]


def mixed(made: Path, seed: int = 0, weights: tuple[float, ...] = (3, 1)) -> MixtureStream:
    source = TokenSource(made)
    streams = [SequenceStream(source, name, SEQ, seed) for name in "ab"[: len(weights)]]
    return MixtureStream(streams, weights, seed)


def test_a_sample_is_the_same_whoever_asks_for_it(made):
    batch = mixed(made).read(range(64))
    assert batch.shape == (64, SEQ)
    assert batch.dtype == torch.int64
    # Two processes, each with its half of every batch of 16; then one that begins late.
    for rank in (0, 1):
        stream = mixed(made)
        for first in range(0, 64, 16):
            start = first + 8 * rank
            assert torch.equal(stream.batch(range(start, start + 8)), batch[start : start + 8])
    late = mixed(made)
    assert torch.equal(late.batch(range(40, 56)), batch[40:56])
    assert torch.equal(late.batch(range(8, 24)), batch[8:24])
    assert torch.equal(late.batch([5, 63, 2]), batch[[5, 63, 2]])
    assert not torch.equal(mixed(made, seed=1).read(range(64)), batch)


def test_each_source_has_its_share_and_every_pass_covers_it_once(made):
    stream = mixed(made)
    places = [stream.place(number) for number in range(2 * BLOCK)]
    for source, share in ((0, 7500), (1, 2500)):
        for block in (0, 1):
            own = [n for s, n in places[block * BLOCK : (block + 1) * BLOCK] if s == source]
            assert sorted(own) == list(range(block * share, (block + 1) * share))


class Counting:
    """A source whose tokens are their own places."""

    num_tokens = 1000

    def read(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start <= self.num_tokens - count
        return np.arange(start, start + count)


def test_every_pass_covers_a_source_once_in_another_order_and_at_another_offset():
    stream = SequenceStream(Counting(), "a", SEQ, 0)
    n = stream.num_sequences
    passes = [np.array([stream.read(i * n + j) for j in range(n)]) for i in range(3)]
    for rows in passes:
        assert (np.diff(rows, axis=1) == 1).all()
        assert len(np.unique(rows)) == n * SEQ > 1000 - 2 * SEQ
    assert len({int(rows.min()) for rows in passes}) > 1
    order = [rows[:, 0].argsort().tolist() for rows in passes]
    assert order[0] != order[1]


def config(root, **changes) -> TextConfig:
    return TextConfig(
        **{"name": "mix", "root": str(root), "seq_len": SEQ, "form": "shards"} | changes
    )


def test_a_mixture_is_opened_and_its_mistakes_are_one_line(made, tmp_path):
    for name in ("one", "two"):
        os.symlink(made, tmp_path / name)
    data = ShardedText.load(config(tmp_path, sources={"one": 3.0, "two": 1.0}), 400)
    assert data.train_tokens == 2 * TokenSource(made).num_tokens
    counts = data.token_counts(500)
    assert counts.shape == (500,)
    assert counts.sum() == pytest.approx(data.train_tokens)
    assert data.validation[0] == data.validation[-1] == TokenSource(made).index["boundary"]
    few = ShardedText.load(
        config(tmp_path, sources={"one": 3.0, "two": 1.0}, validation_tokens=10), 400
    )
    assert (few.validation == data.validation[0]).sum() == 3
    assert few.fingerprint != data.fingerprint
    described = data.stream(SEQ, 0).describe(50_000)
    assert described["one"]["share"] == 0.75
    assert described["one"]["passes"] == pytest.approx(
        37_500 / data.stream(SEQ, 0).streams[0].num_sequences, abs=1e-4
    )
    wrong = [
        (config(tmp_path, sources={"one": 1.0, "three": 1.0}), RunError, r"lacks three"),
        (
            config(tmp_path, sources={"one": 1.0, "two": 0.0}),
            ValueError,
            r"two 0.0 must be above 0",
        ),
        (config(tmp_path, sources={"one": 1.0, "two": 1e-6}), ValueError, "less than 1 in 10,000"),
        (config(tmp_path), RunError, r"cannot read .*index\.json"),
        (TextConfig(name="mix", seq_len=SEQ, form="shards"), RunError, "data.root is not set"),
    ]
    for settings, kind, message in wrong:
        with pytest.raises(kind, match=message) as caught:
            ShardedText.load(settings, 400)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"go up to 400 > model\.vocab_size 300"):
        ShardedText.load(config(made), 300)
    bare = tmp_path / "bare"
    os.system(f"cp -r {made} {bare}")
    for shard in bare.glob("shards/*"):
        np.save(shard / "validation_documents.npy", np.empty((0, 2), dtype=np.int64))
    with pytest.raises(RunError, match="holds no document that is held out"):
        ShardedText.load(config(bare), 400)
    with pytest.raises(RunError, match=r"needs at least \d+ training tokens"):
        ShardedText.load(config(made), 400).stream(10**6, 0)


def test_a_shard_that_is_missing_cut_or_foreign_is_named(made, tmp_path):
    copy = tmp_path / "copy"
    os.system(f"cp -r {made} {copy}")
    shards = sorted((copy / "shards").iterdir())
    whole = (shards[1] / "train.npy").read_bytes()
    (shards[1] / "train.npy").write_bytes(whole[:-100])
    with pytest.raises(RunError, match=rf"{shards[1].name}/train\.npy is damaged"):
        TokenSource(copy)
    (shards[1] / "train.npy").unlink()
    with pytest.raises(RunError, match=rf"cannot read .*{shards[1].name}/train\.npy: No such file"):
        TokenSource(copy)
    os.system(f"rm -r {shards[1]} && cp -r {shards[0]} {shards[1]}")
    with pytest.raises(RunError, match=rf"{shards[1].name} is not of .*index\.json"):
        TokenSource(copy)


def test_the_language_task_trains_on_shards_and_scores_their_held_out_part(made, tmp_path):
    run(
        compose_config(
            [
                "experiment=demo/llm/moh_50",
                "data=continue_8192",
                "+data.sources.speeches=2",
                "+data.sources.again=1",
                f"data.root={made.parent}",
                f"data.seq_len={SEQ}",
                "model.num_hidden_layers=1",
                "eval.tasks=[]",
                "eval.data_root=null",
                "trainer.samples=32",
                "trainer.global_batch=16",
                "optim.warmup_samples=16",
                f"runs_dir={tmp_path}/runs",
                f"results_dir={tmp_path}/results",
                "logger.progress=false",
                "logger.wandb=disabled",
            ]
        )
    )
    record = json.loads(next((tmp_path / "runs").rglob("run.json")).read_text())
    assert record["status"] == "finished"
    assert record["data"]["sources"]["again"]["share"] == pytest.approx(1 / 3, abs=1e-4)
    scores = json.loads(next((tmp_path / "runs").rglob("metrics.json")).read_text())["metrics"]
    source = TokenSource(made)
    assert record["data"]["validation_bytes"] == 2 * source.held_out(10**9)[1]
    counts = source.counts() * 2 + 1.0
    bits = -np.log2(counts / (counts.sum() + 2048 - len(counts)))
    held = source.held_out(10**9)[0]
    expected = bits[held].sum() / source.held_out(10**9)[1]
    assert scores["bits_per_byte_unigram"]["value"] == pytest.approx(expected, rel=1e-6)
