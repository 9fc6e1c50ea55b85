"""Mistakes and bad days, told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class RunError(RuntimeError):
    """A run cannot go on for a reason outside the code; its message is one line for the user."""


class StoppedError(RunError):
    """A run was asked to stop and has saved its state; starting it again goes on from there."""

    # The exit status for it: "try again later" of sysexits.h, for job scripts to requeue on.
    EXIT_STATUS = 75


def in_one_line(error: BaseException) -> str:
    """An error that was not written for the user: its kind, and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def some(names: Sequence[str], most: int) -> str:
    """The first ``most`` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(word: str, known: Iterable[str], most: int = 3, prefix: str = "") -> str:
    """``; nearest: a, b`` for the names most like ``word``, or an empty string.

    Args:
        prefix: written before each name.
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=most, cutoff=0.5)
    # A right ending in a wrong folder is a frequent slip that difflib scores low.
    tail = word.rsplit("/", 1)[-1]
    close += [name for name in known if name.rsplit("/", 1)[-1] == tail and name not in close]
    return f"; nearest: {', '.join(prefix + name for name in close[:most])}" if close else ""
