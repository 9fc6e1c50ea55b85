"""The speed benchmark: what it times is the same thing, what it prints is what it measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

import moh
from moh.cli import ROOT
from moh.config import HeadsConfig

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark
from benchmarks import models, overheads, report, suite
from benchmarks.attention import attention_contenders, layer_contenders
from benchmarks.calibrate import least_keys
from benchmarks.reference import make_plain
from benchmarks.report import SECTIONS
from benchmarks.shape import AttentionShape
from benchmarks.timing import interleave, summarize

SMALL = AttentionShape(
    tokens=24,
    queries=24,
    heads=8,
    head_dim=8,
    batch=2,
    key_heads=8,
    ratio=0.5,
    shared_share=0.5,
    causal=False,
    backward=False,
    dtype="fp32",
    device="cpu",
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_all_contenders_compute_the_same_attention(causal, key_heads):
    shape = replace(SMALL, causal=causal, key_heads=key_heads)
    contenders, auto = attention_contenders(shape)
    assert auto == "dense"
    outputs = {name: run() for name, run in contenders.items()}
    for name in ("sparse", "auto", "reference"):
        torch.testing.assert_close(outputs[name], outputs["dense"], atol=2e-6, rtol=1e-5)
    assert not torch.allclose(outputs["mha"], outputs["dense"])
    grads = {
        name: run() for name, run in attention_contenders(replace(shape, backward=True))[0].items()
    }
    # A gate that is zero by selection passes nothing on to the router: its gradient is idle.
    idle = grads["sparse"][-1] == 0
    for name in ("sparse", "auto"):
        *ours, gates = grads[name]
        *theirs, expected = grads["dense"]
        pairs = [*zip(ours, theirs, strict=True), (gates[~idle], expected[~idle])]
        for one, other in pairs:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_all_contenders_compute_the_same_layer():
    outputs = {name: run() for name, run in layer_contenders(SMALL)[0].items()}
    for name in ("sparse", "auto", "reference"):
        torch.testing.assert_close(outputs[name], outputs["dense"], atol=2e-6, rtol=1e-5)
    for run in layer_contenders(replace(SMALL, backward=True))[0].values():
        run()


@pytest.mark.parametrize("name", ["demo/vit/moh_75", "demo/dit/moh_50", "demo/llm/moh_75"])
def test_the_plain_reference_of_a_model_computes_the_same(name):
    """With gradients: what the ratios to it are worth."""
    shape = models.ModelShape(name, 2, 20 if "llm" in name else None, True, "fp32", "cpu")
    config = shape.config()
    model = models.build_model(config.model, config.heads)
    for weight in model.parameters():
        if weight.requires_grad and not weight.any():  # DiT starts at zero output
            torch.nn.init.normal_(weight, std=0.1)
    plain = make_plain(models._twin(model))
    call = models._inputs(config.model, 2, shape.tokens, "cpu")
    found = []
    for one in (model, plain):
        model.zero_grad()
        out = call(one)
        (out.square().mean() + moh.balance_loss(one)).backward()
        found.append([out, *[p.grad for p in model.parameters() if p.grad is not None]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-3)


def test_a_whole_model_is_timed_in_training():
    shape = models.ModelShape("demo/vit/moh_50", 2, None, True, "fp32", "cpu")
    contenders, limit = models.model_contenders(shape)
    times = interleave(contenders, 0.1, 3, "cpu")
    record = summarize(times, limit)
    assert {len(taken) for taken in times.values()} == {3}
    assert 0.5 < record["limit"] < 1
    assert record["auto_over_reference"] > 0


@pytest.mark.parametrize("load", ["even", "skewed"])
def test_a_load_is_what_its_name_says(load):
    shape = replace(SMALL, tokens=4000, queries=4000, heads=16, key_heads=16, load=load)
    selected = shape.select()
    assert (selected.sum(-1) == shape.plan.top_k).all()
    share = selected.float().mean((0, 1))
    if load == "even":
        torch.testing.assert_close(share, torch.full_like(share, 1 / 3), atol=0.03, rtol=0)
    else:
        assert share[0] > 3 * share[-1]
        assert (share.diff() < 0.02).all()


def test_the_limit_is_the_share_of_active_heads():
    assert SMALL.attention_limit == 0.5
    long = replace(SMALL, tokens=10**6, queries=10**6)
    assert long.layer_limit == pytest.approx(0.5, abs=1e-3)
    assert replace(long, tokens=1).layer_limit > 0.75


def test_ratios_are_medians_of_rounds():
    times = {
        "mha": [1.0, 2.0, 4.0],
        "dense": [1.1, 2.2, 4.4],
        "sparse": [0.5, 1.0, 4.0],
        "auto": [0.6, 1.2, 2.4],
        "reference": [2.0, 4.0, 8.0],
    }
    found = summarize(times, 0.5)
    assert (found["mha_ms"], found["dense_over_mha"], found["sparse_over_mha"]) == (2000, 1.1, 0.5)
    assert found["quartiles_over_mha"]["sparse"] == [0.5, 0.75]
    assert found["auto_over_best"] == 1.2
    assert found["auto_over_reference"] == 0.3


@pytest.mark.parametrize(
    ("ratios", "keys"),
    [
        # Where the ratio passes one: halfway between two sizes on logarithmic axes.
        ({"128": 1.25, "512": 0.8, "1024": 0.7}, 256),
        # One size that loses a little does not send four that win much to dense execution.
        ({"128": 1.3, "256": 0.9, "512": 1.02, "1024": 0.9, "2048": 0.8}, 210),
        ({"128": 1.3, "256": 0.99, "512": 1.2, "1024": 0.9}, 794),
        ({"128": 0.9, "256": 0.8}, 128),
        ({"128": 1.5, "256": 1.01}, None),
        ({"128": 1.5, "256": 1.0}, None),
    ],
)
def test_thresholds_lose_least(ratios, keys):
    found = least_keys(ratios)
    assert found == keys if keys is None else found == pytest.approx(keys, abs=1)


def test_the_suite_holds_the_papers_shapes_and_both_loads():
    shapes = list(suite.measurements("cpu"))
    table7 = [shape for section, _, shape in shapes if section == "table7"]
    assert {(s.heads, s.head_dim, s.tokens) for s in table7} == {(32, 64, 256), (32, 64, 512)}
    assert {s.ratio for s in table7} == {0.9, 0.75, 0.5}
    assert {s.load for s in table7} == {"even", "skewed"}
    long = {(s.tokens, s.causal) for section, _, s in shapes if section == "long"}
    assert long == {(1024 * 2**i, causal) for i in range(5) for causal in (False, True)}


def test_the_page_says_what_was_measured(tmp_path):
    def record(**changes):
        found = {
            "section": "table7",
            "what": "attention",
            "tokens": 256,
            "heads": 32,
            "ratio": 0.5,
            "activated_ratio": 0.5,
            "causal": False,
            "backward": False,
            "load": "even",
            "auto": "sparse",
            "mha_ms": 8.0,
            "reference_ms": None,
            "dense_over_mha": 1.02,
            "sparse_over_mha": 0.8,
            "auto_over_mha": 0.8,
            "limit": 0.5,
            "quartiles_over_mha": {"sparse": [0.78, 0.82], "auto": [0.7, 0.9]},
        }
        return found | changes

    records = [
        record(),
        record(section="long", tokens=4096, causal=True),
        record(section="long", tokens=4096),
        record(
            section="model",
            experiment="vit/moh_s_75",
            train=True,
            batch=4,
            reference_ms=20.0,
            auto_over_reference=0.61,
        ),
    ]
    records[-1].pop("auto")
    environment = {
        "cpu": "A CPU",
        "threads": 2,
        "gpu": None,
        "python": "3.11",
        "torch": "2.14.1",
        "commit": "0123456789",
        "dirty": False,
    }
    data = {"environment": environment, "measurements": records}
    (tmp_path / "benchmark.json").write_text(json.dumps(data))
    page = report.render(tmp_path).read_text()
    assert "# Speed on A CPU, 2 threads" in page
    assert "| 256 | 32 | 50 % |  | 8.00 | too large | 1.02 | 0.80 ± 0.02 | 0.50 | sparse |" in page
    assert "| 1.25× | 1.60× |" in page
    assert "vit/moh_s_75, training step" in page
    assert (tmp_path / "speedup.png").stat().st_size > 10_000


def test_a_section_is_measured_anew_beside_kept_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite, "SECONDS", 0.0)
    sections = {name: SECTIONS[name] for name in ("table7", "long")}
    monkeypatch.setattr(suite, "SECTIONS", sections)
    monkeypatch.setattr(
        suite, "measurements", lambda _: iter([(name, "attention", SMALL) for name in sections])
    )
    suite.run("cpu", ["table7"])
    (path,) = tmp_path.glob("*/benchmark.json")
    assert "Not measured on this machine: long, backward" in (path.parent / "README.md").read_text()
    suite.run("cpu", list(sections))
    first = json.loads(path.read_text())
    for record in first["measurements"]:
        record["commit"] = "f" * 40
    path.write_text(json.dumps(first))
    suite.run("cpu", ["table7"])
    anew, kept = json.loads(path.read_text())["measurements"]
    assert (anew["section"], kept) == ("table7", first["measurements"][1])
    assert anew["commit"] != kept["commit"]
    assert (
        "Sections not measured anew: at commit fffffff." in (path.parent / "README.md").read_text()
    )


def test_the_training_loop_is_timed_beside_a_bare_one(tmp_path, monkeypatch):
    monkeypatch.setattr(overheads, "STEPS", 1)
    monkeypatch.setattr(overheads, "SETTINGS", ("trainer.global_batch=4",))
    found = overheads.measure_overheads("demo/dit/moh_75", "cpu", 0.0, 3)
    assert found["rounds"] == 3
    assert min(found["loop_over_bare"], found["moh_over_mha"]) > 0.1
    assert 0 < found["data_share"] < 1
    environment = {"cpu": "A CPU", "threads": 2, "gpu": None, "python": "3.11", "torch": "2.14.1"}
    environment |= {"commit": "0123456789", "dirty": True}
    found |= {"loop_over_bare": 1.0214, "quartiles_loop_over_bare": [1.0, 1.05]}
    data = {"environment": environment, "measurements": [found]}
    (tmp_path / "overheads.json").write_text(json.dumps(data))
    page = report.render(tmp_path).read_text()
    assert page.startswith("# Speed on A CPU, 2 threads\n")
    assert "commit 0123456 with changes" in page
    assert "| 1.021 ± 0.025 |" in page


def test_the_bare_loop_trains_the_same_model_to_the_same_weights(monkeypatch, tmp_path):
    """What is compared with the loop must be the same training."""
    monkeypatch.setattr(overheads, "STEPS", 3)
    config, task = overheads.prepared("demo/dit/moh_75", "cpu", tmp_path, "trainer.global_batch=4")
    config.heads = HeadsConfig()
    loops = [loop(config, task, "cpu", tmp_path) for loop in (overheads.loop, overheads.bare_loop)]
    for loop in loops:
        loop()
    ours, bare = (dict(loop.model.named_parameters()) for loop in loops)
    for name, weight in ours.items():
        torch.testing.assert_close(bare[name], weight, rtol=1e-5, atol=1e-7)


def test_the_command_prints_one_object(monkeypatch, capsys):
    arguments = ["attention", "--tokens", "20", "--heads", "4", "--head-dim", "8", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments, "--json"])
    assert benchmark.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert {"mha_ms", "dense_ms", "sparse_ms", "reference_ms", "limit"} <= set(found)
    assert {"dense_over_mha", "sparse_over_mha", "environment"} <= set(found)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    assert benchmark.main() == 0
    shown = capsys.readouterr().out
    assert "MoH sparse" in shown
    assert "limit 0.500; 3 rounds, auto took dense" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--heads", "4", "--kv-heads", "3"], "kv_heads 3 is no divisor of 4 heads"),
        (["attention", "--ratio", "1.5"], "ratio 1.5 is not in (0, 1]"),
        (["attention", "--queries", "1", "--causal"], "causal needs as many queries as tokens"),
        (["model", "--experiment", "demo/vit/mha"], "is an MHA baseline"),
        (["generate", "--heads", "4", "--kv-heads", "3"], "kv_heads 3 is no divisor of 4 heads"),
        (["generate", "--kv-heads", "0"], "key_heads 0 must be at least 1"),
        (["generate", "--context", "0"], "context 0 must be at least 1"),
        (["generate", "--head-dim", "7"], "head_dim 7 must be even"),
        (["generate", "--ratio", "0"], "ratio 0.0 is not in (0, 1]"),
        (["generate", "--first-token", "--cache", "static"], "first-token is measured with a grow"),
        (["layer", "--threads", "0"], "threads 0 must be at least 1"),
        (["train", "--experiment", "demo/vit/moh_57"], "demo/vit/moh_75"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    assert benchmark.main() == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("benchmark: ")
    assert error.count("\n") == 1
