"""A shuffled order that is computed, not stored: one place at a time, for any number of items."""

from __future__ import annotations

from moh.data.order import stable_seed

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Permutation:
    """A pseudorandom permutation of 0..size-1.

    A Feistel network on twice as many bits as half of ``size`` needs is a permutation of the next
    power of four; an image outside 0..size-1 is sent through it again until one is inside, which
    leaves a permutation of 0..size-1. It takes no memory, so 10^8 sequences cost what ten do.

    Args:
        size: items.
        seed: any mix of numbers and words.
    """

    def __init__(self, size: int, *seed: int | str) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} items")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [stable_seed(*seed, "round", i) for i in range(_ROUNDS)]

    def __getitem__(self, place: int) -> int:
        """The item at a place."""
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of {self.size}")
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            place = left << half | right
            if place < self.size:
                return place


def _mix(x: int) -> int:
    """SplitMix64's finaliser: every bit of the result depends on every bit of ``x``."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
