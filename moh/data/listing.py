"""Which files of a folder or an archive are pictures: one rule for every reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from torchvision.datasets.folder import IMG_EXTENSIONS

from moh import distribution
from moh.errors import some

PICTURES = frozenset(IMG_EXTENSIONS)  # torchvision's suffixes, in any case
LISTED = 6  # names in one message


def is_picture(path: str) -> bool:
    """True for a name with the suffix of a picture, in capitals or not."""
    return PurePosixPath(path).suffix.lower() in PICTURES


def is_hidden(path: str) -> bool:
    """True for a file or folder that starts with a dot (``._x.png``), and for all in one."""
    parts = PurePosixPath(path).parts
    return any(part.startswith(".") and part != ".." for part in parts)


def files_under(folder: Path) -> tuple[list[str], list[str]]:
    """Pictures and other files in a folder and in its subfolders, without what is hidden.

    Returns:
        Paths of the pictures, in torchvision's order: by folder, then by name; paths of the
        others.

    Raises:
        OSError: a folder cannot be read.
    """
    found = []
    for where, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name)]
        found.append((where, sorted(name for name in files if not is_hidden(name))))
    paths = [os.path.join(where, name) for where, files in sorted(found) for name in files]
    return [p for p in paths if is_picture(p)], [p for p in paths if not is_picture(p)]


def _fail(error: OSError) -> None:
    raise error


def say_left_out(where: str | Path, names: Sequence[str], what: str = "not pictures") -> None:
    """Say on the main process's error stream which files of a data set are not used."""
    if names and distribution.is_main():
        count = f"{len(names):,} file{'s' * (len(names) > 1)}"
        print(f"{where}: {count} left out, {what}: {some(names, LISTED)}", file=sys.stderr)
