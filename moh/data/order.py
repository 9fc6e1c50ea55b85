"""Which sample comes when, and with what random numbers: functions of seed and number alone.

Nothing here depends on the number of devices, on the batch size of one of them, or on what was
drawn before, so that a run can stop after any sample and go on elsewhere.
"""

from __future__ import annotations

import hashlib
from threading import Lock

import torch
from torch import Tensor


def stable_seed(*parts: int | float | str) -> int:
    """A 63-bit seed from any mix of numbers and words, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by :func:`stable_seed`."""
    return torch.Generator().manual_seed(stable_seed(*parts))


class ShuffledOrder:
    """Endless shuffled passes over ``size`` items.

    Args:
        size: items in one pass.
        seed: of the permutations, a new one each pass.
        draws: uniform random numbers that belong to each sample (augmentation).
    """

    def __init__(self, size: int, seed: int, draws: int = 0) -> None:
        self.size, self.seed, self.draws = size, seed, draws
        self._epoch = -1
        self._permutation = self._uniform = torch.empty(0)
        # Threads that read ahead may be in another pass than who asks.
        self._lock = Lock()

    def _load(self, epoch: int) -> None:
        if epoch != self._epoch:
            source = generator(self.seed, "order", epoch)
            self._permutation = torch.randperm(self.size, generator=source)
            self._uniform = torch.rand(self.size, self.draws, generator=source)
            self._epoch = epoch

    def take(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Items of sample numbers ``first`` to ``first + count - 1``.

        Returns:
            Indices (count,) and uniform numbers (count, draws) in [0, 1).
        """
        indices, uniforms = [], []
        while count:
            epoch, place = divmod(first, self.size)
            piece = min(count, self.size - place)
            with self._lock:
                self._load(epoch)
                indices.append(self._permutation[place : place + piece])
                uniforms.append(self._uniform[place : place + piece])
            first, count = first + piece, count - piece
        return torch.cat(indices), torch.cat(uniforms)


class StepRandom:
    """Random numbers of one update, drawn for its global batch and cut to a part of it.

    Args:
        seed: of the run.
        first: number of the update's first sample.
        global_batch: samples of the update.
        offset: where in it this part begins.
        count: samples of this part.
    """

    def __init__(self, seed: int, first: int, global_batch: int, offset: int, count: int) -> None:
        self._generator = generator(seed, "step", first)
        self._size = global_batch
        self._part = slice(offset, offset + count)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, (count, *shape)."""
        return torch.randn(self._size, *shape, generator=self._generator)[self._part]

    def uniform(self) -> Tensor:
        """Uniform numbers in [0, 1), (count,)."""
        return torch.rand(self._size, generator=self._generator)[self._part]

    def integers(self, high: int) -> Tensor:
        """Integers in 0..high-1, (count,)."""
        return torch.randint(high, (self._size,), generator=self._generator)[self._part]
