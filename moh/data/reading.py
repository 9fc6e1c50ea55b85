"""Reading ahead: the next batches are made while the present one trains."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moh import distribution
from moh.errors import RunError
from moh.signals import leave_quietly

Batch = TypeVar("Batch")
Key = tuple[int, ...]

AHEAD = 2  # batches that a thread makes ahead


class Requests:
    """Guesses which samples a process asks for next.

    One of N processes takes equal parts at equal distances. The distance is that of the last two
    requests; before there are two, N times the samples asked for.
    """

    def __init__(self) -> None:
        self.step = 0
        self._last = self._guess = (-1, -1)

    def guessed(self, first: int, count: int) -> bool:
        """Take note of a request; True if it is the one that was guessed."""
        right = (first, count) == self._guess
        if not right:
            before, of = self._last
            known = before >= 0 and of == count and first > before
            self.step = first - before if known else count * distribution.world_size()
        self._last, self._guess = (first, count), (first + self.step, count)
        return right


class ReadAhead(Generic[Batch]):
    """Makes the batches that will be asked for next in a thread of its own.

    Args:
        make: the samples ``first`` to ``first + count - 1``; it runs in that thread alone.
    """

    def __init__(self, make: Callable[[int, int], Batch]) -> None:
        self._make = make
        self._requests = Requests()
        self._queue: deque[Future[Batch]] = deque()
        self._next = 0
        self._thread: ThreadPoolExecutor | None = None

    def __call__(self, first: int, count: int) -> Batch:
        """Samples ``first`` to ``first + count - 1``."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        if not self._requests.guessed(first, count):
            for future in self._queue:
                future.cancel()
            self._queue.clear()
            self._next = first
        while len(self._queue) <= AHEAD:
            self._queue.append(self._thread.submit(self._make, self._next, count))
            self._next += self._requests.step
        return self._queue.popleft().result()


class LoadAhead:
    """Decodes the pictures that will be asked for next in processes of their own.

    Args:
        pictures: by key; its items are tuples of tensors and numbers.
        keys: of the samples ``first`` to ``first + count - 1``.
        workers: processes; 0 decodes here, when asked.
    """

    def __init__(
        self, pictures: Dataset[Any], keys: Callable[[int, int], list[Key]], workers: int
    ) -> None:
        self._pictures, self._keys, self._workers = pictures, keys, workers
        self._requests = Requests()
        self._loader: Iterator[list[Tensor]] | None = None

    def __call__(self, first: int, count: int) -> list[Tensor]:
        """The items of samples ``first`` to ``first + count - 1``, stacked."""
        if not self._requests.guessed(first, count) or self._loader is None:
            self._loader = None
            batches = _endless(self._keys, first, count, self._requests.step)
            self._loader = load(self._pictures, batches, self._workers)
        return next_batch(self._loader)


def _endless(
    keys: Callable[[int, int], list[Key]], first: int, count: int, step: int
) -> Iterator[list[Key]]:
    """Keys of equal parts at equal distances.

    Not a method: in a circle of references the loading processes would be let go by the garbage
    collector, which takes the queues from them first and seconds to end them.
    """
    while True:
        yield keys(first, count)
        first += step


def load(pictures: Dataset[Any], batches: Any, workers: int) -> Iterator[list[Tensor]]:
    """Batches of pictures by lists of keys, decoded in ``workers`` processes.

    No more processes than there are cores; how many never changes what is decoded.
    """
    return iter(
        DataLoader(
            pictures,
            batch_sampler=batches,
            num_workers=min(workers, cores()),
            worker_init_fn=leave_quietly,
            # Its own, or the start of a pass would draw from the model's random stream.
            generator=torch.Generator(),
            pin_memory=torch.cuda.is_available(),
        )
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def next_batch(loader: Iterator[list[Tensor]]) -> list[Tensor]:
    """The next batch of :func:`load`.

    Raises:
        RunError: a picture that cannot be read, or a process that died; one line.
    """
    try:
        return next(loader)
    except RunError as error:
        # A loading process hands over its whole traceback; the last line is the message.
        raise RunError(str(error).strip().splitlines()[-1].rpartition("RunError: ")[2]) from None
    except RuntimeError as error:
        raise RunError(f"a data loading process died: {str(error).splitlines()[0]}") from None
