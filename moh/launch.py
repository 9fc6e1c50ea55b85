"""Start the processes of a run and bring their failure back as one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moh.errors import RunError


def launch(folder: Path, processes: int, arguments: Sequence[str]) -> None:
    """Run ``moh.worker`` on a run folder in several processes of this machine.

    Args:
        folder: with its frozen configuration.
        processes: one a GPU, or several on a CPU.
        arguments: the user's command line, for the record.

    Raises:
        RunError: the first failure of any process, in its own words.
    """
    # torchrun would give each process one thread, whatever the machine has.
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="moh-launch-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        command = elastic_launch(config, sys.executable)
        try:
            command("-m", "moh.worker", str(folder), *arguments)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            message = failure.message
            text = message.get("message", "") if isinstance(message, dict) else str(message)
            kind, _, rest = text.partition(": ")
            if kind == RunError.__name__:
                raise RunError(rest) from None
            where = f"process {failure.local_rank} of {processes} died"
            raise RunError(f"{where}: {text or f'exit status {failure.exitcode}'}") from None
