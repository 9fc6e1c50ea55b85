"""Page and figure of a machine's measurements, from ``benchmark.json``."""

from __future__ import annotations

from pathlib import Path


def render(folder: Path) -> Path:
    return folder
