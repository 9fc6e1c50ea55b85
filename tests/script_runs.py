"""Running the scripts as a user does, without the seconds that a new Python takes to start."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import torch

from moh.cli import ROOT

CONTEXT = multiprocessing.get_context("forkserver")


def finish(name: str, *arguments: object, status: int = 0) -> str:
    """Run a script to its end; what it printed. A failure is one line."""
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        found = _call(name, arguments)
    assert found == status, out.getvalue() + error.getvalue()
    if status:
        assert len(error.getvalue().strip().splitlines()) <= 1, error.getvalue()
    return out.getvalue() + error.getvalue()


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file may grow above ``most`` bytes: what a full disk does to whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kill(name: str, *arguments: object, when: Callable[[], bool]) -> None:
    """Start a script in a process of its own and end it with SIGKILL when ``when`` says so.

    From a server that has imported everything, so that it begins at once; what it would print is
    lost. A fork of this process would inherit OpenMP's threads as locks that nobody opens.
    """
    process = CONTEXT.Process(target=_silent, args=(name, arguments))
    process.start()
    assert process.pid is not None
    while process.is_alive() and not when():
        process.join(0.002)
    assert process.is_alive(), "it ended before it was killed"
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _silent(name: str, arguments: tuple[object, ...]) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        _call(name, arguments)


def _call(name: str, arguments: tuple[object, ...]) -> int:
    folder = str(ROOT / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)
    main = import_module(name).main
    # The bits of a convolution depend on it, and an earlier test may have set another number.
    torch.set_num_threads(1)
    before, sys.argv = sys.argv, [name, *map(str, arguments)]
    try:
        return int(main())
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder but what a script keeps for itself, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }
