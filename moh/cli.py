"""The entry point: Hydra's command line, with every mistake told in one line before any work."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moh import sweeps
from moh.config import Config, register
from moh.errors import RunError, StoppedError, nearest
from moh.sweep_command import expand_table, names_of

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

USAGE = """\
usage: python -m moh experiment=NAME [mode=train|eval|both] [seed=N] [key=value ...]
       python -m moh table=NAME [key=value ...]        all rows and seeds of a table
       python -m moh table=head_ratio family=vit|dit|llm [protocol=demo] [ratios=0.5,0.75]
                     [controls=random,fixed,paper|none] [control_ratios=0.5] [seeds=0,1,2]
                                                       score against activated ratio, with controls
       python -m moh experiment=NAME --cfg job         print the composed configuration
       python -m moh -m experiment=A,B seed=0,1        any product of settings
       python -m moh table=NAME --list                 the runs, numbered, and how far each is
       python -m moh table=NAME --only N               run number N alone (job arrays)
       python -m moh ... dry_run=true                  sizes and cost, nothing trained

exit status: 0 every run finished, 1 a run failed, 2 the command was wrong and nothing was started,
             75 a signal stopped a run, which goes on when it is started again
"""

# Hydra's options that are followed by a word.
TAKE_A_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--only")

# Those that ask for a configuration, not for a run.
SHOW = {"--cfg", "-c", "--info", "-i"}

MANY = 12  # options that a message does not list any more

# Exit codes: 1 a run failed, 2 the command was wrong and nothing was started, 75 a signal stopped
# a run, which goes on when it is started again.
USAGE_ERROR = 2


def experiments() -> list[str]:
    """Names that ``experiment=`` takes."""
    return _options("experiment")


def tables() -> list[str]:
    """Names that ``table=`` takes."""
    return _options("table")


def _options(group: str) -> list[str]:
    folder = CONF / group
    names = (str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return sorted(name for name in names if name != "schema")


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose one run's configuration, Hydra's part left out.

    Raises:
        ValueError: an unknown group option or key, or a value of the wrong type; one line.
    """
    return _compose(overrides, with_hydra=False)


def _compose(overrides: Sequence[str], with_hydra: bool) -> DictConfig:
    register()
    sweeps.register(names_of("experiment", overrides))
    if not CONF.is_dir():
        raise ValueError(f"no folder {CONF}: run from a clone of the project, installed with -e")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=list(overrides), return_hydra_config=with_hydra)
    except MissingConfigException as error:
        raise ValueError(_explain_missing(error, overrides)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain_key(error, overrides)) from None


def _explain_missing(error: MissingConfigException, overrides: Sequence[str]) -> str:
    missing = str(error.missing_cfg_file)
    group, _, name = missing.partition("/")
    for override in overrides:
        key, _, value = override.partition("=")
        if value and missing == f"{key}/{value}":
            group, name = key, value
    options = _options(group) or list(error.options or [])
    many = len(options) > MANY
    known = "; `python -m moh` lists them" if many else f"; known: {', '.join(options)}"
    listed = nearest(name, options) or known
    return f"unknown {group} {name!r}{listed}"


def _explain_key(error: Exception, overrides: Sequence[str]) -> str:
    """The key, its value and what is allowed, from Hydra's several kinds of message."""
    text = str(error)
    cause = str(error.__cause__ or "")
    there = re.search(r"already at '([^']+)'|Multiple values for (\S+?)\. ", text)
    if there and (plus := [o for o in overrides if o.startswith(f"+{there[1] or there[2]}=")]):
        return f"{plus[0]}: {there[1] or there[2]} has a value already; leave out the +"
    bad = re.search(r"Could not override '([^']+)'", text)
    if bad and "not in" in text + cause:
        key = bad.group(1)
        return f"unknown key {key}={_value(key, overrides)}{_allowed(key, overrides)}"
    full = re.search(r"full_key: (\S+)", text) or re.search(r"full_key: (\S+)", cause)
    first = next((line for line in (cause or text).splitlines() if line.strip()), text)
    key = full.group(1) if full else bad.group(1) if bad else ""
    if explained := _explain_value(key, text + cause, overrides):
        return explained
    if full and "not in" in first:
        key = full.group(1)
        return f"unknown key {key} in a file of conf/{_allowed(key, overrides)}"
    if isinstance(error, ConfigCompositionException) and bad:
        return f"{bad.group(1)}={_value(bad.group(1), overrides)}: {first}"
    return f"{full.group(1)}: {first}" if full else first


KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
}


def _explain_value(key: str, text: str, overrides: Sequence[str]) -> str | None:
    """A value of the wrong type in the user's words, None if ``text`` is not about one."""
    value = _value(key, overrides)
    if wrong := re.search(r"could not be converted to (\w+)", text):
        wanted = KINDS.get(wrong.group(1), wrong.group(1))
        return f"{key}={value}: must be {wanted}"
    if "is not a ListConfig" in text:
        return f"{key}={value}: must be a list, such as [2,2,2]"
    return None


def _value(key: str, overrides: Sequence[str]) -> str:
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name == key:
            return value
    return "?"


def _allowed(key: str, overrides: Sequence[str]) -> str:
    """Keys that stand where ``key`` does not."""
    groups = [o for o in overrides if (CONF / o.partition("=")[0]).is_dir()]
    parent, _, leaf = key.rpartition(".")
    try:
        config = compose_config(groups)
        node: Any = OmegaConf.select(config, parent) if parent else config
        known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    except ValueError:
        known = []
    if not known:
        return ""
    close = nearest(leaf, known, prefix=f"{parent}." if parent else "")
    return close or f"; allowed here: {', '.join(known)}"


def compose_jobs(arguments: Sequence[str]) -> list[DictConfig]:
    """The configuration of every job that a command line asks for, sweeps expanded.

    Raises:
        ValueError: the first mistake, in one line.
    """
    return [compose_config(job) for job in expand_jobs(arguments)]


def expand_jobs(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of every job that a command line asks for.

    Raises:
        ValueError: the first mistake, in one line.
    """
    arguments = written_out(arguments)
    overrides = overrides_in(arguments)
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"{override!r} is not of the form key=value")
    names = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not names & {"experiment", "table"}:
        raise ValueError(
            "say what to run: experiment=NAME or table=NAME; `python -m moh` lists them"
        )
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ValueError(str(error).splitlines()[0]) from None
    base = _base(overrides)
    multirun = {"-m", "--multirun"} & set(arguments) or base.hydra.mode == RunMode.MULTIRUN
    if not multirun:
        if any(p.is_sweep_override() for p in parsed):
            raise ValueError("several values for a key need -m (multirun)")
        return [overrides]
    params = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
    params = [p for p in params if p.partition("=")[0] not in names]
    jobs = BasicSweeper.split_arguments(
        OverridesParser.create().parse_overrides([*params, *overrides]), None
    )
    return [list(job) for batch in jobs for job in batch]


def written_out(arguments: Sequence[str]) -> list[str]:
    """A command whose table is a sweep with its rows written out; any other as it is.

    Where it only asks for a configuration to be shown, that of the first row.

    Raises:
        ValueError: a word of the sweep that is not allowed; one line.
    """
    overrides = overrides_in(arguments)
    expanded = expand_table(overrides)
    options = [argument for argument in arguments if argument not in overrides]
    if expanded is None:
        return list(arguments)
    if SHOW & set(options):
        return [*options, *(override.partition(",")[0] for override in expanded)]
    return ["-m", *options, *expanded]


def overrides_in(arguments: Sequence[str]) -> list[str]:
    """The arguments that are neither options nor an option's value."""
    overrides, follows = [], ""
    for argument in arguments:
        if not argument.startswith("-") and follows not in TAKE_A_VALUE:
            overrides.append(argument)
        follows = argument
    return overrides


def _base(overrides: Sequence[str]) -> DictConfig:
    """The configuration with Hydra's own part, before the rows of a table are known.

    Settings of a run need its experiment, and cannot be part of it.
    """
    own = ("table=", "hydra", "launcher")
    return _compose([o for o in overrides if o.startswith(own)], with_hydra=True)


def main() -> None:
    """Run the command line; the exit status is 0 only if every run finished."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        print("experiments:", *experiments(), sep="\n  ")
        print("tables:", *tables(), sep="\n  ")
        sys.exit(0)
    try:
        expanded = expand_jobs(arguments)
        if "--only" in arguments:
            expanded = [_numbered(expanded, arguments)]
        jobs = [compose_config(job) for job in expanded]
        if "--list" in arguments:
            _list(jobs)
            sys.exit(0)
        if not SHOW & set(arguments):
            from moh.validation import validate

            dry = [validate(job, paths=False) for job in jobs if job.dry_run]
            for job in jobs:
                if not job.dry_run:
                    validate(job)
            if dry:
                _forecast(dry)
                sys.exit(0)
    except ValueError as error:
        print(f"moh: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    if SHOW & set(arguments):
        sys.argv[1:] = written_out(arguments)
        _hand_to_hydra()
    elif any(a.startswith("hydra/launcher=") and a != "hydra/launcher=basic" for a in arguments):
        _launch_elsewhere(expanded, arguments)
    else:
        sys.exit(_run_here(jobs))


def _numbered(jobs: Sequence[list[str]], arguments: Sequence[str]) -> list[str]:
    """The job that ``--only`` names."""
    word = next(iter(arguments[arguments.index("--only") + 1 :]), "")
    if not word.isdecimal() or int(word) >= len(jobs):
        raise ValueError(f"--only {word or '(nothing)'}: give a number from 0 to {len(jobs) - 1}")
    return jobs[int(word)]


def _list(jobs: Sequence[DictConfig]) -> None:
    """Print the runs that a command stands for."""
    from moh.runner import progress_of, run_id

    width = max(len(run_id(job)) for job in jobs)
    for number, job in enumerate(jobs):
        print(f"{number:>4}  {run_id(job):<{width}}  {progress_of(job)}")


def _forecast(configs: Sequence[Config]) -> None:
    """Print what runs would take."""
    from rich.console import Console

    from moh.training.dry_run import forecast, show

    trained = [config for config in configs if config.mode != "eval"]
    if trained:
        show([forecast(config) for config in trained], trained[0], Console(highlight=False))
    if idle := len(configs) - len(trained):
        print(f"{idle} of {len(configs)} runs evaluate what others train: not counted")


def _run_here(jobs: Sequence[DictConfig], arguments: Sequence[str] | None = None) -> int:
    """Carry out runs one after the other, none held up by another's failure."""
    from moh.runner import run

    failures = []
    for job in jobs:
        try:
            run(job, arguments)
        except StoppedError as error:
            print(f"moh: {error}", file=sys.stderr, flush=True)
            return StoppedError.EXIT_STATUS
        except RunError as error:
            print(f"moh: {error}", file=sys.stderr, flush=True)
            failures.append(f"{job.name} seed {job.seed}")
    if failures and len(jobs) > 1:
        print(f"moh: {len(failures)} of {len(jobs)} runs failed: {', '.join(failures)}")
    return int(bool(failures))


def _hand_to_hydra() -> None:
    """Let Hydra print what it is asked for."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def start(config: DictConfig) -> None:
        raise AssertionError("Hydra was to print only")

    GlobalHydra.instance().clear()
    start()


def _launch_elsewhere(jobs: Sequence[list[str]], arguments: Sequence[str]) -> None:
    """Hand jobs to the launcher plugin that the command names, and wait for them.

    Hydra's own multirun composes all settings before the experiment is known; here each job
    brings its own.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    base = _base(overrides_in(arguments))
    loader = ConfigLoaderImpl(create_config_search_path(str(CONF)))
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    launcher = Plugins.instance().instantiate_launcher(
        config=base, hydra_context=context, task_function=_run_job
    )
    launcher.launch(jobs, initial_job_idx=0)


def _run_job(config: DictConfig) -> None:
    """One job on the machine that a launcher plugin found for it."""
    from hydra.core.hydra_config import HydraConfig

    status = _run_here([config], list(HydraConfig.get().overrides.task))
    if status:
        raise RunError(f"{config.name} did not finish: its log says why")
