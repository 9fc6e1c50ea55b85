"""Weights & Biases: the real client, online with a key, offline without; never in the way."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, cast

import numpy as np

from moh.config import LoggerConfig


class RunLogger:
    """One wandb run for one run folder; the same id whenever the run goes on.

    A failure of wandb is told once and the run goes on without it.

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
            (folder / "wandb_id").write_text(self.id)
            self.run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=self.id,
                resume="allow" if self.mode == "online" else None,
                name=run_id,
                group=str(config["name"]).rsplit("/", 1)[0],
                job_type=config["heads"]["name"],
                tags=[config["protocol"], config["heads"]["name"], config["task"]["name"]],
                dir=str(folder),
                config=config,
                mode=cast(Any, self.mode),
                reinit="finish_previous",
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=False, x_disable_stats=True
                ),
            )
        except Exception as error:
            self._fail(error)

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
        first = next(iter(str(error).splitlines()), type(error).__name__)
        print(f"moh: wandb failed, the run goes on without it: {first}")


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
