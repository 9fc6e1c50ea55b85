"""The processes of one run: which one this is, which share is its own, sums over all.

Outside a launched run there is one process, and every function here is the trivial one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


def initialise(device_type: str) -> None:
    """Join the process group that a launcher's environment describes, if it does.

    Args:
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).
    """
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


def shut_down() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Number of this process, 0 the one that writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Processes in all."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True for the one process that writes files and shows progress."""
    return rank() == 0


def barrier() -> None:
    """Wait until every process is here."""
    if dist.is_initialized():
        dist.barrier()


def share_of(items: Sequence[Item]) -> Sequence[Item]:
    """This process's items: every ``world_size``-th one, from its rank on."""
    return items[rank() :: world_size()]


def sum_over_processes(*tensors: Tensor) -> None:
    """Replace each tensor by its sum over the processes, in place.

    Sums of float64 and of integers depend on the number of processes by rounding alone.
    """
    if not dist.is_initialized():
        return
    for tensor in tensors:
        # NCCL sums on the GPU alone.
        on_device = tensor.cuda() if dist.get_backend() == "nccl" else tensor
        dist.all_reduce(on_device)
        if on_device is not tensor:
            tensor.copy_(on_device)


def gather_to_main(value: Item) -> list[Item] | None:
    """The value of every process in order of rank, on the main process; None on the others."""
    if not dist.is_initialized():
        return [value]
    # Pickled between processes of one run, never read from a file.
    values: list[Item] | None = [value] * world_size() if is_main() else None
    dist.gather_object(value, values)
    return values
