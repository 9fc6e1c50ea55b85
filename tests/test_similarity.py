"""Similarity of heads against its definition, with patterns that each library itself computes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from synthetic_records import head_load, metric, write_run
from test_transnext import naive_bias, randomised, unit
from tiny_llama import llama, plan_of, tokens
from tiny_runs import folder_of, tiny

import moh
from moh.backbones.dit import DiT
from moh.backbones.transnext_attention import AggregatedAttention, TransNeXtAttention
from moh.cli import ROOT
from moh.evaluation import similarity as module
from moh.evaluation.noise_levels import (
    SamplingLoad,
    level_names,
    level_of,
    load_of_images,
    sampling_of,
)
from moh.evaluation.similarity import HeadSimilarity, similarity_metrics
from moh.heads import routers
from moh.reporting.records import HeadSimilarity as SimilarityRecord
from moh.reporting.records import load_records
from moh.reporting.report import build_report
from moh.reporting.similarity_figures import pair_mean, similarity_matrices
from moh.runner import load_config, run

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # patterns BHNM, outputs BNHK, gates


def naive(layers: list[Layer]) -> dict[str, float]:
    """The three scores by loops over layers, pairs and tokens."""
    means: dict[str, list[float]] = {"pattern": [], "output": [], "gated_output": []}
    for patterns, outputs, gates in layers:
        B, H, N, _ = patterns.shape
        sums = dict.fromkeys(means, 0.0)
        pairs = 0
        for i in range(H):
            for j in range(i):
                pairs += 1
                for b in range(B):
                    for n in range(N):
                        distance = (patterns[b, i, n] - patterns[b, j, n]).abs().sum()
                        sums["pattern"] += 1 - float(distance) / 2
                        y, z = outputs[b, n, i], outputs[b, n, j]
                        cosine = float(y @ z / (y.norm() * z.norm()))
                        sums["output"] += cosine
                        both = gates is None or bool(gates[b, n, i] > 0 and gates[b, n, j] > 0)
                        sums["gated_output"] += cosine if both else 0.0
        for kind, total in sums.items():
            if pairs:
                means[kind].append(total / (pairs * B * N))
    return {kind: sum(values) / len(values) for kind, values in means.items()}


def measured(model, *args, **kwargs) -> tuple[dict[str, float], HeadSimilarity]:
    similarity = HeadSimilarity()
    with similarity.watch(model), torch.no_grad():
        model(*args, **kwargs)
    return similarity.scores(), similarity


def gates_of(model, *args, **kwargs) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda _m, _i, routing: found.append(routing.gates_BNH))
        for _, router in routers(model)
    ]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def inputs_of(model, names: list[str], *args, **kwargs) -> dict[str, torch.Tensor]:
    """What goes into some submodules."""
    found = {}

    def keep(name):
        return lambda _m, inputs: found.setdefault(name, inputs[0].detach())

    handles = [model.get_submodule(n).register_forward_pre_hook(keep(n)) for n in names]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def check(mha, plan, layers: list[tuple[torch.Tensor, torch.Tensor]], *args, **kwargs) -> None:
    """MHA against the naive version, then MoH with the same patterns in its first layer."""
    scores, _ = measured(mha, *args, **kwargs)
    assert scores == pytest.approx(naive([(*layer, None) for layer in layers]), abs=2e-5)
    assert scores["gated_output"] == pytest.approx(scores["output"], abs=1e-12)
    converted = moh.convert(mha, plan)
    for _, router in routers(converted):
        for weight in router.parameters():
            torch.nn.init.normal_(weight)
    gates = gates_of(converted, *args, **kwargs)
    assert any((g == 0).any() for g in gates)
    _, similarity = measured(converted, *args, **kwargs)
    data = similarity.to_json("made up")
    first = naive([(*layers[0], gates[0])])
    assert {kind: mean_of(data[kind][0]) for kind in first} == pytest.approx(first, abs=2e-5)


def mean_of(matrix: list[list[float]]) -> float:
    values = torch.tensor(matrix)
    assert torch.equal(values, values.T)
    upper = torch.triu_indices(len(values), len(values), 1)
    return float(values[upper[0], upper[1]].mean())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_llama_causal_and_grouped(kv_heads):
    model, ids = llama(num_key_value_heads=kv_heads), tokens(2, 7)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        patterns = model(ids, output_attentions=True).attentions
    names = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    outputs = inputs_of(model, names, ids)
    layers = [
        (pattern, outputs[name].unflatten(-1, (4, 8)))
        for pattern, name in zip(patterns, names, strict=True)
    ]
    model.set_attn_implementation("sdpa")
    check(model, plan_of(), layers, ids)


def test_dit_of_several_widths():
    model = DiT(
        input_size=8, patch_size=4, in_channels=1, hidden_size=16, depth=2, num_heads=[2, 4],
        head_dim=8, num_classes=3,
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    inputs = (torch.randn(2, 1, 8, 8), torch.tensor([10, 900]), torch.tensor([0, 2]))
    names = [f"blocks.{i}.attn" for i in range(2)]
    outputs = inputs_of(model, [f"{name}.to_out.0" for name in names], *inputs)
    entering = inputs_of(model, [f"{name}.to_q" for name in names], *inputs)
    layers = []
    for name, heads in zip(names, (2, 4), strict=True):
        attn: Attention = model.get_submodule(name)
        attn.set_processor(AttnProcessor())
        x = entering[f"{name}.to_q"]
        with torch.no_grad():
            q, k = (attn.head_to_batch_dim(linear(x)) for linear in (attn.to_q, attn.to_k))
            pattern = attn.get_attention_scores(q, k)
        y = outputs[f"{name}.to_out.0"].unflatten(-1, (heads, 8))
        layers.append((pattern.unflatten(0, (2, heads)), y))
        attn.set_processor(AttnProcessor2_0())
    plan = moh.HeadPlan((moh.LayerPlan(2, 8, 1, 1), moh.LayerPlan(4, 8, 1, 1)))
    # Of two heads, one shared and one routed, both are always active: look at the second layer.
    scores, _ = measured(model, *inputs)
    assert scores == pytest.approx(naive([(*layer, None) for layer in layers]), abs=2e-5)
    moh.convert(model, plan)
    data = measured(model, *inputs)[1].to_json("made up")
    assert [len(matrix) for matrix in data["pattern"]] == [2, 4]
    assert mean_of(data["gated_output"][1]) != pytest.approx(mean_of(data["output"][1]), abs=1e-4)


def test_timm_vision_transformer():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=2, num_classes=3
    ).eval()
    for block in model.blocks:
        block.attn.fused_attn = False
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    image = torch.randn(2, 3, 32, 32)
    drops = [f"blocks.{i}.attn.attn_drop" for i in range(2)]
    projections = [f"blocks.{i}.attn.proj" for i in range(2)]
    found = inputs_of(model, [*drops, *projections], image)
    layers = [
        (found[drop], found[proj].unflatten(-1, (4, 8)))
        for drop, proj in zip(drops, projections, strict=True)
    ]
    check(model, moh.HeadPlan((moh.LayerPlan(4, 8, 1, 2),) * 2), layers, image)


class Alone(torch.nn.Module):
    """One layer as a model."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x):
        return self.attn(x)


def test_transnext_whole_grid():
    H, K, grid = 3, 4, (2, 3)
    layer = randomised(TransNeXtAttention(H * K, H, grid)).float()
    x = torch.randn(2, 6, H * K)
    q, k, v = layer.qkv(x).view(2, 6, 3, H, K).permute(2, 0, 3, 1, 4)
    places = [(row, column) for row in range(2) for column in range(3)]
    precise = layer.double()
    bias = torch.stack(
        [torch.stack([naive_bias(precise, p, o, grid) for o in places], -1) for p in places], 1
    )
    layer.float()
    patterns = torch.zeros(2, H, 6, 6)
    for b in range(2):
        for h in range(H):
            for n in range(6):
                scale = F.softplus(layer.temperature[h, 0, 0]) * torch.tensor(6.0).log()
                query = (unit(q[b, h, n]) + layer.query_embedding[h, 0]) * scale
                logits = [query @ unit(k[b, h, m]) + bias[h, n, m] for m in range(6)]
                patterns[b, h, n] = torch.stack(logits).softmax(0)
    outputs = (patterns @ v).transpose(1, 2)
    plan = moh.HeadPlan((moh.LayerPlan(H, K, 1, 1),))
    check(Alone(layer).eval(), plan, [(patterns.detach(), outputs.detach())], x)


def test_transnext_aggregated_patterns_are_window_and_pool_together():
    """The softmax weights that the layer drops out, before the learned tokens are added."""
    H, K, grid = 3, 4, (4, 4)
    layer = randomised(AggregatedAttention(H * K, H, grid, sr_ratio=2)).float()
    model, x = Alone(layer).eval(), torch.randn(2, 16, H * K)
    found = inputs_of(model, ["attn.attn_drop", "attn.proj"], x)
    patterns = found["attn.attn_drop"]
    assert patterns.shape == (2, H, 16, 9 + 4)
    torch.testing.assert_close(patterns.sum(-1), torch.ones(2, H, 16))
    outputs = found["attn.proj"].unflatten(-1, (H, K))
    check(model, moh.HeadPlan((moh.LayerPlan(H, K, 1, 1),)), [(patterns, outputs)], x)


def test_chunks_and_batches_change_nothing(monkeypatch):
    model, ids = llama(), tokens(3, 9)
    whole, _ = measured(model, ids)
    monkeypatch.setattr(module, "_CHUNK", 1)
    similarity = HeadSimilarity()
    with similarity.watch(model), torch.no_grad():
        model(ids[:1])
        model(ids[1:])
    assert similarity.scores() == pytest.approx(whole, abs=1e-6)
    assert similarity.tokens == 2 * 27
    assert not model.model.layers[0].self_attn._forward_hooks


def test_equal_heads_are_alike_and_heads_without_a_common_key_are_not():
    similarity = HeadSimilarity()
    model = llama(num_hidden_layers=1, num_key_value_heads=4)
    attn = model.model.layers[0].self_attn
    with torch.no_grad():
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj):
            linear.weight.copy_(linear.weight[:8].repeat(4, 1))
        with similarity.watch(model):
            model(tokens(1, 6))
    assert similarity.scores() == pytest.approx(
        {"pattern": 1, "output": 1, "gated_output": 1}, abs=1e-6
    )


def test_watching_changes_neither_outputs_nor_the_random_stream():
    model, ids = llama(), tokens(1, 5)
    with torch.no_grad():
        plain, state = model(ids).logits, torch.get_rng_state()
        with HeadSimilarity().watch(model):
            assert torch.equal(model(ids).logits, plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_metrics_say_what_they_are():
    similarity = measured(llama(), tokens(1, 5))[1]
    metrics = similarity_metrics(similarity, "5 tokens")
    assert list(metrics) == [f"{k}_similarity" for k in ("pattern", "output", "gated_output")]
    assert all(metric.higher_is_better is None for metric in metrics.values())
    assert all("5 tokens" in metric.protocol for metric in metrics.values())


def test_noise_levels_part_the_timesteps():
    assert level_names(1000)[0] == "t 0–199"
    assert level_names(1000)[-1] == "t 800–999"
    levels = level_of(torch.tensor([0, 199, 200, 999]), 1000)
    assert levels.tolist() == [0, 0, 1, 4]


def test_head_load_by_noise_level_adds_up_to_the_load_by_class():
    model = moh.convert(
        DiT(input_size=8, patch_size=4, in_channels=1, hidden_size=16, depth=1, num_heads=4,
            num_classes=2).eval(),
        moh.HeadPlan((moh.LayerPlan(4, 4, 1, 1),)),
    )  # fmt: skip
    x, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 2])
    pieces = []
    for numbers in (range(2), range(2, 4)):
        load = SamplingLoad(numbers, 1000)
        with sampling_of(model, numbers, 0, load), torch.no_grad():
            for t in (950, 450, 10):
                model(x, torch.full((4,), t), labels)  # guidance: twice the batch
        pieces.append((load.counts(), labels[:2]))
    data = load_of_images(model, pieces, ["a", "b"], 1000)
    assert data["axis"] == "noise level"
    assert list(data["axis_groups"]) == ["t 0–199", "t 400–599", "t 800–999"]
    for groups in ("groups", "axis_groups"):
        mean = torch.tensor(list(data[groups].values())).mean(0)
        torch.testing.assert_close(mean, torch.tensor(data["overall"]), atol=1e-5, rtol=0)
    assert torch.tensor(data["overall"]).sum() == pytest.approx(1, abs=1e-5)


def similarity_of(layers: int, heads: int) -> dict[str, object]:
    matrix = [[1.0 if i == j else 0.25 for i in range(heads)] for j in range(heads)]
    kinds = {kind: [matrix] * layers for kind in ("pattern", "output", "gated_output")}
    return {
        "samples": "made up",
        "layers": [f"b{i}" for i in range(layers)],
        "tokens": [1],
        **kinds,
    }


def test_the_report_shows_what_is_recorded_of_heads(tmp_path):
    load = head_load(0.5, 0) | {"axis": "noise level"}
    load["axis_groups"] = dict.fromkeys(("t 0–499", "t 500–999"), load["overall"])
    files = {"head_similarity.json": similarity_of(3, 8), "head_load.json": load}
    scores = {"pattern_similarity": metric(0.25, higher=None)}
    distance = {"fd_efficientnet_lite0": metric(177.0, higher=False)}
    write_run(tmp_path, "demo/dit/moh_50", 0, scores | distance, files)
    write_run(tmp_path, "demo/dit/mha", 0, scores, {"head_similarity.json": similarity_of(3, 8)})
    write_run(tmp_path, "demo/vit/mha", 0, files={"head_similarity.json": "{"})
    names = ["demo_head_similarity", "demo_dit"]
    page = build_report(tmp_path, tmp_path / "report.html", names).read_text()
    for alt in (
        "Curves: similarity of heads by layer",
        "Matrices: similarity of heads of DiT MHA",
        "Matrices: similarity of heads of DiT MoH-50",
        "Heatmap: head load of MoH-50 by noise level",
    ):
        assert alt in page
    assert "Matrices: similarity of heads of ViT MHA" not in page  # torn
    record = load_records(tmp_path).of("demo/dit/mha")[0].head_similarity
    assert record is not None
    assert pair_mean(record.matrices["pattern"][0]) == pytest.approx(0.25)
    deep = SimilarityRecord.from_dict(similarity_of(32, 4))
    titles = [axes.get_title() for axes in similarity_matrices(deep, "deep").axes]
    assert [title for title in titles if title][::5] == ["layer 1", "layer 32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    config = tiny("vit", tmp_path_factory.mktemp("look"), "eval.similarity_samples=5")
    run(config)
    return folder_of(config)


def test_a_run_records_the_similarity_of_its_heads(trained):
    metrics = json.loads((trained / "metrics.json").read_text())["metrics"]
    assert next(iter(metrics)) == "top1"
    data = json.loads((trained / "head_similarity.json").read_text())
    assert data["samples"].startswith("5 test images")
    assert [len(matrix) for matrix in data["pattern"]] == [4, 8]
    score = sum(mean_of(m) for m in data["pattern"]) / 2
    assert metrics["pattern_similarity"]["value"] == pytest.approx(score, abs=1e-4)
    published = trained.parents[4] / "results" / "runs"
    assert list(published.rglob("head_similarity.json"))


def script(*arguments: str) -> int:
    return runpy.run_path(str(ROOT / "scripts" / "look_at_heads.py"))["main"](arguments)


def test_the_script_looks_at_a_run(trained, tmp_path, capsys):
    assert script(str(trained), "--samples", "5", "--out", str(tmp_path / "out")) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "head_load.json",
        "head_load_by_class.png",
        "head_load_by_layer.png",
        "head_similarity.json",
        "head_similarity.png",
    ]
    found, recorded = (
        json.loads((folder / "head_similarity.json").read_text())
        for folder in (tmp_path / "out", trained)
    )
    assert found == recorded
    assert load_config(trained).name == "demo/vit/moh_50"
    assert "5 test images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo/vit/mhaa"], "unknown experiment 'demo/vit/mhaa'; nearest: demo/vit/mha"),
        (["demo/vit/mha", "runs_dir=/no/runs"], "/no/runs/demo/vit/mha"),
        (["/tmp"], "/tmp has no config.yaml: not a run folder"),
        (["demo/vit/mha", "--samples", "0"], "--samples 0 must be at least 1"),
        (["demo/vit/mha", "--checkpoint", "/no/such"], "checkpoint=/no/such does not exist"),
    ],
)
def test_a_mistake_in_the_script_is_one_line(arguments, message, capsys):
    assert script(*arguments) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"look_at_heads: {message}")
