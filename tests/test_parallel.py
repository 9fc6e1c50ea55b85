"""Two processes train as one does, replicated and sharded."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from omegaconf import DictConfig, OmegaConf
from tiny_runs import folder_of, tiny, tiny_command, weights

from moh import distribution
from moh.backbones.build import build_model
from moh.errors import StoppedError
from moh.runner import run
from moh.training.parallel import blocks
from moh.validation import validate

FAMILIES = ("vit", "dit", "llm")
# Name -> settings of each of two processes; one process holds the global batch at once.
SPLITS = {
    "ddp": (),
    "fsdp": ("trainer.parallel=fsdp",),
    "ddp, accumulation, checkpointing": (
        "trainer.device_batch=4",
        "trainer.activation_checkpointing=true",
    ),
    "fsdp, accumulation, checkpointing": (
        "trainer.device_batch=4",
        "trainer.activation_checkpointing=true",
        "trainer.parallel=fsdp",
    ),
}


# Name -> whether the first half is of two processes; the other half is of one.
CHANGES = {"two, then one": True, "one, then two": False}


@contextmanager
def stopped_half_way(wanted: bool = True):
    """Runs inside stop after the second of four updates, as by a signal."""
    from moh.training.loop import Trainer

    outcome = Trainer._outcome
    if wanted:
        Trainer._outcome = lambda self, late: outcome(self, late) or self.samples >= 16
    try:
        with suppress(StoppedError):
            yield
    finally:
        Trainer._outcome = outcome


def work(rank: int, port: int, processes: int, folders: list[tuple[Path, bool]]) -> None:
    """One of several processes: carry out runs whose folders are prepared, some to their half."""
    from moh.worker import execute

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    for folder, half in folders:
        with stopped_half_way(half):
            execute(folder, [])
    distribution.shut_down()


def start(folders: list[tuple[Path, bool]], processes: int) -> None:
    """Carry out prepared runs in several processes."""
    arguments = (free_port(), processes, folders)
    multiprocessing.start_processes(work, arguments, nprocs=processes, start_method="spawn")


def frozen(config: DictConfig) -> Path:
    """The run's folder with its configuration, as a worker expects it."""
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
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
        mode = "both" if family == "vit" else "train"
        settings = (f"mode={mode}", "trainer.threads=1")
        whole = tiny(family, top / family / "one", *settings)
        run(whole)
        for index, (split, two) in enumerate(SPLITS.items()):
            alone[family, split] = folder_of(whole)
            config = tiny(family, top / family / f"two-{index}", *settings, *two)
            config.launcher.processes = 2
            validate(config)
            together[family, split] = frozen(config)
    started, goes_on = [(folder, False) for folder in together.values()], []
    for family in FAMILIES:
        for change, two_first in CHANGES.items():
            place = top / family / change.replace(", ", "-")
            config = tiny(family, place, "mode=train", "trainer.threads=1")
            if two_first:
                goes_on.append(config.copy())
            else:
                with stopped_half_way():
                    run(config)
            config.launcher.processes = 2
            started.append((frozen(config), two_first))
            alone[family, change] = alone[family, "ddp"]
            together[family, change] = folder_of(config)
    start(started, 2)
    for config in goes_on:
        run(config)
    return {key: (alone[key], together[key]) for key in alone}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [*SPLITS, *CHANGES])
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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_run_goes_on_on_more_processes(family, tmp_path):
    whole, changed = (
        tiny(family, tmp_path / name, "mode=train", "trainer.threads=1", "trainer.parallel=fsdp")
        for name in ("whole", "changed")
    )
    whole.launcher.processes = changed.launcher.processes = 2
    start([(frozen(whole), False), (frozen(changed), True)], 2)
    changed.launcher.processes = 4
    start([(frozen(changed), False)], 4)
    one, four = curve(folder_of(whole)), curve(folder_of(changed))
    assert [row["samples"] for row in four] == [row["samples"] for row in one] == [16, 32, 48, 64]
    for expected, ours in zip(one, four, strict=True):
        for key in ("task_loss", "balance_loss"):
            assert ours[key] == pytest.approx(expected[key], rel=1e-6), key


@pytest.mark.slow
def test_two_killed_processes_end_with_the_weights_of_undisturbed_ones(tmp_path):
    """Killed with their launcher, as a machine that fails kills them."""
    settings = (
        *("trainer.samples=160", "trainer.checkpoint_every=16", "mode=train"),
        *("trainer.threads=1", "launcher.processes=2"),
    )
    whole, killed = (tiny("vit", tmp_path / name, *settings) for name in ("whole", "killed"))
    run(whole)
    command = tiny_command("vit", tmp_path / "killed", *settings)
    checkpoints, instants = folder_of(killed) / "checkpoints", random.Random(0)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-m", "moh", *command])
        seen, end = newest_name(checkpoints), time.monotonic() + 120
        while newest_name(checkpoints) == seen and time.monotonic() < end:
            time.sleep(0.01)
        assert process.poll() is None
        time.sleep(instants.uniform(0, 0.3))
        kill_all(str(tmp_path / "killed"))
        process.wait()
    assert newest_name(checkpoints) < f"{160:013d}"
    run(killed)
    first, second = weights(whole), weights(killed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def newest_name(folder: Path) -> str:
    """Of the newest checkpoint; empty without any."""
    return max((path.name for path in folder.glob("[0-9]*")), default="")


def kill_all(word: str) -> None:
    """Kill every process with this word in its command, at once."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [int(path.parent.name)] * (word.encode() in path.read_bytes())
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
