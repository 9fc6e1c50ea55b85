"""The same image files in each form that labelled images have."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

FORMS = ("folder", "tar", "webdataset", "datasets")


def lay_out(form: str, root: Path, classes: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write files of classes in a form; where the reader of that form begins.

    Args:
        classes: class name -> file name -> content. The forms that number their classes count
            them as they come.
    """
    root.mkdir(parents=True, exist_ok=True)
    if form == "folder":
        for name, files in classes.items():
            (root / name).mkdir(parents=True)
            for file, content in files.items():
                (root / name / file).write_bytes(content)
        return root
    if form == "tar":
        members = {f"{n}/{f}": c for n, files in classes.items() for f, c in files.items()}
        return write_tar(root / "val.tar", members)
    if form == "webdataset":
        members = {}
        for label, files in enumerate(classes.values()):
            for file, content in files.items():
                members[file] = content
                members[f"{file.split('.')[0]}.cls"] = str(label).encode()
        return write_tar(root / "val.tar", members)
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(classes))}
    )
    rows = [
        {"image": {"bytes": content, "path": file}, "label": label}
        for label, files in enumerate(classes.values())
        for file, content in files.items()
    ]
    datasets.Dataset.from_list(rows, features=features).to_parquet(root / "validation-0.parquet")
    return root


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    """An archive of files, in the order given."""
    path.write_bytes(tar_of(members))
    return path


def tar_of(members: Mapping[str, bytes]) -> bytes:
    """The bytes of such an archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()
