"""All measurements of ``make benchmark``, and the page made of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import GenerateShape
from benchmarks.measure import environment, measure
from benchmarks.models import ModelShape
from benchmarks.overheads import EXPERIMENTS, measure_overheads
from benchmarks.report import SECTIONS, render
from benchmarks.report_cells import generation_cells
from benchmarks.shape import AttentionShape
from moh.runner import write_json

RESULTS = Path(__file__).resolve().parents[2] / "results" / "benchmarks"
SECONDS, ROUNDS = 6.0, 40
OVERHEAD_SECONDS = 60.0
SHARED_SHARE = 0.5

Measurement = tuple[str, str, AttentionShape | ModelShape | GenerateShape]


def measurements(device: str) -> Iterator[Measurement]:
    """Section, what, shape: the paper's shapes first."""
    paper = AttentionShape(
        tokens=256,
        queries=256,
        heads=32,
        head_dim=64,
        batch=1,
        key_heads=32,
        ratio=0.5,
        shared_share=SHARED_SHARE,
        causal=False,
        backward=False,
        dtype="fp32" if device == "cpu" else "bf16",
        device=device,
    )
    for tokens in (256, 512):
        for ratio in (0.9, 0.75, 0.5):
            for load in ("even", "skewed"):
                shape = replace(paper, tokens=tokens, queries=tokens, ratio=ratio, load=load)
                yield "table7", "attention", shape
    few = replace(paper, heads=16, key_heads=16)
    for causal in (False, True):
        for tokens in (1024, 2048, 4096, 8192, 16384):
            for ratio in (0.75, 0.5):
                shape = replace(few, tokens=tokens, queries=tokens, ratio=ratio, causal=causal)
                yield "long", "attention", shape
        skewed = replace(few, tokens=4096, queries=4096, causal=causal, load="skewed")
        yield "long", "attention", skewed
    for causal in (False, True):
        for tokens in (1024, 2048, 4096):
            shape = replace(few, tokens=tokens, queries=tokens, causal=causal, backward=True)
            yield "backward", "attention", shape
    for tokens in (4096, 32768):
        yield "cached", "attention", replace(few, tokens=tokens, queries=1)
    for backward in (False, True):
        for tokens, batch in ((196, 1), (196, 8), (256, 1), (256, 8), (1024, 1), (2048, 1)):
            shape = replace(few, tokens=tokens, queries=tokens, batch=batch, backward=backward)
            yield "layer", "layer", shape
    for experiment, batch, tokens, trainings in (
        ("vit/moh_s_75", 4, None, (False, True)),
        ("dit/moh_s2_75", 8, None, (False, True)),
        ("dit/moh_s2_75", 32, None, (False,)),  # the sampler's batch
        ("llm/moh_s_50_100b", 1, 2048, (False, True)),
    ):
        for train in trainings:
            shape = ModelShape(experiment, batch, tokens, train, "fp32", device)
            yield "model", "train" if train else "model", shape
    for shape in generations(device):
        yield "generate", "generate", shape


def generations(device: str) -> Iterator[GenerateShape]:
    """Tokens behind short and long contexts, in batches, with grouped keys, with a static cache."""
    one = GenerateShape(
        context=8192,
        batch=1,
        layers=4,
        heads=16,
        key_heads=16,
        head_dim=64,
        ratio=0.5,
        shared_share=SHARED_SHARE,
        new_tokens=8,
        cache="growing",
        first=False,
        dtype="fp32" if device == "cpu" else "bf16",
        device=device,
    )
    for context in (512, 1024, 2048, 4096, 8192):
        yield replace(one, context=context)
    yield replace(one, context=32768, new_tokens=4)
    yield replace(one, context=8192, ratio=0.75)
    yield replace(one, context=512, batch=8)
    yield replace(one, context=4096, batch=8, new_tokens=4)
    for context, batch in ((512, 1), (8192, 1), (2048, 8)):
        yield replace(one, context=context, batch=batch, key_heads=4)
    for context, batch in ((512, 1), (8192, 1), (2048, 8)):
        yield replace(one, context=context, batch=batch, cache="static")
    for context in (512, 2048, 4096):
        yield replace(one, context=context, first=True)


def folder_here() -> Path:
    """Where this machine's measurements go."""
    where = environment()
    machine = where["gpu"] or f"{where['cpu']} {where['threads']} threads"
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_overheads(device: str) -> None:
    """Measure the training loop and write it to ``results/benchmarks/``."""
    folder, records = folder_here(), []
    for experiment in EXPERIMENTS:
        records.append(measure_overheads(experiment, device, OVERHEAD_SECONDS, ROUNDS))
        print(f"{experiment}: {overhead_line(records[-1])}", file=sys.stderr, flush=True)
    found = {"environment": environment(), "measurements": records}
    write_json(folder / "overheads.json", found)
    print(render(folder))


def overhead_line(record: dict[str, Any]) -> str:
    """A measurement of the loop in one line."""
    return (
        f"{record['mha_ms']:.1f} ms a step, {record['loop_over_bare']:.3f} of a bare loop; MoH "
        f"{record['moh_over_mha']:.3f} of MHA; data {100 * record['data_share']:.1f} %"
    )


def run(device: str, sections: Sequence[str]) -> None:
    """Measure and write records, page and figure to ``results/benchmarks/``.

    Args:
        sections: to be measured; records of the others are kept, where there are any.
    """
    where, folder = environment(), folder_here()
    path = folder / "benchmark.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"measurements": []}
    records = [record for record in kept["measurements"] if record["section"] not in sections]
    for record in records:
        record.setdefault("commit", kept["environment"]["commit"])
    todo = [measurement for measurement in measurements(device) if measurement[0] in sections]
    for number, (section, what, shape) in enumerate(todo, start=1):
        record = {"section": section, "commit": where["commit"]}
        record |= measure(what, shape, SECONDS, ROUNDS)
        records.append(record)
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"{number}/{len(todo)}  {line(record)}", file=sys.stderr, flush=True)
    records.sort(key=lambda record: list(SECTIONS).index(record["section"]))
    write_json(path, {"environment": where, "measurements": records})
    print(render(folder))


def line(record: dict[str, Any]) -> str:
    """A measurement in one line, while the others are still running."""
    if record["what"] == "generate":
        return (
            f"generate  {' | '.join(generation_cells(record)[:5])}: MHA {record['mha_ms']:.2f} ms, "
            f"dense {record['dense_over_mha']:.2f}, sparse {record['sparse_over_mha']:.2f}, auto "
            f"{record['auto_over_mha']:.2f}, limit {record['limit']:.2f}"
        )
    name = record.get("experiment") or (
        f"{record['heads']} heads x {record['tokens']} tokens, "
        f"{100 * record['activated_ratio']:.0f} % active"
        + (", causal" if record["causal"] else "")
        + (", backward" if record["backward"] else "")
        + (", skewed" if record["load"] == "skewed" else "")
    )
    return (
        f"{record['what']:9} {name}: MHA {record['mha_ms']:.2f} ms, dense "
        f"{record['dense_over_mha']:.2f}, sparse {record['sparse_over_mha']:.2f}, "
        f"limit {record['limit']:.2f}"
    )
