"""Run records made up for tests: every number is drawn from a formula, none was measured."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moh.reporting.grid import save_class_grid

FAMILY_LEVELS = {"vit": 88.0, "dit": 140.0, "llm": 2.4}
CLASSES = [f"class {index}" for index in range(10)]
DEMO_TABLES = ["demo_vit", "demo_dit", "demo_llm", "demo_head_ratio"]
BENCHMARKS = ("sciq", "piqa", "winogrande")


def metric(value: float, unit: str = "", higher: bool = True, **more: Any) -> dict[str, Any]:
    """One entry of metrics.json."""
    return {
        "value": value,
        "unit": unit,
        "n": 2000,
        "stderr": None,
        "higher_is_better": higher,
        "protocol": "synthetic",
        "marks": [],
        **more,
    }


def top1(value: float, **more: Any) -> dict[str, dict[str, Any]]:
    """The metrics of an image classifier."""
    return {"top1": metric(value, "%", **more)}


def write_run(
    results_dir: Path,
    name: str,
    seed: int = 0,
    metrics: dict[str, dict[str, Any]] | None = None,
    files: dict[str, Any] | None = None,
    **run: Any,
) -> Path:
    """Write run.json, and metrics.json where there are metrics; returns the folder."""
    config_hash = run.pop("config_hash", "0" * 12)
    folder = results_dir / "runs" / name / f"seed{seed}-{config_hash[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    heads = name.rsplit("/", 1)[-1]
    number = re.search(r"\d+", heads)
    ratio = 1.0 if number is None else int(number[0]) / 100
    record = {
        "run_id": f"{name}/{folder.name}",
        "name": name,
        "protocol": "demo",
        "status": "finished",
        "share": 1.0,
        "seed": seed,
        "heads": heads,
        "activated_ratio": ratio,
        "parameters": 1_234_567 + (0 if heads == "mha" else 890),
        "samples": 51_200,
        "overrides": [f"experiment={name}", f"seed={seed}"],
        "config_hash": config_hash,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "versions": {"python": "3.11.0", "torch": "2.14.1", "timm": "1.0.31"},
        "hardware": {"cpu": "Synthetic CPU", "cores": 2, "threads": 2, "memory_gib": 8.0},
        "data": {"name": "synthetic", "sha256": "f" * 64},
        "seconds": {"train": 100.0 + 10 * ratio, "eval": 12.0, "total": 120.0},
        "peak_memory_mib": 512.3,
        "wandb": {"id": "synthetic", "mode": "offline", "path": f"runs/{name}/{folder.name}/wandb"},
        "started": "2000-01-01T00:00:00+00:00",
        "finished": f"2000-01-01T00:0{seed}:00+00:00",
        "command": f"python -m moh experiment={name} seed={seed}",
        **run,
    }
    (folder / "run.json").write_text(json.dumps(record))
    if metrics is not None:
        (folder / "metrics.json").write_text(json.dumps({"metrics": metrics}))
    for file_name, content in (files or {}).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / file_name).write_text(text)
    return folder


def head_load(ratio: float, seed: int) -> dict[str, Any]:
    """A head load whose layers sum to top_k."""
    random = np.random.default_rng(seed)
    shared, active = 2, round(8 * ratio)
    routed, top_k = 8 - shared, active - shared

    def layer() -> list[float]:
        share = random.dirichlet(np.full(routed, 8.0))
        for _ in range(20):
            share = np.minimum(share, 1 / top_k) / np.minimum(share, 1 / top_k).sum()
        return [float(value) for value in np.minimum(share * top_k, 1.0)]

    layers = 4
    return {
        "layers": [f"blocks.{index}.attn.router" for index in range(layers)],
        "top_k": [top_k] * layers,
        "num_routed": [routed] * layers,
        "overall": [layer() for _ in range(layers)],
        "groups": {name: [layer() for _ in range(layers)] for name in CLASSES},
    }


def curves(level: float, samples: int, seed: int) -> str:
    """Losses that fall to ``level``, with noise."""
    random = np.random.default_rng(seed)
    lines = []
    for step in range(1, 201):
        loss = level * (1 + 1.5 * math.exp(-step / 25) + 0.04 * random.normal())
        row = {"samples": step * samples // 200, "task_loss": loss, "balance_loss": 3.0, "lr": 1e-3}
        lines.append(json.dumps(row))
    return "\n".join(lines)


def _scores(family: str, heads: str, seed: int) -> dict[str, dict[str, Any]]:
    penalty = {"mha": 0.0, "moh_75": 0.3, "moh_50": 1.6}.get(heads)
    if penalty is None:
        penalty = 0.05 * (100 - int(heads.rsplit("_", 1)[-1])) / 2 - 0.2
    wobble = 0.4 * math.sin(1 + 7 * seed + len(heads) + sum(map(ord, heads)))
    level = FAMILY_LEVELS[family]
    if family == "vit":
        return top1(level - penalty + wobble, stderr=0.7)
    if family == "dit":
        untrained = metric(820.0, higher=False)
        value = metric(level + 12 * penalty + 4 * wobble, higher=False, marks=["2,000 samples"])
        return {"fd_efficientnet_lite0": value, "fd_efficientnet_lite0_untrained": untrained}
    scores = {
        "bits_per_byte": metric(level + 0.02 * penalty + 0.01 * wobble, "bits/byte", False),
        "bits_per_byte_unigram": metric(2.71, "bits/byte", False),
    }
    for index, task in enumerate(BENCHMARKS):
        accuracy = 0.3 + 0.1 * index + 0.01 * wobble
        scores[f"{task}/acc"] = metric(accuracy, stderr=0.046, marks=["limit 100 items"])
    scores["average"] = metric(40.0 + wobble, "%", marks=["limit 100 items"])
    return scores


def _grid(path: Path, seed: int) -> None:
    """Gradient patches in the form of a sample grid, clearly no clothes."""
    ramp = torch.linspace(0, 255, 16)
    patches = [torch.roll((ramp[:, None] + ramp) / 2, (seed + i, i), (0, 1)) for i in range(80)]
    save_class_grid(torch.stack(patches)[:, None].to(torch.uint8), CLASSES, path)


def write_demo(results_dir: Path, seeds: int = 3) -> None:
    """All runs of the demo tables, finished."""
    for family in FAMILY_LEVELS:
        names = ["mha", "moh_75", "moh_50"]
        if family == "vit":
            names += [f"ratio_{ratio}" for ratio in (60, 70, 80, 90, 100)]
        for heads in names:
            ratio = 1.0 if heads == "mha" else int(heads.rsplit("_", 1)[-1]) / 100
            for seed in range(seeds):
                files: dict[str, Any] = {"curves.jsonl": curves(0.6 - 0.1 * ratio, 51_200, seed)}
                if heads.startswith("moh"):
                    files["head_load.json"] = head_load(ratio, seed)
                scores = _scores(family, heads, seed)
                folder = write_run(results_dir, f"demo/{family}/{heads}", seed, scores, files)
                if family == "dit":
                    _grid(folder / "samples.png", seed)
