"""Check an ImageNet folder before training on it; sort the validation images into classes.

    python scripts/prepare_imagenet.py check IMAGENET
    python scripts/prepare_imagenet.py sort-val IMAGENET/val --labels LOC_val_solution.csv
    python scripts/prepare_imagenet.py sort-val IMAGENET/val --labels ILSVRC2012_devkit_t12

check counts the classes and images of IMAGENET/train and IMAGENET/val and decodes every one. It
remembers the classes that it has finished with, so that it goes on where it was interrupted and a
second run takes seconds. Exit status 1: something is not as it should be. sort-val moves the 50,000
flat validation images into a folder for each class, by Kaggle's table or the official kit.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from arguments import positive
from PIL import Image

from moh.data.listing import files_under, is_hidden, is_picture
from moh.data.pixels import is_deep, open_picture
from moh.data.text import cache_folder
from moh.errors import RunError
from moh.signals import end_with_parent
from moh.training.progress import RunProgress, console

SHOWN = 50  # bad files that are named in the terminal
ORIENTATION = 0x0112
NOTES = {
    "grey": "grey",
    "deep": "grey of 16 bits, scaled to 8",
    "cmyk": "CMYK",
    "alpha": "palette or alpha",
    "misnamed": "named as another format than they have",
    "rotated": "rotated by EXIF, which training ignores",
    "tiny": "below 32 pixels on a side",
}


@dataclass
class ClassReport:
    """What was found in one class folder.

    Attributes:
        stamp: of the names, sizes and times of its files; another stamp is checked anew.
        images: that can be decoded.
        bad: file -> why it cannot.
        ignored: files that no loader takes for an image, by their name.
        notes: how many images are out of the ordinary, and are handled.
    """

    folder: str
    stamp: str
    images: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


def stamp_of(folder: Path) -> str:
    """Hash of the names, sizes and times of a folder's files."""
    digest = hashlib.sha256()
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            status = entry.stat()
            digest.update(f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def check_class(root: str, folder: str) -> ClassReport:
    """Decode every image of a class folder, those in folders of it too, as training does."""
    where = Path(root) / folder
    report = ClassReport(folder, stamp_of(where))
    notes: Counter[str] = Counter()
    pictures, others = files_under(where)
    report.ignored = [Path(path).relative_to(root).as_posix() for path in others]
    for path in map(Path, pictures):
        name = path.relative_to(root).as_posix()
        try:
            open_picture(path)
        except RunError as error:
            report.bad[name] = str(error).removeprefix(f"cannot read image {path}: ")
            continue
        report.images += 1
        notes.update(peculiarities(path))
    report.notes = dict(notes)
    return report


def peculiarities(path: Path) -> list[str]:
    """What is out of the ordinary in an image that can be decoded."""
    with Image.open(path) as image:
        found = {
            "grey": image.mode in ("L", "1", "LA"),
            "deep": is_deep(image),
            "cmyk": image.mode == "CMYK",
            "alpha": image.mode in ("P", "PA", "RGBA"),
            "misnamed": path.suffix.lower() not in formats()[image.format or ""],
            "rotated": orientation(image) not in (None, 1),
            "tiny": min(image.size) < 32,
        }
    return [note for note, true in found.items() if true]


@cache
def formats() -> dict[str, set[str]]:
    """The suffixes of each of Pillow's formats."""
    known: dict[str, set[str]] = {"": set()}
    for suffix, name in Image.registered_extensions().items():
        known.setdefault(name, set()).add(suffix)
    return known | {"MPO": known["JPEG"]}


def orientation(image: Image.Image) -> Any:
    """EXIF orientation; None where there is none, or its block is broken."""
    try:
        return image.getexif().get(ORIENTATION)
    except Exception:
        # What Pillow raises for a broken block is not one type; the picture itself is whole.
        return None


def class_folders(root: Path, split: str) -> list[str]:
    """Class folders of a split, relative to the root."""
    where = root / split
    if not where.is_dir():
        raise RunError(f"{where} is not a folder: an ImageNet folder has train/ and val/")
    found = sorted(e.name for e in os.scandir(where) if e.is_dir() and not is_hidden(e.name))
    return [f"{split}/{name}" for name in found]


class Journal:
    """Class folders that were checked before, one line of JSON each."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        self._known: dict[str, ClassReport] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    report = ClassReport(**json.loads(line))
                except (ValueError, TypeError):
                    continue  # the line that was being written when it was interrupted
                self._known[report.folder] = report

    def get(self, folder: str) -> ClassReport | None:
        """An earlier report, if no file has changed since."""
        report = self._known.get(folder)
        if report is None or report.bad or report.stamp != stamp_of(self.root / folder):
            return None
        return report

    def add(self, report: ClassReport) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(report)) + "\n")


def check(options: argparse.Namespace) -> int:
    """Check both splits; the exit status."""
    root = options.folder.resolve()
    name = f"imagenet-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}.jsonl"
    journal = Journal(options.journal or cache_folder() / name, root)
    folders = {split: class_folders(root, split) for split in ("train", "val")}
    everything = [folder for split in folders.values() for folder in split]
    reports = {folder: report for folder in everything if (report := journal.get(folder))}
    todo = [folder for folder in everything if folder not in reports]
    with (
        RunProgress("imagenet") as progress,
        ProcessPoolExecutor(options.workers, initializer=end_with_parent) as pool,
    ):
        if reports:
            progress.say(f"{len(reports)} of {len(everything)} classes were checked before")
        waiting = [pool.submit(check_class, str(root), folder) for folder in todo]
        images = 0
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                report = future.result()
                reports[report.folder] = report
                journal.add(report)
                images += report.images
                progress("decoding", number, len(todo), f"classes, {images:,} images")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return conclude(options, folders, reports)


def conclude(
    options: argparse.Namespace, folders: dict[str, list[str]], reports: dict[str, ClassReport]
) -> int:
    """Say what was found; 1 if anything is wrong."""
    wrong: list[str] = []
    bad = {name: why for report in reports.values() for name, why in report.bad.items()}
    for name, why in sorted(bad.items())[:SHOWN]:
        console.print(f"{name}: {why}", style="red", soft_wrap=True)
    if len(bad) > SHOWN:
        console.print(f"… and {len(bad) - SHOWN} more", style="red")
    if bad:
        wrong.append(f"{len(bad)} images cannot be decoded")
    ignored = [name for report in reports.values() for name in report.ignored]
    for name in sorted(ignored)[:SHOWN]:
        console.print(f"{name}: not an image by its name, ignored", style="yellow", soft_wrap=True)
    notes: Counter[str] = Counter()
    for split, expected in (("train", options.train), ("val", options.val)):
        own = [reports[folder] for folder in folders[split]]
        count = sum(report.images for report in own)
        console.print(f"{split}: {len(own):,} classes, {count:,} images")
        if len(own) != options.classes:
            wrong.append(f"{split}/ has {len(own):,} classes, not {options.classes:,}")
        if count != expected:
            wrong.append(f"{split}/ has {count:,} images, not {expected:,}")
        if empty := [report.folder for report in own if not report.images]:
            wrong.append(f"{len(empty)} classes have no image, {empty[0]} first")
        for report in own:
            notes.update(report.notes)
    names = [{Path(folder).name for folder in folders[split]} for split in ("train", "val")]
    if other := sorted(names[0] ^ names[1]):
        wrong.append(f"{len(other)} classes are not in both of train/ and val/, {other[0]} first")
    if notes:
        said = ", ".join(f"{count:,} {NOTES[note]}" for note, count in notes.items())
        console.print(f"of them, and handled: {said}", style="dim", soft_wrap=True)
    for line in wrong:
        console.print(line, style="red", soft_wrap=True)
    console.print("not as it should be" if wrong else "all as it should be")
    return int(bool(wrong))


def read_labels(path: Path) -> dict[str, str]:
    """Class of each validation image, by its name without suffix.

    Args:
        path: Kaggle's ``LOC_val_solution.csv``, or the folder of the official kit.
    """
    if path.is_dir():
        return read_kit(path)
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        labels = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (KeyError, IndexError, UnicodeDecodeError, AttributeError, csv.Error):
        labels = {}
    if not labels:
        raise RunError(f"{path} is not Kaggle's LOC_val_solution.csv (ImageId, PredictionString)")
    return labels


def read_kit(folder: Path) -> dict[str, str]:
    from scipy.io import loadmat

    try:
        synsets = loadmat(folder / "data" / "meta.mat", squeeze_me=True)["synsets"]
        truth = folder / "data" / "ILSVRC2012_validation_ground_truth.txt"
        numbers = [int(line) for line in truth.read_text().split()]
        classes = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        return {f"ILSVRC2012_val_{i:08d}": classes[number] for i, number in enumerate(numbers, 1)}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RunError(f"{folder} is not the ILSVRC2012 development kit: {error}") from None


def sort_val(options: argparse.Namespace) -> int:
    """Move flat validation images into class folders."""
    folder = options.folder
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder")
    labels = read_labels(options.labels)
    flat = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and is_picture(path.name) and not is_hidden(path.name)
    )
    if unknown := [path.name for path in flat if path.stem not in labels]:
        raise RunError(
            f"{options.labels} has no class for {len(unknown)} of {len(flat)} images, "
            f"{unknown[0]} first: nothing was moved"
        )
    with RunProgress("imagenet") as progress:
        for number, path in enumerate(flat, 1):
            target = folder / labels[path.stem]
            target.mkdir(exist_ok=True)
            path.rename(target / path.name)
            progress("sorting", number, len(flat))
    inside = {path.stem for path in folder.glob("*/*") if is_picture(path.name)}
    missing = sorted(labels.keys() - inside)
    said = f"{folder}: {len(flat):,} moved, {len(inside):,} of {len(labels):,} in place"
    console.print(said, soft_wrap=True)
    if missing:
        console.print(f"{len(missing):,} images are missing, {missing[0]} first", style="red")
    return int(bool(missing))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("check", help="count and decode every image")
    one.add_argument("folder", type=Path, metavar="IMAGENET")
    one.add_argument("--workers", type=positive, default=os.cpu_count() or 1)
    one.add_argument("--classes", type=positive, default=1000, help="expected (1000)")
    one.add_argument("--train", type=positive, default=1_281_167, help="expected (1281167)")
    one.add_argument("--val", type=positive, default=50_000, help="expected (50000)")
    one.add_argument("--journal", type=Path, help="file that remembers what was checked")
    one.set_defaults(run=check)
    two = commands.add_parser("sort-val", help="move flat validation images into class folders")
    two.add_argument("folder", type=Path, metavar="VAL")
    two.add_argument("--labels", type=Path, required=True, help="table or kit")
    two.set_defaults(run=sort_val)
    return parser.parse_args()


def main() -> int:
    options = parse()
    try:
        return options.run(options)
    except (RunError, ValueError) as error:
        print(f"prepare_imagenet: {error}", file=sys.stderr)
    except BrokenProcessPool:
        print("prepare_imagenet: a process died; fewer --workers may help", file=sys.stderr)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"prepare_imagenet: {error.strerror or error}{where}", file=sys.stderr)
    except KeyboardInterrupt:
        print("prepare_imagenet: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
