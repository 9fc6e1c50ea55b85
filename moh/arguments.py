"""The words of a command line: options that are known, and overrides. No word is ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from moh.config import keys
from moh.errors import nearest
from moh.sweep_command import WORDS

# Option -> its other name.
SHORT = {
    "--help": "-h",
    "--multirun": "-m",
    "--cfg": "-c",
    "--info": "-i",
    "--package": "-p",
}
LONG = {short: name for name, short in SHORT.items()}

# Option -> the values that it takes: none, any, or one of these.
FLAGS = ("--help", "--version", "--multirun", "--list", "--resolve")
TAKE_ANY = ("--package",)
TAKE_A_NUMBER = ("--only",)
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
OPTIONS = (*FLAGS, *TAKE_ANY, *TAKE_A_NUMBER, *CHOICES)

# Those that ask for something other than a run; one of them at a time.
INSTEAD = ("--help", "--version", "--list", "--cfg", "--info")
NEED = {"--package": "--cfg", "--resolve": "--cfg"}

# Hydra's options that would do nothing here, or break the layout of configurations and runs.
_CONF = "configurations are the files of conf/"
REFUSED = {
    "--run": "leave it out",
    "-r": "leave it out",
    "--hydra-help": "--help says what there is",
    "--shell-completion": "--help says what there is",
    "-sc": "--help says what there is",
    "--config-path": _CONF,
    "-cp": _CONF,
    "--config-name": f"{_CONF}; write experiment=NAME",
    "-cn": f"{_CONF}; write experiment=NAME",
    "--config-dir": _CONF,
    "-cd": _CONF,
    "--experimental-rerun": "the same command goes on with its run",
}

_AGENT = re.compile(r"--(?P<key>[A-Za-z_][\w./@-]*)=.*", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+")


@dataclass
class Command:
    """A command line, taken apart.

    Attributes:
        overrides: ``key=value``, in order.
        options: long name of each option -> its value, empty for one that takes none.
    """

    overrides: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)

    @property
    def multirun(self) -> bool:
        """Whether ``-m`` is there."""
        return "--multirun" in self.options

    @property
    def shows(self) -> list[str]:
        """Hydra's options where a configuration is to be shown, not run; else empty."""
        if not {"--cfg", "--info"} & set(self.options):
            return []
        return _words({k: v for k, v in self.options.items() if k not in ("--only", "--multirun")})

    @property
    def words(self) -> list[str]:
        """The command for a run's record."""
        return [*self.overrides, *_words(self.options)]


def _words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (name, value) if word]


def parse_arguments(arguments: Sequence[str]) -> Command:
    """Take a command line apart.

    ``--key=value`` of a configuration's key, as a wandb agent writes it, is ``key=value``.

    Raises:
        ValueError: an option that is unknown, repeated or lacks its value; one line.
    """
    command, words = Command(), list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            command.overrides.append(word)
            continue
        name, given, value = word.partition("=")
        name = LONG.get(name, name)
        if name in OPTIONS:
            if name in command.options:
                raise ValueError(f"{name} is given twice")
            taken = _checked(name, value) if given else _following(name, words)
            command.options[name] = taken
        elif name not in REFUSED and _AGENT.fullmatch(word):
            command.overrides.append(word[2:])
        else:
            raise ValueError(f"{word}: no such option{_right(name, given + value, words)}")
    _check_together(command)
    return command


def _checked(name: str, value: str) -> str:
    """The value of an option that is written with ``=``."""
    if name in FLAGS:
        raise ValueError(f"{name}={value}: {name} takes no value")
    if not value:
        raise ValueError(f"{name}: its value is missing")
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name} {value}: not one of {', '.join(CHOICES[name])}")
    if name in TAKE_A_NUMBER and not _NUMBER.fullmatch(value):
        raise ValueError(f"{name} {value}: give the number of a run of --list")
    return value


def _following(name: str, words: list[str]) -> str:
    """The value of an option among the words behind it, taken from there."""
    if name in FLAGS:
        return ""
    there = bool(words) and not words[0].startswith("-")
    if name == "--info" and not (there and "=" not in words[0]):
        return "all"
    return _checked(name, words.pop(0) if there else "")


def _check_together(command: Command) -> None:
    instead = [name for name in INSTEAD if name in command.options]
    if len(instead) > 1:
        raise ValueError(f"{' and '.join(instead)} exclude each other")
    for name, needed in NEED.items():
        if name in command.options and needed not in command.options:
            raise ValueError(f"{name} needs {needed}")


def _right(name: str, value: str, words: Sequence[str]) -> str:
    """What the user may have meant by an option that is not known."""
    if name in REFUSED:
        return f"; {REFUSED[name]}"
    plain = name.lstrip("-")
    key = plain.replace("-", "_")
    overridden = {*keys(), *WORDS, "experiment", "table"}
    if key in overridden:
        follows = bool(words) and not words[0].startswith("-") and "=" not in words[0]
        usual = "true" if keys().get(key) == {"bool"} else words[0] if follows else "VALUE"
        return f"; write {key}{value or '=' + usual}"
    known = {option.lstrip("-"): option for option in OPTIONS}
    close = nearest(plain, known, most=1) or nearest(key, overridden, most=1)
    found = close.rpartition(" ")[2]
    if not found:
        return "; `python -m moh --help` lists them"
    return f"; nearest: {known.get(found, f'{found}=...')}"
