"""Where a number comes from: code, versions, machine."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "diffusers",
    "lm_eval",
    "tokenizers",
    "datasets",
    "accelerate",
    "torch-fidelity",
    "efficientnet-lite-pytorch",
    "hydra-core",
    "wandb",
    "numpy",
    "scipy",
)


def versions() -> dict[str, str]:
    """Versions of Python and of every package that can move a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with the build, which the package's version leaves out
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def code() -> dict[str, Any]:
    """Commit of the project and whether the tracked files differ from it."""
    root = Path(__file__).resolve().parents[2]
    commit = _git(root, "rev-parse", "HEAD")
    # Records of runs are results of the code, not part of it.
    status = _git(root, "status", "--porcelain", "--", ".", ":!results")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware(world_size: int = 1) -> dict[str, Any]:
    """The machine: processor, cores, threads, memory, GPU."""
    gpu = None
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "cpu_kind": _cpu_kind(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "world_size": world_size,
        "memory_gib": round(pages / 2**30, 1),
    }


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def _cpu_kind() -> str:
    """What moves the last digits where two processors share a name: design and vector units."""
    info = _cpu_info()
    keys = ("cpu family", "model", "stepping")
    design = [f"{key.removeprefix('cpu ')} {info[key]}" for key in keys if key in info]
    return ", ".join([*design, torch.backends.cpu.get_cpu_capability()])


@cache
def _cpu_info() -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def reset_peak_memory() -> None:
    """Start a new peak, since one process may carry out several runs."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux: 5 resets the resident peak of this process.
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib() -> float:
    """Peak memory since the reset: GPU memory where there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    with suppress(OSError, StopIteration):
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
