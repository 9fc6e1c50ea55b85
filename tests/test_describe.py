"""What a model costs, against formulas written out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import script_runs
import timm
import torch
from composed import composed
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from moh.backbones.build import build_model, without_pretrained
from moh.compose import ROOT, experiments
from moh.config import DiTConfig, HeadsConfig, LlamaConfig, TimmConfig
from moh.evaluation import cost
from moh.evaluation.cost import describe_model, example_inputs
from moh.evaluation.equal_blocks import pass_equal_blocks
from moh.model_parts import GROUPS, model_parts

HALF = HeadsConfig(name="moh_50", ratio=0.5)


def test_a_vit_costs_what_its_formula_says():
    model = TimmConfig(name="vit_tiny_patch16_224", img_size=64, num_classes=10)
    n, d, h, k, depth = 17, 192, 3, 64, 12
    # Floor of half of three heads is one; six layers, the deepest, have two of the 18 heads.
    active = [1] * 6 + [2] * 6
    attention = n * d * 3 * d + 2 * n * n * h * k + n * d * d
    dense = depth * (attention + 8 * n * d * d) + 16 * 768 * d + d * 10
    found = describe_model(model, HALF)
    assert found.mha_macs == pytest.approx(dense)
    assert found.activated_ratio == 0.5
    # One shared head of two, or none of one: rows of W_r, and of W_h where there are both.
    router = sum(n * d * ((3 if a == 1 else 2) + (2 if a == 2 else 0)) for a in active)
    assert found.dense_macs == pytest.approx(dense + router)
    saved = sum((1 - a / h) * (2 * n * n * h * k + 2 * n * d * h * k) for a in active)
    assert found.sparse_macs == pytest.approx(dense + router - saved)


def test_a_language_model_counts_half_of_the_square_and_a_token():
    model = LlamaConfig(
        name="tiny",
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    n, d = 48, 32
    layer = 4 * d * d + 3 * d * 64 + n * d  # a token; half of 2 n d
    found = describe_model(model, HeadsConfig(), seq_len=n)
    assert found.unit == "token"
    assert found.mha_macs == pytest.approx(2 * layer + 100 * d)
    assert found.dense_macs == found.sparse_macs == found.mha_macs


def test_all_heads_active_save_nothing():
    model = DiTConfig(name="tiny", input_size=8, patch_size=2, hidden_size=32, depth=2, num_heads=4)
    found = describe_model(model, HeadsConfig(name="all", ratio=1.0))
    assert found.sparse_macs == found.dense_macs > found.mha_macs


def test_the_command_prints_json_and_names_a_mistake():
    command = [sys.executable, "scripts/describe.py", "dit/moh_s2_75", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found = json.loads(done.stdout)["dit/moh_s2_75"]
    assert found["parameters"] == 32_998_688
    assert found["router_parameters"] == 35_328
    assert found["routed_layers"] == 10
    assert found["activated_ratio"] == 0.75
    command[2] = "dit/moh_s2_57"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("describe: unknown experiment 'dit/moh_s2_57'; nearest:")
    command[3] = "heads=moh_75"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == ("describe: 'heads=moh_75' is a setting, not the name of an experiment\n")


def full_macs(model, inputs, options):
    """Every block computed, on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        model.eval()(*inputs, **options)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("name", ["vit/moh_s_75", "dit/moh_l2_90", "llm/moh_s_50_100b"])
def test_one_block_in_the_place_of_all_gives_the_cost_of_all(name, monkeypatch):
    parts = model_parts([name])[name]
    model, heads = (OmegaConf.to_object(parts[group]) for group in ("model", "heads"))
    model = without_pretrained(model)
    seq_len = 256 if name.startswith("llm/") else None
    found = describe_model(model, heads, seq_len)
    # The model that is trained, its routers inside.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        built = build_model(model, heads)
        inputs, options = example_inputs(model, seq_len)
    dense = full_macs(built, inputs, options)
    if seq_len:  # half of the square
        dense -= model.num_hidden_layers * seq_len**2 * model.hidden_size
        dense /= seq_len
    assert found.dense_macs == pytest.approx(dense, rel=1e-12)
    assert found.parameters == sum(parameter.numel() for parameter in built.parameters())
    # Layer by layer, which is what sparse execution saves is taken from.
    monkeypatch.setattr(cost, "_COUNTED", {})
    monkeypatch.setattr(cost, "pass_equal_blocks", lambda model: {})
    assert describe_model(model, heads, seq_len) == found


@pytest.mark.parametrize(
    "name", ["test_convnext", "test_resnet", "test_vit", "test_efficientnet", "test_mambaout"]
)
def test_only_equal_blocks_are_left_out(name):
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model, x = timm.create_model(name).eval(), torch.empty(1, 3, 160, 160)
    whole = full_macs(model, (x,), {})
    stands_for = pass_equal_blocks(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        assert model(x).shape == (1, model.num_classes)
    counts, root = counter.get_flop_counts(), type(model).__name__
    left_out = sum(sum(counts.get(f"{root}.{first}", {}).values()) for first in stands_for.values())
    assert counter.get_total_flops() + left_out == 2 * whole


def test_blocks_that_differ_in_a_setting_or_see_another_shape_are_computed():
    class Block(torch.nn.Module):
        def __init__(self, times):
            super().__init__()
            self.times, self.linear = times, torch.nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(self.times):
                x = self.linear(x)
            return x

    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block(n) for n in (1, 2, 2, 1, 2))

        def forward(self, x):
            for block in self.blocks[:3]:
                x = block(x)
            for block in self.blocks[3:]:
                x = block(x[:2])
            return x

    model = Halves()
    stands_for = pass_equal_blocks(model)
    assert model(torch.zeros(6, 4)).shape == (2, 4)
    assert stands_for == {"blocks.2": "blocks.1"}


def test_without_names_each_model_is_passed_through_once(monkeypatch):
    passed = []
    count = cost._count
    monkeypatch.setattr(cost, "_COUNTED", {})
    monkeypatch.setattr(cost, "_count", lambda *given: passed.append(given) or count(*given))
    monkeypatch.setattr("moh.compose.compose_with", None)  # a tenth of a second for each
    found = json.loads(script_runs.finish("describe", "--json"))
    assert len(found) > 50
    models = {(row["model"], row["mha_macs"]) for row in found.values()}
    # A DiT whose MoH has other numbers of heads is passed through with these too.
    assert len(models) <= len(passed) <= len(models) + 6
    assert len(cost._COUNTED) == len(passed)
    assert found["vit/moh_b_75"]["dense_macs"] > found["vit/mha_b"]["mha_macs"]


def test_a_name_that_is_given_twice_is_shown_once_in_the_order_given():
    names = ["demo/vit/moh_50", "demo/vit/mha", "demo/vit/moh_50"]
    assert list(json.loads(script_runs.finish("describe", *names, "--json"))) == names[:2]


def test_describing_a_model_leaves_the_configuration_alone():
    model = TimmConfig(name="vit_tiny_patch16_224", img_size=32, num_classes=10)
    before = replace(model)
    first = describe_model(model, HALF)
    model.num_classes = 20
    second = describe_model(model, HALF)
    assert second.parameters - first.parameters == 10 * 193
    assert replace(model, num_classes=10) == before


def test_the_parts_of_an_experiment_are_those_that_hydra_composes():
    for name, parts in model_parts(experiments()).items():
        whole = composed(name)
        for group in GROUPS:
            assert parts[group] == whole[group], name
            assert OmegaConf.get_type(parts[group]) is OmegaConf.get_type(whole[group]), name
        if not any(OmegaConf.missing_keys(whole[group]) for group in GROUPS[:2]):
            ours, theirs = (
                [OmegaConf.to_container(config[group], resolve=True) for group in GROUPS]
                for config in (parts, whole)
            )
            assert ours == theirs, name
