"""The entry point: Hydra's command line, with every mistake told in one line before any work."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

import moh
from moh.arguments import Command, parse_arguments
from moh.compose import CONF, ROOT, compose_config, experiments, tables
from moh.config import Config
from moh.errors import RunError, StoppedError, in_one_line
from moh.jobs import base_of, compose_jobs, expand_jobs, launcher_of
from moh.overrides import readable

__all__ = ["CONF", "ROOT", "compose_config", "compose_jobs", "experiments", "main", "tables"]

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
       wandb sweep scripts/wandb/sweep.yaml            an agent's --key=value is key=value

exit status: 0 every run finished, 1 a run failed, 2 the command was wrong and nothing was started,
             75 a signal stopped a run, which goes on when it is started again
"""

# Exit codes: 1 a run failed, 2 the command was wrong and nothing was started, 75 a signal stopped
# a run, which goes on when it is started again.
USAGE_ERROR = 2


def main() -> None:
    """Run the command line; the exit status is 0 only if every run finished."""
    arguments = sys.argv[1:]
    try:
        command = parse_arguments(arguments or ["--help"])
        if "--help" in command.options:
            print(USAGE)
            print("experiments:", *experiments(), sep="\n  ")
            print("tables:", *tables(), sep="\n  ")
            sys.exit(0)
        if "--version" in command.options:
            print(f"moh {moh.__version__}")
            sys.exit(0)
        expanded = dict(enumerate(expand_jobs(command)))
        if "--only" in command.options:
            expanded = _only(int(command.options["--only"]), expanded)
        jobs = {number: compose_config(job) for number, job in expanded.items()}
        if "--list" in command.options:
            _list(jobs)
            sys.exit(0)
        if not command.shows:
            _check(list(jobs.values()))
    except ValueError as error:
        print(f"moh: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    if command.shows:
        _hand_to_hydra([*command.shows, *next(iter(expanded.values()))])
    elif launcher_of(command.overrides) != "basic":
        _launch_elsewhere(list(expanded.values()), command)
    else:
        sys.exit(_run_here(list(jobs.values()), command.words))


def _only(number: int, jobs: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """The job that ``--only`` names."""
    if number not in jobs:
        raise ValueError(f"--only {number}: give a number from 0 to {len(jobs) - 1}")
    return {number: jobs[number]}


def _check(jobs: Sequence[DictConfig]) -> None:
    """Validate all jobs before the first one starts; print what those to be forecast would take.

    Raises:
        ValueError: the first mistake, in one line.
    """
    from moh.validation import validate

    dry = [validate(job, paths=False) for job in jobs if job.dry_run]
    for job in jobs:
        if not job.dry_run:
            validate(job)
    if dry:
        _forecast(dry)
        sys.exit(0)


def _list(jobs: Mapping[int, DictConfig]) -> None:
    """Print the runs that a command stands for."""
    from moh.runner import progress_of, run_id

    width = max(len(run_id(job)) for job in jobs.values())
    for number, job in jobs.items():
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


def _run_here(jobs: Sequence[DictConfig], arguments: Sequence[str]) -> int:
    """Carry out runs one after the other, none held up by another's failure."""
    from moh.runner import run

    failures = []
    for job in jobs:
        try:
            run(job, arguments)
        except StoppedError as error:
            print(f"moh: {error}", file=sys.stderr, flush=True)
            return StoppedError.EXIT_STATUS
        except Exception as error:
            # A RunError is written for the user; anything else came before there was a run folder.
            if not isinstance(error, RunError):
                if not isinstance(error, OSError):
                    traceback.print_exc()
                error = RunError(f"{job.name} seed {job.seed}: {in_one_line(error)}")
            print(f"moh: {error}", file=sys.stderr, flush=True)
            failures.append(f"{job.name} seed {job.seed}")
    if failures and len(jobs) > 1:
        print(f"moh: {len(failures)} of {len(jobs)} runs failed: {', '.join(failures)}")
    return int(bool(failures))


def _hand_to_hydra(arguments: Sequence[str]) -> None:
    """Let Hydra print what it is asked for."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def start(config: DictConfig) -> None:
        raise AssertionError("Hydra was to print only")

    GlobalHydra.instance().clear()
    sys.argv[1:] = arguments
    try:
        start()
    except SystemExit as end:
        sys.exit(USAGE_ERROR if end.code else 0)


def _launch_elsewhere(jobs: Sequence[list[str]], command: Command) -> None:
    """Hand jobs to the launcher plugin that the command names, and wait for them.

    Hydra's own multirun composes all settings before the experiment is known; here each job
    brings its own.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    base = base_of(readable(command.overrides, many=True))
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
