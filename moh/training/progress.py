"""Progress bars: one line a phase, live on a terminal, sparse in a log file."""

from __future__ import annotations

import math
import os
import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

console = Console(highlight=False)


class _Note(ProgressColumn):
    """Free text that belongs to the bar: losses, throughput."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("note", ""), style="dim")


class RunProgress:
    """Bars of one run. Without a terminal it prints a line now and then instead.

    Args:
        label: what runs, in front of each line.
        enabled: False prints nothing.
    """

    LOG_EVERY = 30.0  # seconds between lines where there is no terminal

    def __init__(self, label: str, enabled: bool = True) -> None:
        self.label, self.enabled = label, enabled
        self.live = enabled and console.is_terminal and "MOH_PLAIN_PROGRESS" not in os.environ
        self._phase: str | None = None
        self._task: int | None = None
        self._last = -math.inf  # the first line at once: something is happening
        self._progress = Progress(
            TextColumn("[bold]{task.fields[label]}[/]"),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            _Note(),
            console=console,
            transient=True,
            disable=not self.live,
        )

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` are through in this phase."""
        if not self.enabled:
            return
        if phase != self._phase:
            if self._phase is not None:
                self._last = time.monotonic()
            if self._task is not None:
                self._progress.remove_task(self._task)  # type: ignore[arg-type]
            self._phase = phase
            self._task = self._progress.add_task(phase, total=total, label=self.label, note=note)
        if self.live:
            assert self._task is not None
            self._progress.update(self._task, completed=done, total=total, note=note)  # type: ignore[arg-type]
        elif time.monotonic() - self._last > self.LOG_EVERY:
            self._last = time.monotonic()
            console.print(f"{self.label}  {phase} {done}/{total}  {note}".rstrip(), soft_wrap=True)

    def say(self, text: RenderableType) -> None:
        """A line, or a table, that stays."""
        if self.enabled:
            console.print(text, soft_wrap=isinstance(text, str))
