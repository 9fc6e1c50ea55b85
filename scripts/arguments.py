"""Kinds of values on the command lines of the scripts."""

from __future__ import annotations

import argparse


def share(text: str) -> tuple[int, int]:
    """``2/8`` as (2, 8)."""
    first, _, of = text.partition("/")
    if not (first.isdigit() and of.isdigit() and 1 <= int(first) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2/8")
    return int(first), int(of)


def positive(text: str) -> int:
    """A whole number of at least 1; ``61e9`` is one."""
    try:
        value = int(float(text)) if "e" in text else int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def fraction(text: str) -> float:
    """A number in [0, 0.5]."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 0.5]")
    return value
