"""Runs that are killed, stopped or out of space, and started again."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, folder_of, tiny, weights

from moh.errors import RunError, StoppedError
from moh.runner import run
from moh.training import checkpoint

# Children start from a process that has imported everything and run nothing.
CONTEXT = multiprocessing.get_context("forkserver")

LONG = ("trainer.samples=192", "trainer.checkpoint_every=16", "mode=train", "trainer.threads=1")


def child(family: str, folder: Path, settings: tuple[str, ...]) -> None:
    """A run in a process of its own; exit status as the command line's."""
    try:
        run(tiny(family, folder, *settings))
    except StoppedError:
        sys.exit(StoppedError.EXIT_STATUS)


def start(family: str, folder: Path, settings: tuple[str, ...] = LONG):
    process = CONTEXT.Process(target=child, args=(family, folder, settings))
    process.start()
    return process


def wait_for(condition, process, seconds: float = 60) -> bool:
    """Poll until a condition holds; False if the process ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if not process.is_alive():
            return False
        time.sleep(0.0005)
    raise AssertionError(f"nothing happened for {seconds} s")


@pytest.mark.parametrize(
    "family",
    [
        "vit",
        pytest.param("dit", marks=pytest.mark.slow),
        pytest.param("llm", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(family, tmp_path):
    longer = ("trainer.samples=384", *LONG[1:])
    whole, killed = tiny(family, tmp_path / "a", *longer), tiny(family, tmp_path / "b", *longer)
    begun = time.monotonic()
    run(whole)
    duration = time.monotonic() - begun
    folder, instants = folder_of(killed) / "checkpoints", random.Random(family)
    kills = {"at any time": 0, "while writing": 0}
    for _ in range(12):
        process = start(family, tmp_path / "b", longer)
        if kills["while writing"] < 4:
            # A checkpoint is being written as long as its folder has the name of an unfinished one.
            kind, seen = "while writing", set(folder.glob(".*.tmp"))
            alive = wait_for(lambda seen=seen: set(folder.glob(".*.tmp")) - seen, process)
            time.sleep(instants.uniform(0, 0.01))
        else:
            kind, alive = "at any time", wait_for((folder_of(killed) / "run.json").is_file, process)
            time.sleep(instants.uniform(0, duration / 8))
        process.kill()
        process.join()
        kills[kind] += alive and process.exitcode == -signal.SIGKILL
    process = start(family, tmp_path / "b", longer)
    process.join()
    assert process.exitcode == 0
    assert kills["while writing"] >= 4
    assert sum(kills.values()) >= 10, kills
    first, second = weights(whole), weights(killed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_at_once_and_the_next_start_goes_on(number, tmp_path):
    settings = (*LONG[:1], *LONG[2:])  # without a checkpoint of its own on the way
    whole, stopped = tiny("vit", tmp_path / "a", *settings), tiny("vit", tmp_path / "b", *settings)
    run(whole)
    process = start("vit", tmp_path / "b", settings)
    curve = folder_of(stopped) / "curves.jsonl"
    assert wait_for(lambda: curve.is_file() and len(curve.read_text().splitlines()) > 2, process)
    os.kill(process.pid, number)
    before = len(curve.read_text().splitlines())
    process.join(30)
    assert process.exitcode == 75
    saved = int(checkpoint.newest(folder_of(stopped) / "checkpoints").name)
    assert saved // 16 <= before + 2
    record = json.loads((folder_of(stopped) / "run.json").read_text())
    assert record["status"] == "partial"
    assert record["samples"] == saved < 192
    run(stopped)
    first, second = weights(whole), weights(stopped)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_command_line_tells_of_a_signal_in_one_line(tmp_path):
    overrides = [
        *TINY["vit"],
        "trainer.samples=46080",
        "trainer.global_batch=16",
        "trainer.log_every=1",
        "logger.progress=false",
        "logger.wandb=disabled",
        f"runs_dir={tmp_path}/runs",
        f"results_dir={tmp_path}/results",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "moh", *overrides], stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.rglob("curves.jsonl")) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75
    lines = [line for line in told.splitlines() if line.startswith("moh: ")]
    assert len(lines) == 1
    assert "stopped by SIGUSR1 at sample" in lines[0]
    assert "the same command goes on from it" in lines[0]
    assert "Traceback" not in told


def test_ctrl_c_of_two_processes_saves(tmp_path):
    """A terminal sends it to all of them, and the launcher once more."""
    command = [
        *(sys.executable, "-m", "moh", *TINY["vit"], "launcher.processes=2"),
        *("trainer.samples=460800", "trainer.global_batch=16", "trainer.log_every=1"),
        *("logger.progress=false", "logger.wandb=disabled"),
        *(f"runs_dir={tmp_path}/runs", f"results_dir={tmp_path}/results"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        end = time.monotonic() + 90
        while not any(p.stat().st_size for p in tmp_path.rglob("curves.jsonl")):
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75
    assert "Traceback" not in told
    assert checkpoint.newest(next(tmp_path.rglob("checkpoints"))) is not None


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(small_disk, tmp_path):
    roomy = tiny("vit", tmp_path / "roomy", *LONG)
    run(roomy)
    newest = checkpoint.newest(folder_of(roomy) / "checkpoints")
    size = sum(path.stat().st_size for path in newest.iterdir())
    config = tiny("vit", small_disk, *LONG)
    disk = os.statvfs(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - int(1.7 * size)))
    with pytest.raises(RunError, match=r"cannot write checkpoint .*No space left on device"):
        run(config)
    kept = folder_of(config) / "checkpoints"
    assert [path.name for path in kept.iterdir()] == ["0000000000016"]
    ballast.unlink()
    run(config)
    first, second = weights(roomy), weights(config)
    assert all(torch.equal(first[key], second[key]) for key in first)
