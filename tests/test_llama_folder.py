"""Any LLaMA folder: its own sizes, weights, heads and tokenizer, and one command for its scores."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_up_benchmarks import VOCAB, make_llama, make_tokenizer, questions, write_dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moh
from moh.backbones.llama import MoHLlamaForCausalLM
from moh.backbones.llama_folder import load_llama, read_config, sizes
from moh.cli import compose_jobs
from moh.evaluation.benchmarks import evaluate_benchmarks
from moh.evaluation.lm_harness import task_manager
from moh.runner import run, run_id
from moh.validation import validate

PLAN = moh.HeadPlan.from_ratio([4] * 2, [4] * 2, 0.75)
ROUTERS = {
    "two_stage": moh.RouterOptions(),
    "query_norm": moh.RouterOptions(kind="query_norm"),
}
IDS = torch.arange(24).reshape(2, 12)


def moh_llama(kind="two_stage"):
    model = moh.convert(make_llama(), PLAN, ROUTERS[kind])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A MoH LLaMA and its tokenizer, as a user saves them."""
    path = tmp_path / "model"
    moh_llama().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_llama_keeps_its_sizes_and_outputs(tied, tmp_path):
    model = make_llama(tie_word_embeddings=tied, rope_theta=5000.0)
    model.save_pretrained(tmp_path)
    stated = sizes(read_config(tmp_path))
    assert stated["num_key_value_heads"] == 2
    assert (stated["vocab_size"], stated["tie_word_embeddings"]) == (VOCAB, tied)
    assert stated["rope_theta"] == 5000.0
    loaded = load_llama(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    half = load_llama(tmp_path, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_moh_folder_brings_its_heads(kind, tmp_path):
    model = moh_llama(kind)
    model.save_pretrained(tmp_path)
    loaded = load_llama(tmp_path)
    assert type(loaded) is MoHLlamaForCausalLM
    assert moh.head_plan(loaded) == PLAN
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_the_released_moh_llama3_is_known_by_its_code_which_is_never_run(tmp_path):
    model = make_llama()
    model.save_pretrained(tmp_path)
    edit(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    code = tmp_path / "modeling_llama.py"
    code.write_text("self.routed_head = 1\nself.shared_head = 2\nraise SystemExit('was run')\n")
    loaded = load_llama(tmp_path)
    assert set(moh.head_plan(loaded)) == {moh.LayerPlan(4, 4, 2, 1)}
    by_hand = moh.convert(make_llama(), moh.head_plan(loaded), ROUTERS["query_norm"])
    by_hand.load_state_dict(model.state_dict())
    assert torch.equal(loaded(IDS).logits, by_hand(IDS).logits)
    code.write_text("raise SystemExit('was run')\n")
    with pytest.raises(ValueError, match=r"code of its own \(modeling_llama.Llama.*is not run"):
        load_llama(tmp_path)


def command(folder, tmp_path, *overrides):
    mode = () if any(word.startswith("mode=") for word in overrides) else ("mode=eval",)
    return compose_jobs(
        [
            "experiment=llm/llama_folder",
            *mode,
            f"model.pretrained={folder}",
            f"runs_dir={tmp_path}/runs",
            f"results_dir={tmp_path}/results",
            f"eval.data_root={tmp_path}",
            "eval.tasks=[piqa]",
            "logger.wandb=disabled",
            *overrides,
        ]
    )[0]


def test_one_command_scores_a_folder_without_any_text(folder, tmp_path, capsys, monkeypatch):
    write_dataset(
        tmp_path, "baber/piqa", "default", train=questions(0, 2), validation=questions(10, 8)
    )
    monkeypatch.setattr("moh.tasks.language.TextSet", None)
    config = command(folder, tmp_path)
    run(config)
    record = tmp_path / "results" / "runs" / run_id(config)
    saved = json.loads((record / "run.json").read_text())
    assert (saved["status"], saved["heads"]) == ("evaluated", "own")
    assert "share" not in saved
    assert saved["head_plan"] == PLAN.to_dict()
    assert saved["parameters"] == sum(p.numel() for p in moh_llama().parameters())
    assert saved["pretrained"]["folder"] == str(folder)
    assert len(saved["pretrained"]["sha256"]) == 64
    scores = json.loads((record / "metrics.json").read_text())
    piqa = scores["benchmarks"]["piqa"]
    assert (piqa["n"], piqa["shots"], piqa["version"], piqa["batch_size"]) == (8, 0, "1.0", 1)
    assert set(piqa["stderr"]) == {"acc", "acc_norm"}
    metric = scores["metrics"]["piqa/acc_norm"]
    assert metric["value"] == 100 * piqa["metrics"]["acc_norm"]
    assert metric["marks"] == ["8 of 1,838 items"]
    absent = "without 13 of its 14 benchmarks: not evaluated"
    assert absent in scores["metrics"]["average"]["marks"]
    assert list(json.loads((record / "head_load.json").read_text())["groups"]) == ["piqa"]
    assert "vocab_size: 300\n" in (record / "config.yaml").read_text()
    printed = capsys.readouterr().out
    assert "piqa                       0   acc_norm" in printed
    assert "* piqa: 8 of 1,838 items" in printed


def test_text_adds_bits_per_byte_and_precision_is_of_the_weights(folder, tmp_path):
    write_dataset(
        tmp_path, "baber/piqa", "default", train=questions(0, 2), validation=questions(10, 2)
    )
    (tmp_path / "text").mkdir()
    for n in range(4):
        (tmp_path / "text" / f"{n}.txt").write_text(f"Document {n}. " * 40)
    arguments = (f"data.root={tmp_path}/text", "data.validation_share=0.25", "data.seq_len=32")
    config = command(folder, tmp_path, *arguments, "eval.precision=bf16")
    run(config)
    path = tmp_path / "results" / "runs" / run_id(config) / "metrics.json"
    metrics = json.loads(path.read_text())["metrics"]
    assert metrics["bits_per_byte"]["value"] > 0
    assert metrics["piqa/acc"]["protocol"].endswith("batch 1, bf16")


def test_precision_is_lm_evals_dtype(folder, tmp_path, tokenizer, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    rows = [{"text": f"one two three and then comes {n}"} for n in range(6)]
    write_dataset(tmp_path, "EleutherAI/lambada_openai", "default", test=rows)
    task = "lambada_openai"
    fine, coarse = (
        evaluate_benchmarks(load_llama(folder, dtype), tokenizer, [task], data_root=tmp_path)
        for dtype in (torch.float32, torch.bfloat16)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm = HFLM(pretrained=str(folder), dtype="bfloat16", device="cpu", batch_size=8)
    theirs = simple_evaluate(lm, tasks=[task], task_manager=task_manager([task]))
    assert coarse[task]["metrics"]["perplexity"] == theirs["results"][task]["perplexity,none"]
    assert coarse[task]["metrics"] != fine[task]["metrics"]


def test_a_plain_folder_takes_heads_from_the_configuration(tmp_path):
    model = make_llama()
    model.save_pretrained(tmp_path)
    heads = ("heads=moh_ratio", "heads.ratio=0.75")
    assert validate(command(tmp_path, tmp_path, *heads)).heads.ratio == 0.75
    wrong = ("heads=llama3_8b_75",)
    with pytest.raises(ValueError, match=r"heads.layers covers 32 layers, the model has 2"):
        validate(command(tmp_path, tmp_path, *wrong))


def broken(folder, how):
    weights = folder / "model.safetensors"
    if how == "no weights":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how in ("missing", "shape"):
        state = load_file(weights)
        name = "model.layers.1.self_attn.q_proj.weight"
        old = state.pop(name)
        save_file(state if how == "missing" else state | {name: old[:-1].clone()}, weights)
    else:
        weights.unlink()
        with open(folder / "pytorch_model.bin", "wb") as file:
            pickle.dump({"model.norm.weight": Path("x")}, file)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no weights", r"holds neither \*.safetensors nor pytorch_model\*.bin"),
        ("cut", "cannot load .*model"),
        ("missing", r"do not fit its config.json; missing: model.layers.1.self_attn.q_proj"),
        ("shape", r"of another shape: model.layers.1.self_attn.q_proj.weight"),
        ("code", "is refused|cannot load"),
    ],
)
def test_weights_that_are_no_model_are_one_line(folder, how, message):
    broken(folder, how)
    with pytest.raises(RuntimeError, match=message) as refused:
        load_llama(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"model_type": "mistral"}, (), "is no LLaMA: its model_type is 'mistral'"),
        ({}, ("heads=moh_75",), "has heads of its own; leave heads=mha"),
        ({}, ("model.vocab_size=99",), "model.vocab_size 99 is not that of .*: 300"),
        ({}, ("eval.precision=int8",), "eval.precision 'int8' is not one of fp32, bf16, fp16"),
        ({}, ("mode=train",), "trainer.samples 0 must be at least 1"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_any_work(
    folder, tmp_path, change, overrides, message
):
    edit(folder, **change)
    with pytest.raises(ValueError, match=message) as refused:
        validate(command(folder, tmp_path, *overrides))
    assert "\n" not in str(refused.value)


def test_no_folder_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"model.pretrained has no value"):
        validate(compose_jobs(["experiment=llm/llama_folder"])[0])
    with pytest.raises(ValueError, match=r"model.pretrained=/no/such does not exist"):
        validate(command("/no/such", tmp_path))
    with pytest.raises(ValueError, match=r"has no config.json"):
        validate(command(tmp_path, tmp_path))


def test_a_folder_without_tokenizer_or_data_says_so(folder, tmp_path):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(RuntimeError, match=r"piqa does not exist.*make_benchmark_mirror"):
        run(command(folder, tmp_path))
    write_dataset(
        tmp_path, "baber/piqa", "default", train=questions(0, 2), validation=questions(10, 2)
    )
    with pytest.raises(RuntimeError, match=r"no tokenizer in .*data\.tokenizer=FOLDER"):
        run(command(folder, tmp_path))
    assert not (tmp_path / "runs").exists()


FRESH = """
import sys
from transformers import AutoModelForCausalLM
import torch
assert not any(name.startswith("moh") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
torch.save(model(torch.arange(24).reshape(2, 12)).logits, {out!r})
model.save_pretrained({again!r})
"""


def test_a_saved_folder_loads_in_a_process_that_knows_nothing_of_it(folder, tmp_path):
    places = {"folder": folder, "out": tmp_path / "logits.pt", "again": tmp_path / "again"}
    code = FRESH.format(**{name: str(path) for name, path in places.items()})
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is MoHLlamaForCausalLM
    assert torch.equal(torch.load(places["out"]), model(IDS).logits)
    names = {path.name for path in folder.iterdir() if not path.name.startswith("tokenizer")}
    assert {path.name for path in places["again"].iterdir()} == names
    first, again = (
        json.loads((path / "config.json").read_text()) for path in (folder, places["again"])
    )
    assert again["auto_map"] == first["auto_map"]


def test_a_saved_folder_without_the_package_says_what_it_needs(folder, monkeypatch):
    import_it = builtins.__import__

    def without_moh(name, *args, **kwargs):
        if name.startswith("moh"):
            raise ModuleNotFoundError("No module named 'moh'", name="moh")
        return import_it(name, *args, **kwargs)

    (code,) = folder.glob("*.py")
    monkeypatch.setattr(builtins, "__import__", without_moh)
    with pytest.raises(ImportError, match="package moh, which is not installed") as refused:
        exec(compile(code.read_text(), code, "exec"), {"__name__": "modeling_moh_llama"})
    assert "\n" not in str(refused.value)


def test_a_reverted_model_saves_as_a_plain_llama(folder, tmp_path):
    model = moh.revert(AutoModelForCausalLM.from_pretrained(folder))
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "auto_map" not in config
    assert not list((tmp_path / "plain").glob("*.py"))
