"""Two processes train as one does, replicated and sharded."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from omegaconf import DictConfig, OmegaConf
from tiny_runs import folder_of, tiny

from moh import distribution
from moh.backbones.build import build_model
from moh.runner import run
from moh.training.parallel import blocks
from moh.validation import validate

FAMILIES = ("vit", "dit", "llm")
# Name -> settings of one process, settings of each of two. Checkpointing is not among the first:
# that it changes nothing is tested by itself.
SPLITS = {
    "ddp": ((), ()),
    "fsdp": ((), ("trainer.parallel=fsdp",)),
    "ddp, accumulation, checkpointing": (
        ("trainer.device_batch=8",),
        ("trainer.device_batch=4", "trainer.activation_checkpointing=true"),
    ),
    "fsdp, accumulation, checkpointing": (
        ("trainer.device_batch=8",),
        (
            "trainer.device_batch=4",
            "trainer.activation_checkpointing=true",
            "trainer.parallel=fsdp",
        ),
    ),
}


def work(rank: int, port: int, folders: list[Path]) -> None:
    """One of two processes: carry out runs whose folders are prepared."""
    from moh.worker import execute

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    for folder in folders:
        execute(folder, [])
    distribution.shut_down()


def frozen(config: DictConfig) -> Path:
    """The run's folder with its configuration, as a worker expects it."""
    folder = folder_of(config)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def curve(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], tuple[Path, Path]]:
    """(family, split) -> run folder of one process, of two."""
    top = tmp_path_factory.mktemp("parallel")
    alone, together = {}, {}
    for family in FAMILIES:
        for index, (split, (one, two)) in enumerate(SPLITS.items()):
            mode = "both" if family == "vit" else "train"
            settings = (f"mode={mode}", "trainer.threads=1")
            # Splits of equal settings share their run of one process.
            shared = tiny(family, top / family / f"one-{len(one)}", *settings, *one)
            if not folder_of(shared).is_dir():
                run(shared)
            alone[family, split] = folder_of(shared)
            config = tiny(family, top / family / f"two-{index}", *settings, *two)
            config.launcher.processes = 2
            validate(config)
            together[family, split] = frozen(config)
    started = (free_port(), list(together.values()))
    multiprocessing.start_processes(work, started, nprocs=2, start_method="spawn")
    return {key: (alone[key], together[key]) for key in alone}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_train_as_one(family, split, folders):
    one, two = map(curve, folders[family, split])
    assert len(one) == len(two) == 4
    for expected, ours in zip(one, two, strict=True):
        assert ours["samples"] == expected["samples"]
        for key in ("task_loss", "balance_loss", "loss"):
            assert ours[key] == pytest.approx(expected[key], rel=1e-6), key
        loads = [key for key in expected if key.startswith("head_load/")]
        assert loads
        for key in loads:
            assert ours[key] == pytest.approx(expected[key], rel=1e-6), key
    assert one[0]["task_loss"] != one[-1]["task_loss"]


@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_score_as_one(split, folders):
    texts = [(folder / "metrics.json").read_text() for folder in folders["vit", split]]
    one, two = (json.loads(text)["metrics"] for text in texts)
    assert two["val_loss"]["n"] == one["val_loss"]["n"] == 2000
    assert two["val_loss"]["value"] == pytest.approx(one["val_loss"]["value"], rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharding_finds_each_block_once(family, tmp_path):
    config = validate(tiny(family, tmp_path, "heads.ratio=0.75"))
    with torch.device("meta"):
        model = build_model(config.model, config.heads)
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(block)] for block in blocks(model)]
    expected = {
        "vit": ["blocks1.0", "blocks2.0"],
        "dit": ["transformer_blocks.0"],
        "llm": ["model.layers.0"],
    }
    assert len(found) == len(expected[family]), found


def test_more_processes_than_the_batch_has_parts_is_refused(tmp_path):
    config = tiny("vit", tmp_path, "launcher.processes=3")
    with pytest.raises(ValueError, match=r"global_batch 16 is not a multiple of 3 processes"):
        validate(config)


def test_sharding_needs_processes(tmp_path):
    with pytest.raises(ValueError, match=r"fsdp needs several processes"):
        validate(tiny("vit", tmp_path, "trainer.parallel=fsdp"))
