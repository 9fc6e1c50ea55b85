"""What is recorded and shown of benchmark results, and the paper's settings in conf/."""

from __future__ import annotations

import io

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from moh.cli import compose_config
from moh.config import EvalConfig
from moh.evaluation.lm_metrics import average_metrics, benchmark_metrics, benchmark_table
from moh.evaluation.lm_tasks import COMPOSITES, FOLDERS, average


def result(value, norm=None, n=100, **changes):
    metrics = {"acc": value} if norm is None else {"acc": value, "acc_norm": norm}
    metric = "acc" if norm is None else "acc_norm"
    return {
        "metrics": metrics,
        "stderr": dict.fromkeys(metrics, 0.03),
        "higher_is_better": dict.fromkeys(metrics, True),
        "metric": metric,
        "value": metrics[metric],
        "n": n,
        "shots": 0,
        "version": "1.0",
        "evaluated_demonstrations": 0,
        "cut_requests": 0,
        "lm_eval": "0.4.13",
        "batch_size": 8,
        "limit": None,
        **changes,
    }


RESULTS = {"sciq": result(0.5, 0.6), "piqa": result(0.7, 0.8), "winogrande": result(0.4)}


def test_an_average_is_of_scores_and_its_error_of_independent_benchmarks():
    mean = average(RESULTS)
    assert mean.value == pytest.approx((0.6 + 0.8 + 0.4) / 3)
    assert mean.stderr == pytest.approx(0.03 / 3**0.5)
    assert (mean.n, mean.absent) == (300, ())
    assert mean.members == {"sciq": "acc_norm", "piqa": "acc_norm", "winogrande": "acc"}
    some = average(RESULTS, ["piqa", "winogrande", "logiqa"], prefer="acc")
    assert some.value == pytest.approx(0.55)
    assert some.absent == ("logiqa",)
    with pytest.raises(ValueError, match="no benchmark"):
        average({})


def test_averages_of_a_configuration_and_their_variants():
    evaluation = EvalConfig(averages={"average": list(RESULTS), "two": ["sciq", "winogrande"]})
    metrics = average_metrics(RESULTS, evaluation)
    assert metrics["average"].value == pytest.approx(60)
    assert metrics["average/acc"].value == pytest.approx(100 * 1.6 / 3)
    # The scores are acc_norm already: no variant of that name.
    assert set(metrics) == {"average", "average/acc", "two", "two/acc"}
    assert metrics["average"].protocol == "mean of sciq acc_norm, piqa acc_norm, winogrande acc"
    assert metrics["average"].marks == []
    plain = average_metrics(RESULTS, EvalConfig())
    assert list(plain) == ["average"]
    assert plain["average"].protocol == "mean of sciq, piqa, winogrande"


def test_what_restricts_a_number_stands_beside_it():
    evaluation = EvalConfig(
        items={"sciq": 1000, "piqa": 100}, averages={"average": ["sciq", "piqa", "logiqa"]}
    )
    results = {
        "sciq": result(0.5, 0.6, cut_requests=3),
        "piqa": result(0.7, 0.8, evaluated_demonstrations=2),
    }
    metrics = benchmark_metrics(results, evaluation)
    assert metrics["sciq/acc"].marks == [
        "100 of 1,000 items",
        "3 prompts cut to the model's length",
    ]
    assert metrics["piqa/acc"].marks == ["2 demonstrations are evaluated rows"]
    mean = average_metrics(results, evaluation)["average"]
    assert mean.marks == ["without logiqa: not evaluated", "see the marks of sciq, piqa"]
    limited = EvalConfig(items={"sciq": 1000}, limit=100)
    few = {"sciq": result(0.5, 0.6, limit=100)}
    assert benchmark_metrics(few, limited)["sciq/acc"].marks == ["limit 100 items"]
    assert average_metrics(few, limited)["average"].marks == ["limit 100 items"]


def test_the_table_of_an_evaluation_fits_a_terminal():
    evaluation = OmegaConf.to_object(compose_config(["eval=llm_fourteen"]).eval)
    results = {name: result(0.5, 0.625, n=items) for name, items in evaluation.items.items()}
    results["sciq"]["cut_requests"] = 12
    averages = average_metrics(results, evaluation)
    out = io.StringIO()
    Console(file=out, width=80).print(benchmark_table(results, averages, evaluation))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (sciq,) = [line.split() for line in lines if line.strip().startswith("sciq")]
    assert sciq == ["sciq", "0", "acc_norm", "62.50", "±", "3.00*", "1,000"]
    labels = [line.strip().partition("  ")[0] for line in lines]
    assert [label for label in labels if label.startswith("average")] == [
        "average",
        "average of common 13",
        "average of fair 10",
    ]
    assert lines[-1].strip() == "* sciq: 12 prompts cut to the model's length"


GROUPS = ("llm_six", "llm_fourteen", "llm_fourteen_stage1", "llm_fifteen")


def settings(group):
    return OmegaConf.to_object(compose_config([f"eval={group}"]).eval)


@pytest.mark.parametrize("group", GROUPS)
def test_the_papers_benchmarks_are_fully_described(group):
    evaluation = settings(group)
    for of in (evaluation.shots, evaluation.score, evaluation.items):
        assert set(evaluation.tasks) <= set(of)
    assert set(evaluation.tasks) <= {*FOLDERS, *COMPOSITES}
    assert all(set(of) <= set(evaluation.tasks) for of in evaluation.averages.values())
    assert len(set(evaluation.tasks)) == len(evaluation.tasks)
    assert isinstance(evaluation.batch, int)


def test_averages_are_the_papers_and_the_fair_ones():
    six, table_4, table_g, both = map(settings, GROUPS)
    assert set(six.averages["average"]) == set(six.tasks)
    assert len(six.tasks) == 6
    assert set(six.averages["average"]) - set(six.averages["average_without_truthfulqa"]) == {
        "truthfulqa"
    }
    for table in (table_4, table_g):
        assert set(table.averages["average"]) == set(table.tasks)
        assert len(table.tasks) == 14
        assert set(table.averages["average_of_common_13"]) == set(table_4.tasks) & set(
            table_g.tasks
        )
        assert set(table.averages["average_of_fair_10"]) == set(table_4.tasks) - {
            "ceval-valid",
            "cmmlu",
            "gsm8k",
            "truthfulqa",
        }
    assert set(both.tasks) == set(table_4.tasks) | set(table_g.tasks)
    assert both.averages["average"] == table_4.averages["average"]
    assert both.averages["average_stage1"] == table_g.averages["average"]
    assert both.shots | table_4.shots == both.shots


@pytest.mark.parametrize(
    ("experiment", "group"),
    [("llm/mha_s_100b", "llm_six"), ("llm/moh_llama3_8b_75", "llm_fifteen")],
)
def test_rows_of_the_paper_evaluate_its_benchmarks(experiment, group):
    row = compose_config([f"experiment={experiment}"]).eval
    assert row == compose_config([f"eval={group}"]).eval
    assert (
        compose_config([f"experiment={experiment}", "eval=llm_six"]).eval.tasks
        == settings("llm_six").tasks
    )
