"""What a model costs, against formulas written out by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moh.cli import ROOT
from moh.config import DiTConfig, HeadsConfig, LlamaConfig, TimmConfig
from moh.evaluation.cost import describe_model

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
