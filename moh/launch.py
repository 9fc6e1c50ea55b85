"""Start the processes of a run and bring their failure back as one line."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moh.errors import RunError, StoppedError
from moh.signals import FROM_ANYBODY, hand_on

HANDLED = (*FROM_ANYBODY, signal.SIGHUP, signal.SIGQUIT)
SAVE_SECONDS = 600  # that processes have for their checkpoint once a signal came
PORTS = 20_000  # from 29,500 on, one for each SLURM job


@dataclass(frozen=True)
class Place:
    """Where this machine stands among those of a run.

    Attributes:
        node: its number, 0 the one that keeps the run's folder.
        endpoint: host and port where the machines meet.
        run_id: word that only machines of this run know.
    """

    node: int
    endpoint: str
    run_id: str


def place(nodes: int) -> Place:
    """Find out which machine of a run this is.

    Raises:
        RunError: several machines without SLURM, and without the variables that say so.
    """
    if nodes == 1:
        return Place(0, "localhost:0", uuid4().hex)
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        hosts = os.environ["SLURM_JOB_NODELIST"]
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True
        )
        names = listed.stdout.split()
        if len(names) != nodes:
            raise RunError(f"launcher.nodes {nodes}: the SLURM job has {len(names)} nodes")
        port = 29_500 + int(job) % PORTS
        return Place(int(os.environ["SLURM_NODEID"]), f"{names[0]}:{port}", f"moh-{job}")
    try:
        address, node = os.environ["MASTER_ADDR"], int(os.environ["NODE_RANK"])
    except KeyError as error:
        raise RunError(
            f"launcher.nodes {nodes}: start it under SLURM, or set MASTER_ADDR, MASTER_PORT and "
            f"NODE_RANK on each machine ({error.args[0]} is not set)"
        ) from None
    return Place(node, f"{address}:{os.environ.get('MASTER_PORT', '29500')}", f"moh-{address}")


def launch(
    folder: Path, processes: int, arguments: Sequence[str], nodes: int = 1, at: Place | None = None
) -> None:
    """Run ``moh.worker`` on a run folder in several processes.

    Args:
        folder: with its frozen configuration, on a file system that all machines see.
        processes: on this machine; one a GPU, or several on a CPU.
        arguments: the user's command line, for the record.
        nodes: machines; each of them calls this.
        at: of :func:`place`.

    Raises:
        StoppedError: a signal, and the processes have saved.
        RunError: the first failure of any process, in its own words.
    """
    at = at or place(nodes)
    # torchrun would give each process one thread, whatever the machine has.
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="moh-launch-") as logs:
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=processes,
            run_id=at.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint=at.endpoint,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=",".join(number.name for number in HANDLED),
            shutdown_timeout=SAVE_SECONDS,
        )
        command = elastic_launch(config, sys.executable)
        # The launcher puts its own handlers in place and leaves them there.
        handlers = {number: signal.getsignal(number) for number in HANDLED}
        try:
            command("-m", "moh.worker", str(folder), *arguments)
        except SignalException as error:
            _restore(handlers)
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            hand_on(signal.Signals(error.sigval))
            raise StoppedError(
                f"stopped by {signal.Signals(error.sigval).name}; the same command goes on from "
                "the newest checkpoint"
            ) from None
        except ChildFailedError as error:
            raise _in_one_line(error, processes * nodes) from None
        finally:
            _restore(handlers)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _in_one_line(error: ChildFailedError, processes: int) -> RunError:
    """The first failure as the process itself told it."""
    rank, failure = error.get_first_failure()
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    kind, _, rest = text.partition(": ")
    for known in (StoppedError, RunError):
        if kind == known.__name__:
            return known(rest)
    what = text if failure.exitcode < 0 or kind != text else f"exit status {failure.exitcode}"
    return RunError(f"process {rank} of {processes} died: {what}")
