"""From a command line to the runs that it stands for."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from moh.arguments import Command, parse_arguments
from moh.compose import CONF, compose_config, compose_with, options
from moh.errors import nearest
from moh.overrides import key_of, parse, readable, refuse_several, values_of
from moh.sweep_command import expand_table

# Of Hydra's own settings, those that something reads; with a launcher plugin it reads the others.
READ_HERE = ("hydra.mode", "hydra.sweeper.params", "hydra.launcher", "hydra/launcher")
READ_BY_NOBODY = ("hydra/sweeper", "hydra.run", "hydra.output_subdir")


def compose_jobs(arguments: Sequence[str]) -> list[DictConfig]:
    """The configuration of every job that a command line asks for, sweeps expanded.

    Raises:
        ValueError: the first mistake, in one line.
    """
    return [compose_config(job) for job in expand_jobs(parse_arguments(arguments))]


def expand_jobs(command: Command) -> list[list[str]]:
    """The overrides of every job that a command asks for.

    Raises:
        ValueError: the first mistake, in one line.
    """
    _refuse_two_values(command.overrides)
    names = {key_of(override) for override in command.overrides}
    many = command.multirun or "table" in names or "hydra.mode=MULTIRUN" in command.overrides
    overrides = [_globbed(override) for override in readable(command.overrides, many)]
    if not names & {"experiment", "table"}:
        raise ValueError(
            "say what to run: experiment=NAME or table=NAME; `python -m moh` lists them"
        )
    _refuse_unread(overrides)
    expanded = expand_table(overrides)
    if expanded is not None:
        overrides = expanded
    base = base_of(overrides)
    if not (command.multirun or expanded is not None or base.hydra.mode == RunMode.MULTIRUN):
        for override in overrides:
            refuse_several(override)
        return [overrides]
    params = (base.hydra.sweeper.params or {}).items()
    rest = [f"{key}={value}" for key, value in params if key not in names]
    return _product([*rest, *overrides])


def base_of(overrides: Sequence[str]) -> DictConfig:
    """The configuration with Hydra's own part, before the rows of a table are known.

    Settings of a run need its experiment, and cannot be part of it.
    """
    own = ("table=", "hydra", "launcher")
    return compose_with([o for o in overrides if o.startswith(own)], with_hydra=True)


def launcher_of(overrides: Sequence[str]) -> str:
    """Name of the launcher plugin that a command asks for, ``basic`` for none."""
    chosen = [o.partition("=")[2] for o in overrides if o.startswith("hydra/launcher=")]
    return chosen[-1] if chosen else "basic"


def _product(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values of a multirun."""
    parsed = [parse(override) for override in dict.fromkeys(overrides)]
    for override in parsed:
        if override.is_sweep_override():
            values_of(override)
    try:
        batches = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return [list(job) for batch in batches for job in batch]


def _globbed(override: str) -> str:
    """``experiment=glob(demo/vit/*)`` with the names written out; any other override as it is."""
    parsed = parse(override)
    value = parsed.value() if parsed.is_sweep_override() else None
    key = key_of(override)
    names = options(key) if (CONF / key).is_dir() else []
    if not isinstance(value, Glob) or not names:
        return override
    found = value.filter(names)
    if not found:
        raise ValueError(f"{override}: matches no {key}{nearest(' '.join(value.include), names)}")
    return f"{key}={','.join(found)}" if len(found) > 1 else f"{key}=choice({found[0]})"


def _refuse_two_values(overrides: Sequence[str]) -> None:
    """Refuse a key with two values, of which Hydra would take the last."""
    found: dict[str, str] = {}
    for override in overrides:
        before = found.setdefault(key_of(override), override)
        if before != override:
            raise ValueError(f"{before} and {override}: one key, two values; leave one out")


def _refuse_unread(overrides: Sequence[str]) -> None:
    """Refuse settings of Hydra that nothing here looks at."""
    elsewhere = launcher_of(overrides) != "basic"
    for override in overrides:
        key = key_of(override)
        if not key.startswith(("hydra.", "hydra/")):
            continue
        if key.startswith(READ_BY_NOBODY) or not (elsewhere or key.startswith(READ_HERE)):
            raise ValueError(
                f"{override}: has no effect here; a run's folder is runs_dir=FOLDER, and sweeps "
                "are lists of values"
            )
