"""How the C library hands out memory, where it is glibc."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt(3), and the largest block that it lets the heap hold.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 * 1024**2


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 32 MiB in the process; peak memory is the same.

    A forward pass on a CPU allocates and frees the same tensors over and over. glibc returns the
    larger ones to the system, which hands back pages that have to be cleared, or does not, by
    rules that depend on what else was freed: without this one DiT forward takes 5 to 10 % longer
    than another.

    Returns:
        Whether the C library knows these settings.
    """
    # A user's own choice, of these or of another allocator, stands.
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    if any(name in os.environ for name in chosen):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
