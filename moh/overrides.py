"""``key=value`` as a shell hands it over: Hydra's grammar, and values that it cannot read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from moh.config import keys

_FORM = re.compile(r"(?P<key>(?:\+\+?|~)?[A-Za-z_][\w./@:-]*)=(?P<value>.*)", re.DOTALL)
_FUNCTION = re.compile(r"(int|str|bool|float|choice|range|interval|tag|sort|shuffle|glob)\(.*\)")

_NAME = re.compile(r"""(['"])([\w./-]+)\1\s*:""")  # in a dict as Python writes it


def key_of(override: str) -> str:
    """The key without the marks of an addition or a deletion."""
    return override.lstrip("+~").partition("=")[0]


def names_of(key: str, overrides: Iterable[str]) -> list[str]:
    """The values that a command line gives a group, several in a sweep."""
    values = (override.partition("=") for override in overrides)
    return [name for found, _, value in values if found == key for name in value.split(",")]


def parse(override: str) -> Override:
    """One override as Hydra understands it.

    Raises:
        ValueError: it does not; one line.
    """
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
        # Of a function, the reason is on the line behind the one that names it.
        reasons = [line for line in lines if line and not line.startswith(("Error ", "See http"))]
        reason = reasons[0].rpartition(": ")[2] if reasons else "not understood"
        raise ValueError(f"{override}: {reason}") from None


def values_of(override: Override) -> list[Any]:
    """The values that an override of several stands for.

    Raises:
        ValueError: none, or a kind whose values cannot be counted; one line.
    """
    text = str(override.input_line)
    if isinstance(override.value(), Glob):
        raise ValueError(f"{text}: glob is for the options of a group, such as experiment")
    if not override.is_discrete_sweep():
        raise ValueError(f"{text}: an interval has no end of values; write a list or range(...)")
    try:
        values = list(override.sweep_iterator())
    except (HydraException, ValueError) as error:
        raise ValueError(f"{text}: {str(error).splitlines()[0]}") from None
    if not values:
        raise ValueError(f"{text}: stands for no value")
    return values


def readable(overrides: Iterable[str], many: bool = False) -> list[str]:
    """Overrides that Hydra reads as they were meant.

    A value that its grammar has no place for (``=`` or ``(`` in a path) is put into quotes, and so
    is a text that it would take for a number (``runs_dir=2024_10``). ``None`` and dicts may be
    written as Python does, and so a wandb agent.

    Args:
        many: a comma stands between values of a sweep.

    Raises:
        ValueError: no override, or one that cannot be mended without guessing; one line.
    """
    return [_readable(override, many) for override in overrides]


def _readable(override: str, many: bool) -> str:
    match = _FORM.fullmatch(override)
    if match is None:
        raise ValueError(f"{override!r} is not of the form key=value")
    key, value = match["key"], match["value"]
    if value == "None":
        return f"{key}=null"
    types = keys().get(key_of(override), {""})
    if value.startswith("{") and any(kind.startswith("dict") for kind in types):
        # Hydra wants names without quotes, and takes the key for a struct unless it is forced.
        override = f"++{key_of(override)}=" + _NAME.sub(r"\2:", value)
        key, _, value = override.partition("=")
    try:
        parsed = parse(override)
    except ValueError as error:
        if _FUNCTION.fullmatch(value):
            raise
        if many and "," in value:
            quoted = ",".join(quote(part) for part in value.split(","))
            raise ValueError(f'{error}; write "{key}={quoted}"') from None
        return f"{key}={quote(value)}"
    one_text = types <= {"str", "str | None"} and not parsed.is_sweep_override()
    if one_text and not _FUNCTION.fullmatch(value) and not isinstance(parsed.value(), str | None):
        return f"{key}={quote(value)}"
    return override


def quote(value: str) -> str:
    """A value as Hydra takes it whatever is in it."""
    return str(QuotedString(value, Quote.single).with_quotes())


def refuse_several(override: str) -> None:
    """Refuse several values where one is meant.

    Raises:
        ValueError: which, and how one value with a comma is written.
    """
    if parse(override).is_sweep_override():
        key, _, value = override.partition("=")
        one = "" if _FUNCTION.fullmatch(value) else f'; "{key}={quote(value)}" is one value'
        raise ValueError(f"several values for a key need -m (multirun): {override}{one}")
