"""The benchmark of generation: equal tokens from all contenders, times and rates on the page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from moh.cli import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark
from benchmarks import report_cells, suite
from benchmarks.generate import CACHES, GenerateShape, generate_contenders
from benchmarks.measure import measure

TINY = GenerateShape(
    context=9,
    batch=2,
    layers=1,
    heads=4,
    key_heads=4,
    head_dim=8,
    ratio=0.5,
    shared_share=0.5,
    new_tokens=3,
    cache="growing",
    first=False,
    dtype="fp32",
    device="cpu",
)


GENERATION = ["generate", "--context", "20", "--layers", "1", "--heads", "4", "--head-dim", "8"]
GENERATION += ["--new-tokens", "2", "--rounds", "3"]


@pytest.mark.parametrize("options", [[], ["--cache", "static"], ["--first-token"]])
def test_generation_is_timed_by_token(options, monkeypatch, capsys):
    arguments = [*GENERATION, "--kv-heads", "2", "--batch", "2", *options]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments, "--json"])
    assert benchmark.main() == 0
    found = json.loads(capsys.readouterr().out)
    roomy = not options
    assert ("reserved_ms" in found) == roomy
    assert ("auto_over_reserved" in found) == roomy
    assert min(found["mha_ms"], found["auto_over_mha"]) > 0
    assert (found["what"], found["auto"], found["batch"]) == ("generate", "dense", 2)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    assert benchmark.main() == 0
    shown = capsys.readouterr().out
    assert ("MHA, cache with room" in shown) == roomy
    assert ("tokens a second: MHA" in shown) == (options != ["--first-token"])


@pytest.mark.parametrize("cache", CACHES)
def test_all_ways_to_generate_make_the_same_tokens_and_leave_the_cache(cache):
    shape = replace(TINY, cache=cache)
    contenders, auto = generate_contenders(shape)
    assert auto == "dense"
    for _ in range(3):
        texts = {name: run() for name, run in contenders.items()}
        for text in texts.values():
            assert text.shape == (2, 9 + 1 + shape.new_tokens)
    assert torch.equal(contenders["dense"](), contenders["sparse"]())
    assert torch.equal(contenders["dense"](), contenders["auto"]())
    if cache == "growing":
        assert torch.equal(contenders["mha"](), contenders["reserved"]())


def test_generation_has_its_limit_in_active_heads():
    assert replace(TINY, ratio=1.0, shared_share=0.75).limit == pytest.approx(1, abs=0.1)
    assert replace(TINY, context=10**6).limit == pytest.approx(0.5, abs=0.01)
    assert 0.5 < replace(TINY, context=10**4).limit < replace(TINY, context=10).limit


def test_the_suite_generates_short_and_long_alone_and_in_batches():
    shapes = list(suite.generations("cpu"))
    assert {512, 32768} <= {s.context for s in shapes if s.batch == 1 and not s.first}
    assert {s.batch for s in shapes} == {1, 8}
    assert {s.cache for s in shapes} == {"growing", "static"}
    assert any(s.key_heads < s.heads for s in shapes)
    assert max(s.context for s in shapes if s.first) == 4096
    assert [s for section, _, s in suite.measurements("cpu") if section == "generate"] == shapes


def test_the_page_has_a_row_for_each_generation():
    record = measure("generate", TINY, 0.0, 2) | {"section": "generate", "mha_ms": 4.0}
    record |= {"auto_ms": 2.0, "reserved_ms": None, "reserved_over_mha": None}
    lines = list(report_cells.generation_table([record, record | {"first": True}]))
    assert {line.count("|") for line in lines} == {len(report_cells.GENERATION) + 1}
    assert "| 9 | 2 | 4, 4 | 50 % |  | 4.00 | 500 | – |" in lines[2]
    assert lines[2].endswith("| 1000 |")
    assert "| first token | 4.00 | – |" in lines[3]
    assert "generate  9 | 2 | 4, 4 | 50 %" in suite.line(record)
