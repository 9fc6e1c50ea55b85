"""The processes of one run: which one this is, which share is its own, sums over all.

Outside a launched run there is one process, and every function here is the trivial one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moh.errors import RunError

Item = TypeVar("Item")


def initialise(device_type: str) -> torch.device:
    """Join the process group that a launcher's environment describes, if it does.

    Args:
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL, one GPU a process).

    Returns:
        This process's device.
    """
    device = torch.device(device_type)
    if "RANK" not in os.environ:
        return device
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    return device


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


def on_main(action: Callable[[], Item]) -> Item:
    """Do something on the main process alone; its outcome reaches every process.

    Returns:
        What ``action`` returned, on every process.

    Raises:
        RunError: whatever went wrong on the main process, raised on all of them, so that none
            waits for it.
    """
    outcome: list[object] = [None, None]
    failure: Exception | None = None
    if is_main():
        try:
            outcome[0] = action()
        except (OSError, RunError) as error:
            failure = error
            outcome[1] = getattr(error, "strerror", None) or str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise RunError(str(outcome[1])) from failure
    return outcome[0]  # type: ignore[return-value]
