"""Signals that ask a run to save and stop (queue limits, pre-emption, Ctrl-C), and its workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from moh.errors import StoppedError

# What schedulers send before they kill, and what a user presses. submitit listens to SIGUSR2.
FROM_SCHEDULER = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
FROM_ANYBODY = (*FROM_SCHEDULER, signal.SIGINT)


class StopRequest:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """Name of the signal."""
        return self.signal.name if self.signal is not None else "another process's signal"


@contextmanager
def stop_requests(repeated: bool = False) -> Iterator[StopRequest]:
    """Turn the first of anybody's signals into a request; a second one acts as it always did.

    Once the block is left, a request goes on to whoever listened before: a job that submitit
    started is put back into the queue by its own handler, after the run has saved. Outside the
    main thread, where Python allows no handlers, nothing is caught.

    Args:
        repeated: one Ctrl-C may come twice, from the terminal and from a launcher that hands it on:
            the second is ignored.
    """
    request = StopRequest()
    before: dict[signal.Signals, object] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        # Read again when the block is left.
        for other, handler in before.items():
            ignored = repeated and other == signal.SIGINT
            signal.signal(other, signal.SIG_IGN if ignored else handler)  # type: ignore[arg-type]

    try:
        for number in FROM_ANYBODY:
            before[number] = signal.signal(number, note)
    except ValueError:
        before.clear()
    try:
        yield request
    finally:
        _restore(before)
        if request.signal is not None and request.signal != signal.SIGINT:
            hand_on(request.signal)


class _StopAtOnce:
    """The handler of :func:`stop_at_once`."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise StoppedError(f"{self.what}: stopped by {name}; the same command goes on")


@contextmanager
def stop_at_once(what: str) -> Iterator[None]:
    """Outside training there is nothing to save: a scheduler's signal ends the block.

    Signals that somebody listens to already, as submitit does, stay theirs.

    Args:
        what: is being done, for the message.

    Raises:
        StoppedError: in place of the signal.
    """
    before: dict[signal.Signals, object] = {}
    try:
        for number in FROM_SCHEDULER:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _StopAtOnce(what))
    except ValueError:
        before.clear()
    try:
        yield
    finally:
        _restore(before)


def leave_quietly(worker: int = 0) -> None:
    """In a data loader's process: a signal to the whole group ends it without a traceback.

    While a run is training its request is the handler, under which loaders go on: the last step
    still needs their batches.
    """
    for number in FROM_SCHEDULER:
        if isinstance(signal.getsignal(number), _StopAtOnce):
            signal.signal(number, lambda number, frame: os._exit(0))


def end_with_parent() -> None:
    """Leave stopping to the process that started this one, and end soon after it.

    So Ctrl-C is told once, and a parent that was killed leaves no orphans.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A server that forks (the default from Python 3.14 on) outlives the process that asked it to.
    server, parent = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:
        while os.getppid() == server and (parent is None or parent.is_alive()):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def hand_on(number: signal.Signals) -> None:
    """Send a signal again if somebody else has a handler for it; the default would only kill."""
    handler = signal.getsignal(number)
    if callable(handler) and not isinstance(handler, _StopAtOnce):
        os.kill(os.getpid(), number)


def _restore(handlers: dict[signal.Signals, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    handlers.clear()
