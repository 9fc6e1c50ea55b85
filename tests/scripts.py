"""Running the scripts as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moh.cli import ROOT


def start(name: str, *arguments: object) -> subprocess.Popen[str]:
    """A script in a process of its own."""
    return subprocess.Popen(
        [sys.executable, f"scripts/{name}.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(name: str, *arguments: object, status: int = 0) -> str:
    """Run a script to its end; what it printed. A traceback is never right."""
    process = start(name, *arguments)
    out, error = process.communicate(timeout=120)
    assert "Traceback" not in error, error
    assert process.returncode == status, out + error
    if status:
        assert len(error.strip().splitlines()) <= 1, error
    return out + error


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder but what a script keeps for itself, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }
