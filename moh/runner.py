"""One run from configuration to record: its folder, its lock, its outcome."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moh.config import (
    ClassificationConfig,
    Config,
    DiTConfig,
    EvalConfig,
    GenerationConfig,
    HeadsConfig,
    ImagesConfig,
    LanguageConfig,
    LauncherConfig,
    LlamaConfig,
    LoggerConfig,
    OptimConfig,
    TextConfig,
    TimmConfig,
    TrainerConfig,
)
from moh.errors import RunError, StoppedError, in_one_line
from moh.lineage import trained_weights
from moh.signals import stop_at_once
from moh.validation import validate

SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"timm": TimmConfig, "dit": DiTConfig, "llama": LlamaConfig},
    "task": {
        "classification": ClassificationConfig,
        "generation": GenerationConfig,
        "language": LanguageConfig,
    },
}

GROUPS: dict[str, type] = {
    "heads": HeadsConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "eval": EvalConfig,
    "logger": LoggerConfig,
    "launcher": LauncherConfig,
}

EVALUATED = "evaluated"  # status of a run that scored given weights: never a training of ours

# A run is named by its recipe: by what moves a number by more than rounding. What follows says
# where it runs and in what pieces, and may change between the starts of one run.
NOT_HASHED = (
    "name",
    "mode",
    "checkpoint",
    "evaluates",
    "seed",
    "runs_dir",
    "results_dir",
    "logger",
    "launcher",
    "dry_run",
    "heads.execution",
    "data.root",
    "data.workers",
    "trainer.activation_checkpointing",
    "trainer.checkpoint_every",
    "trainer.compile",
    "trainer.device",
    "trainer.device_batch",
    "trainer.keep_at",
    "trainer.log_every",
    "trainer.parallel",
    "trainer.threads",
    "eval.batch",
    "eval.data_root",
    "eval.features_path",
    "eval.reference",
    "eval.save_samples",
    "eval.vae",
)


FOLLOW_SECONDS = 600  # that the other machines wait for the first one to prepare a run


def config_hash(config: DictConfig) -> str:
    """Twelve hex digits of everything in the configuration that can move a number.

    By more than rounding: see ``NOT_HASHED`` for what is left out.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True)
    defaults: Any = OmegaConf.to_container(_schema(config))
    for key in NOT_HASHED:
        group, _, name = key.rpartition(".")
        (plain[group] if group else plain).pop(name, None)
    # Defaults are left out, so that a key which a later version adds does not rename every run.
    text = json.dumps(_without(plain, defaults), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """``values`` less what equals its default."""
    kept = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value, default = _without(value, default), {}
        if key not in defaults or value != default:
            kept[key] = value
    return kept


def _schema(config: DictConfig) -> DictConfig:
    """The schema with its defaults, each group of the kind that ``config`` has."""
    schema = OmegaConf.structured(Config)
    for group in GROUPS:
        schema[group] = OmegaConf.structured(GROUPS[group])
    for group, kinds in SCHEMAS.items():
        part = config[group]
        schema[group] = OmegaConf.structured(kinds[part.get("family") or part.get("name")])
    text = config.task.name == "language"
    schema.data = OmegaConf.structured(TextConfig if text else ImagesConfig)
    return schema


def run_id(config: DictConfig) -> str:
    """Folder name of a run: a function of configuration and seed, never of the clock.

    Scoring given weights is a run of its own, named by their content too, so that it can never
    stand for a training.
    """
    identity = f"{record_name(config)}/seed{config.seed}-{config_hash(config)[:8]}"
    if not scores_given_weights(config):
        return identity
    from moh.weights import identity as by_content

    return f"{identity}-{by_content(config.checkpoint)[:10]}"


def scores_given_weights(config: Config | DictConfig) -> bool:
    """True where weights are scored that this run does not train."""
    return config.mode == "eval" and config.checkpoint is not None and config.weights_of is None


def record_name(config: Config | DictConfig) -> str:
    """Name of a run's record: the experiment's, with ``-eval`` where given weights stand in."""
    aside = scores_given_weights(config) and config.evaluates is None
    return f"{config.name}-eval" if aside else str(config.name)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder; the lock dies with the process.

    Raises:
        RunError: another process holds it.
    """
    with open(folder / "lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{folder} is in use by another process; wait for it or stop it"
            ) from None
        _locks.add(handle.fileno())
        try:
            yield
        finally:
            _locks.discard(handle.fileno())


_locks: set[int] = set()


def _let_go() -> None:
    """In a process just forked: a data loader that outlives a killed run must not hold its lock."""
    for lock in _locks:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, lock)
        os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def run(config: DictConfig, arguments: Sequence[str] | None = None) -> None:
    """Carry out one run, or skip what is finished.

    The resolved configuration is frozen into the run folder first; the worker reads that file.

    Args:
        config: composed, checked or not.
        arguments: the user's command, for the record; None for this process's own.

    Raises:
        RunError: it cannot go on; one line for the user. The traceback is in ``error.log``.
    """
    typed = validate(config)
    # What another experiment trained is named by the configuration: scoring it once is enough.
    of_ours = typed.weights_of is not None and typed.checkpoint is None
    if of_ours:
        config = config.copy()
        config.checkpoint = typed.checkpoint = str(trained_weights(typed))
    arguments = sys.argv[1:] if arguments is None else arguments
    identity = run_id(config)
    folder = Path(typed.runs_dir) / identity
    if typed.launcher.nodes > 1:
        from moh.launch import place

        if place(typed.launcher.nodes).node > 0:
            _follow(folder, typed, arguments)
            return
    _check_writable(Path(typed.results_dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    with stop_at_once(identity), locked(folder):
        if (typed.mode == "both" or of_ours) and finished(folder) and _same_root(folder, typed):
            publish(folder, Path(typed.results_dir) / "runs" / identity)
            print(f"{identity}: finished before, skipped")
            return
        write_text(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        try:
            _carry_out(folder, typed, arguments)
            publish(folder, Path(typed.results_dir) / "runs" / identity)
        except KeyboardInterrupt:
            raise StoppedError(f"{identity}: stopped by SIGINT; the same command goes on") from None
        except StoppedError as error:
            if identity in str(error):
                raise
            raise StoppedError(f"{identity}: {error}") from None
        except RunError:
            _remove_if_empty(folder, Path(typed.runs_dir))
            raise
        except Exception as error:
            log = folder / "error.log"
            with suppress(OSError):  # such as a full disk, which may be the error itself
                write_text(log, traceback.format_exc())
            if isinstance(error, OSError) and error.strerror:
                where = f" ({error.filename})" if error.filename else ""
                raise RunError(f"{identity}: {error.strerror}{where}") from None
            what = str(error) if isinstance(error, ValueError) else in_one_line(error)
            raise RunError(f"{identity}: {what} (traceback in {log})") from None


def _same_root(folder: Path, config: Config) -> bool:
    """Whether a run was last started with the same data folder; another may hold other data."""
    root: str | None = OmegaConf.select(OmegaConf.load(folder / "config.yaml"), "data.root")
    return root == config.data.root


def _carry_out(folder: Path, config: Config, arguments: Sequence[str]) -> None:
    """Start the worker: here, or in processes of its own."""
    # The libraries behind both take seconds to import; a wrong command must not wait for them.
    launcher = config.launcher
    if launcher.processes * launcher.nodes > 1:
        from moh.launch import launch

        launch(folder, launcher.processes, arguments, launcher.nodes)
    else:
        from moh.worker import execute

        execute(folder, arguments)


def _follow(folder: Path, config: Config, arguments: Sequence[str]) -> None:
    """The part of a machine that is not the first: its processes, once the run is prepared."""
    wait_until = time.monotonic() + FOLLOW_SECONDS
    while not (folder / "config.yaml").is_file():
        if time.monotonic() > wait_until:
            raise RunError(f"{folder} was not prepared by the first machine: is it shared?")
        time.sleep(1)
    _carry_out(folder, config, arguments)


def _check_writable(path: Path) -> None:
    """Refuse a folder that cannot be made or written to, before any work."""
    path = path.absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        raise RunError(f"cannot write to {path}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise RunError(f"cannot write to {path}: no permission in {existing}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror}") from None
    # The record makes it; a run that fails leaves nothing. Another run may be using it by now.
    with suppress(OSError):
        while path != existing:
            path.rmdir()
            path = path.parent


def _remove_if_empty(folder: Path, top: Path) -> None:
    """Remove the folder of a run that failed before it did anything, and empty ones above it."""
    if any(path.name not in ("lock", "config.yaml") for path in folder.iterdir()):
        return
    shutil.rmtree(folder)
    for parent in folder.parents:
        if parent == top.parent or any(parent.iterdir()):
            return
        parent.rmdir()


def load_config(folder: Path) -> Config:
    """The frozen configuration of a run folder, with its types.

    Raises:
        RunError: no such file, or one of another version of the schema.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise RunError(f"{folder} has no config.yaml: not a run folder")
    frozen = OmegaConf.load(path)
    assert isinstance(frozen, DictConfig)
    try:
        merged = OmegaConf.merge(_schema(frozen), frozen)
    except (OmegaConfBaseException, KeyError) as error:
        raise RunError(f"{path} is not of this version: {str(error).splitlines()[0]}") from None
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def finished(folder: Path) -> bool:
    """True if the run trained its whole budget and was evaluated."""
    try:
        status = json.loads((folder / "run.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(status == "finished") and (folder / "metrics.json").is_file()


def progress_of(config: DictConfig) -> str:
    """How far a run is, in words."""
    folder = Path(config.runs_dir) / run_id(config)
    if finished(folder):
        return "finished"
    recorded = Path(config.results_dir) / "runs" / run_id(config)
    samples = max((int(p.name) for p in folder.glob("checkpoints/[0-9]*")), default=0)
    if samples:
        return f"{samples / config.trainer.samples:.0%} trained"
    if (folder / "run.json").is_file():
        return "started"
    return f"not started; recorded in {recorded}" if finished(recorded) else "not started"


RECORD = (
    "run.json",
    "metrics.json",
    "config.yaml",
    "curves.jsonl",
    "head_load.json",
    "head_similarity.json",
    "samples.png",
)


def publish(folder: Path, target: Path) -> None:
    """Copy the small record of a run to the tracked results folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in RECORD:
        if (folder / name).is_file():
            aside = target / f".{name}.tmp"
            shutil.copyfile(folder / name, aside)
            os.replace(aside, target / name)


def write_text(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader never sees half of it."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text)
    os.replace(aside, path)


def write_json(path: Path, value: Any) -> None:
    """JSON with a fixed layout, written as :func:`write_text` does."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
