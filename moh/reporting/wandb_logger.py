"""Weights & Biases: the real client, online with a key, offline without; never in the way."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np

from moh.config import LoggerConfig

ANSWER_SECONDS = 10  # that the server has for a first answer, in all attempts together
INIT_SECONDS = 30  # that a server which has answered has for the start of a run
END_SECONDS = 5  # for wandb's own process to end after that failed
FINISH_SECONDS = 300  # for what is not sent when it ends; the files stay


class RunLogger:
    """One wandb run for one run folder; the same id whenever the run goes on.

    A server that does not answer, or does not take the run, is told in one line; the run is then
    logged to files, as offline. Any other failure of wandb is told once and the run goes on without
    it.

    Args:
        folder: run folder; wandb's files go to ``folder/wandb``.
        config: the resolved configuration as plain data.
    """

    def __init__(
        self, settings: LoggerConfig, folder: Path, config: dict[str, Any], run_id: str
    ) -> None:
        self.mode = _mode(settings.wandb)
        self.run: Any = None
        self.id: str | None = None
        if self.mode == "disabled":
            return
        try:
            import wandb

            self._wandb = wandb
            self.id = _stored_id(folder) or secrets.token_hex(4)
            options = {
                "project": settings.project,
                "entity": settings.entity,
                "id": self.id,
                "name": run_id,
                "group": str(config["name"]).rsplit("/", 1)[0],
                "job_type": config["heads"]["name"],
                "tags": [config["protocol"], config["heads"]["name"], config["task"]["name"]],
                "dir": str(folder),
                "config": config,
            }
            if self.mode == "online" and not (_server_answers() and self._start_online(options)):
                self.mode = "offline"
            if self.mode == "offline":
                self._start("offline", options)
            assert self.run is not None
            self.id = str(self.run.id)  # in a sweep its agent chooses
            (folder / "wandb_id").write_text(self.id)
        except Exception as error:
            self._fail(error)

    def _start_online(self, options: dict[str, Any]) -> bool:
        """Start the run on the server; False if it does not take it."""
        files = Path(options["dir"]) / "wandb"
        before = set(files.glob("run-*"))
        try:
            self._start("online", options)
        except Exception as error:
            _give_up(_first_line(error))
            for attempt in set(files.glob("run-*")) - before:
                shutil.rmtree(attempt, ignore_errors=True)  # has no curves
            return False
        return True

    def _start(self, mode: str, options: dict[str, Any]) -> None:
        self.run = self._wandb.init(
            mode=cast(Any, mode),
            resume="allow" if mode == "online" else None,
            reinit="finish_previous",
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=False,
                x_disable_stats=True,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
            **options,
        )

    def log(self, row: dict[str, Any], step: int) -> None:
        """Curves of one update; lists under ``head_load/`` become histograms."""
        self._guard(lambda: self.run.log(self._as_wandb(row), step=step))

    def finish(self, scores: dict[str, float], images: dict[str, Path], load: Any) -> None:
        """Final scores, pictures and head load; closes the run."""

        def send() -> None:
            self.run.summary.update(scores)
            media = {name: self._wandb.Image(str(path)) for name, path in images.items()}
            if load is not None:
                columns = ["layer", "group", "head", "load"]
                media["head_load"] = self._wandb.Table(columns=columns, data=_load_rows(load))
            self.run.log({**{f"score/{k}": v for k, v in scores.items()}, **media})
            self.run.finish()

        self._guard(send)

    def close(self, failed: bool) -> None:
        """Close the run without scores."""
        self._guard(lambda: self.run.finish(exit_code=1 if failed else 0))

    def _as_wandb(self, row: dict[str, Any]) -> dict[str, Any]:
        sent = {}
        for key, value in row.items():
            if key.startswith("head_load/"):
                edges = list(range(len(value) + 1))
                sent[key] = self._wandb.Histogram(np_histogram=(np.array(value), np.array(edges)))
            elif value is not None:
                sent[f"train/{key}"] = value
        return sent

    def _guard(self, action: Any) -> None:
        if self.run is None:
            return
        try:
            action()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.run = None
        print(f"moh: wandb failed, the run goes on without it: {_first_line(error)}")


_answers: bool | None = None  # None before it is asked; asked once, for all runs of a command


def _server_answers() -> bool:
    """Whether wandb's server is there, whatever it thinks of this machine's key.

    The start of a run would wait much longer, and requests that time out can keep wandb's own
    process from ending.
    """
    global _answers
    if _answers is not None:
        return _answers
    import requests
    import wandb

    settings = wandb.setup(wandb.Settings(mode="online", silent=True)).settings
    if not wandb.login(verify=False, prompt=False):
        _give_up(f"no key for {settings.base_url}")
        return False
    proxies = {"http": settings.http_proxy, "https": settings.https_proxy}
    until, reason = time.monotonic() + ANSWER_SECONDS, ""
    while (left := until - time.monotonic()) > 0:
        try:
            status = requests.post(
                f"{settings.base_url}/graphql",
                json={"query": "query { viewer { id } }"},
                proxies={name: url for name, url in proxies.items() if url},
                timeout=left,
            ).status_code
            if status < 500:
                _answers = True
                return True
            reason = f"status {status}"
        except requests.exceptions.SSLError:  # the client has certificates of its own
            _answers = True
            return True
        except requests.RequestException as error:
            reason = type(error).__name__
        time.sleep(min(1, max(0, until - time.monotonic())))
    _give_up(f"no answer from {settings.base_url} in {ANSWER_SECONDS} s ({reason})")
    return False


def _give_up(reason: str) -> None:
    """Say that runs go to files, and leave the server alone."""
    global _answers
    import wandb

    _answers = False
    print(f"moh: wandb: {reason}; logging to files, `wandb sync` with the run's folder sends them")
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would go to the same server, with retries
    # A run that did not start holds its id until wandb's process ends, which may take for ever.
    teardown = Thread(target=wandb.teardown, daemon=True)
    teardown.start()
    teardown.join(END_SECONDS)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _mode(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    if os.environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return os.environ["WANDB_MODE"]
    netrc = Path.home() / ".netrc"
    known = netrc.is_file() and "api.wandb.ai" in netrc.read_text(errors="ignore")
    return "online" if os.environ.get("WANDB_API_KEY") or known else "offline"


def _stored_id(folder: Path) -> str | None:
    try:
        return (folder / "wandb_id").read_text().strip() or None
    except OSError:
        return None


def _load_rows(load: dict[str, Any]) -> list[list[Any]]:
    groups = {"overall": load["overall"], **load["groups"]}
    return [
        [layer, group, head, value]
        for group, layers in groups.items()
        for layer, heads in zip(load["layers"], layers, strict=True)
        for head, value in enumerate(heads)
    ]
