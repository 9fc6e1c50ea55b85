"""Language benchmarks: lm-eval's own numbers from local data, and what is said beside them."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from made_up_benchmarks import (
    exams,
    make_llama,
    make_tokenizer,
    questions,
    sums,
    truths,
    write_dataset,
)

import moh
from moh.evaluation.benchmarks import _result, evaluate_benchmarks
from moh.evaluation.heads import HeadLoad
from moh.evaluation.lm_harness import check_data, task_manager
from moh.evaluation.lm_tasks import score_metric


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def model():
    return moh.convert(make_llama(), moh.HeadPlan.from_ratio([4] * 2, [4] * 2, 0.75)).train()


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch):
    """A model that knows nothing never stops by itself."""
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(HFLM, "max_gen_toks", 12)


@pytest.fixture
def data_root(tmp_path):
    write_dataset(
        tmp_path, "baber/piqa", "default", train=questions(0, 4), validation=questions(10, 8)
    )
    write_dataset(tmp_path, "truthfulqa/truthful_qa", "multiple_choice", validation=truths(5))
    write_dataset(tmp_path, "openai/gsm8k", "main", train=sums(0, 3), test=sums(10, 3))
    return tmp_path


def lm_eval_itself(model, tokenizer, tasks, root, monkeypatch, **kwargs):
    """The same tasks through lm-eval's front door, as a user would call it in a data folder."""
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    monkeypatch.chdir(root)
    with TemporaryDirectory() as cache:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4)
        return simple_evaluate(lm, tasks=tasks, task_manager=task_manager(tasks), **kwargs)


def same(ours, theirs, task):
    for metric, value in ours["metrics"].items():
        name, _, filtered = metric.partition(",")
        raw = theirs["results"][task]
        assert value == raw[f"{name},{filtered or 'none'}"], (task, metric)
        assert ours["stderr"][metric] == raw[f"{name}_stderr,{filtered or 'none'}"]
    assert ours["n"] == theirs["n-samples"][task]["effective"]
    assert ours["shots"] == theirs["n-shot"][task]
    assert ours["version"] == str(theirs["versions"][task])


def test_scores_are_lm_evals_own_with_and_without_shots(model, tokenizer, data_root, monkeypatch):
    for shots in (0, 2):
        ours = evaluate_benchmarks(
            model,
            tokenizer,
            ["gsm8k", "piqa"],
            {"piqa": shots, "gsm8k": shots},
            limit=6,
            batch_size=4,
            data_root=data_root,
        )
        for task in ("piqa", "gsm8k"):
            theirs = lm_eval_itself(
                model, tokenizer, [task], data_root, monkeypatch, limit=6, num_fewshot=shots
            )
            same(ours[task], theirs, task)
        piqa = ours["piqa"]
        assert set(piqa["metrics"]) == {"acc", "acc_norm"}
        assert piqa["metric"] == "acc_norm"
        assert piqa["value"] == piqa["metrics"]["acc_norm"]
        assert piqa["higher_is_better"] == {"acc": True, "acc_norm": True}
        assert (piqa["batch_size"], piqa["limit"], piqa["lm_eval"]) == (4, 6, "0.4.13")
        assert ours["gsm8k"]["metric"] == "exact_match,strict-match"


def test_the_score_is_the_metric_that_is_asked_for(model, tokenizer, data_root):
    wanted = {"piqa": "acc", "truthfulqa": "mc1", "gsm8k": "exact_match,flexible-extract"}
    ours = evaluate_benchmarks(
        model, tokenizer, list(wanted), limit=2, data_root=data_root, score=wanted
    )
    assert {name: result["metric"] for name, result in ours.items()} == wanted
    assert all(result["value"] == result["metrics"][result["metric"]] for result in ours.values())


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


def test_a_subject_of_ceval(model, tokenizer, tmp_path):
    for subject in ("accountant", "law"):
        rows = {"dev": exams(subject, 0, 5), "val": exams(subject, 10, 6)}
        write_dataset(tmp_path, "ceval/ceval-exam", subject, **rows)
    task = "ceval-valid_law"
    ours = evaluate_benchmarks(model, tokenizer, [task], {task: 5}, data_root=tmp_path)[task]
    assert (ours["n"], ours["shots"], ours["evaluated_demonstrations"]) == (6, 5, 0)
    # Answers of one letter: normalising by their length changes nothing.
    assert ours["metrics"]["acc"] == ours["metrics"]["acc_norm"]


@pytest.mark.slow
def test_ceval_is_one_score_of_52_subjects(model, tokenizer, tmp_path, monkeypatch):
    names = sorted(task_manager(["ceval-valid"]).task_index["ceval-valid"].cfg["task"])
    subjects = [name.removeprefix("ceval-valid_") for name in names]
    lines = ["---", "configs:"]
    for number, subject in enumerate(subjects):
        count = 1 + number % 3
        rows = {"dev": exams(subject, 0, 5), "val": exams(subject, 10, count)}
        write_dataset(tmp_path, "ceval/ceval-exam", subject, **rows)
        readme = (tmp_path / "ceval/ceval-exam/README.md").read_text().splitlines()
        lines += readme[2:-1]
    (tmp_path / "ceval/ceval-exam/README.md").write_text("\n".join([*lines, "---", ""]))
    ours = evaluate_benchmarks(
        model, tokenizer, ["ceval-valid"], {"ceval-valid": 5}, batch_size=4, data_root=tmp_path
    )["ceval-valid"]
    assert len(subjects) == 52
    assert ours["n"] == sum(1 + number % 3 for number in range(52))
    theirs = lm_eval_itself(model, tokenizer, ["ceval-valid"], tmp_path, monkeypatch, num_fewshot=5)
    assert ours["metrics"]["acc"] == theirs["results"]["ceval-valid"]["acc,none"]


def test_truthfulqa_is_both_variants_and_their_mean(model, tokenizer, data_root, monkeypatch):
    ours = evaluate_benchmarks(model, tokenizer, ["truthfulqa"], batch_size=4, data_root=data_root)[
        "truthfulqa"
    ]
    metrics, tasks = ours["metrics"], ["truthfulqa_mc1", "truthfulqa_mc2"]
    theirs = lm_eval_itself(model, tokenizer, tasks, data_root, monkeypatch, log_samples=True)
    for label, task in zip(("mc1", "mc2"), tasks, strict=True):
        assert metrics[label] == theirs["results"][task]["acc,none"]
        assert ours["stderr"][label] == theirs["results"][task]["acc_stderr,none"]
    assert ours["value"] == metrics["mean"] == (metrics["mc1"] + metrics["mc2"]) / 2
    items = np.array([[sample["acc"] for sample in theirs["samples"][task]] for task in tasks])
    wanted = items.mean(0).std(ddof=1) / 5**0.5
    assert ours["stderr"]["mean"] == pytest.approx(wanted)
    assert (ours["n"], ours["metric"]) == (5, "mean")


def test_head_load_by_benchmark_leaves_scores_alone_and_padding_out(model, tokenizer, data_root):
    tasks = ["piqa", "gsm8k"]
    loads, results = [], []
    for batch_size in (1, 4):
        load = HeadLoad(["validation text", *tasks])
        with load.watch(model):
            watched = evaluate_benchmarks(
                model, tokenizer, tasks, batch_size=batch_size, data_root=data_root, load=load
            )
        alone = evaluate_benchmarks(
            model, tokenizer, tasks, batch_size=batch_size, data_root=data_root
        )
        assert watched == alone
        loads.append(load.to_json())
        results.append(watched)
    one, padded = loads
    assert list(padded["groups"]) == tasks
    # A batch of one is never padded: equal loads mean that no padding was counted.
    assert padded["groups"] == one["groups"]
    assert padded["groups"]["piqa"] != padded["groups"]["gsm8k"]
    for layers in padded["groups"].values():
        for layer, top_k in zip(layers, padded["top_k"], strict=True):
            assert sum(layer) == pytest.approx(top_k, abs=1e-5)


def test_evaluation_leaves_the_process_as_it_was(model, tokenizer, data_root, capsys):
    folder, streams = Path.cwd(), (random.getstate(), torch.get_rng_state())
    numpy_stream = np.random.get_state()[1].copy()
    level = logging.getLogger("lm_eval").level
    seen = []
    evaluate_benchmarks(
        model,
        tokenizer,
        ["piqa"],
        limit=2,
        data_root=data_root,
        report=lambda *step: seen.append(step),
    )
    assert seen == [("piqa", done, 4) for done in (1, 2, 3, 4)]
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
    rows[1]["goal"] = "Count. " * 500
    write_dataset(data_root, "baber/piqa", "default", train=questions(0, 4), validation=rows)
    long = {**sums(10, 1)[0], "question": "Count. " * 500}
    write_dataset(data_root, "openai/gsm8k", "main", train=sums(0, 3), test=[long, *sums(20, 2)])
    results = evaluate_benchmarks(model, tokenizer, ["piqa", "gsm8k"], data_root=data_root)
    # Both choices of the one question, and the other's prompt.
    assert [results[name]["cut_requests"] for name in ("piqa", "gsm8k")] == [2, 1]


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        (["piqaa"], {}, "'piqaa' is not a benchmark of lm-eval; nearest: piqa"),
        (["piqa"], {"shots": {"pica": 5}}, "'pica' is not a benchmark"),
        (["piqa"], {"score": {"pica": "acc"}}, "'pica' is not a benchmark"),
        (["piqa"], {"score": {"piqa": "f1"}}, "eval.score.piqa 'f1' .* it has acc; acc_norm"),
        (["truthfulqa"], {"score": {"truthfulqa": "acc"}}, "it has mc1; mc2; mean"),
        (["sciq"], {}, r"allenai/sciq does not exist.*make_benchmark_mirror"),
        (["piqa"], {"shots": {"piqa": 4}}, "4 shots, but its data hold 4 demonstrations"),
        (["piqa"], {"limit": 0}, "limit 0 must be at least 1"),
        (["piqa"], {"batch_size": 0}, "batch_size 0 must be at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_before_any_request(
    model, tokenizer, data_root, tasks, settings, message, monkeypatch
):
    if tasks == ["piqaa"]:
        names = type("Index", (), {"all_tasks": ["piqa", "sciq"]})
        monkeypatch.setattr("moh.evaluation.benchmarks.task_manager", lambda tasks: names)
    monkeypatch.setattr(model, "forward", None)
    with pytest.raises(ValueError, match=message) as refused:
        evaluate_benchmarks(model, tokenizer, tasks, data_root=data_root, **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"validation": questions(10, 8)}, "benchmark piqa: .*'train'.*make_benchmark_mirror"),
        ({"train": [], "validation": questions(0, 2)}, "benchmark piqa: .*make_benchmark_mirror"),
        (
            {"train": [{"goal": "x"}], "validation": [{"goal": "x"}]},
            "benchmark piqa: .*make_benchmark_mirror",
        ),
    ],
)
def test_incomplete_data_are_one_line(model, tokenizer, data_root, rows, message):
    write_dataset(data_root, "baber/piqa", "default", **rows)
    with pytest.raises(ValueError, match=message) as refused:
        evaluate_benchmarks(model, tokenizer, ["piqa"], data_root=data_root)
    assert "\n" not in str(refused.value)


def test_data_are_looked_for_before_any_work(data_root):
    check_data(["piqa", "truthfulqa", "gsm8k"], str(data_root))
    for name, dataset in (("sciq", "allenai/sciq"), ("mmlu", "cais/mmlu"), ("cmmlu", "cmmlu")):
        with pytest.raises(ValueError, match=f"benchmark {name}: .*{dataset} does not exist"):
            check_data(["piqa", name], str(data_root))


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


def test_a_score_is_chosen_by_name_or_by_habit():
    assert score_metric(["perplexity", "acc"]) == "acc"
    assert score_metric(["acc", "acc_norm"]) == "acc_norm"
    matches = ["exact_match,strict-match", "exact_match,flexible-extract"]
    assert score_metric(matches) == matches[0]
    assert score_metric(matches, "exact_match,flexible-extract") == matches[1]
    assert score_metric(["exact_match,remove_whitespace"], "exact_match").startswith("exact_match")
