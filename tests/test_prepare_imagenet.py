"""The check of an ImageNet folder: what is wrong is named, what is odd and handled is counted."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import script_runs
from made_images import CLASSES, KINDS, tree
from scipy.io import savemat

COUNT = len(CLASSES) * len(KINDS)


@pytest.fixture
def images(tmp_path):
    return tree(tmp_path / "images")


def check(images, tmp_path, *more, status=0, classes=3, train=COUNT, val=6):
    return script_runs.finish(
        *("prepare_imagenet", "check", images, "--journal", tmp_path / "journal.jsonl"),
        *("--classes", classes, "--train", train, "--val", val, "--workers", 1, *more),
        status=status,
    )


def test_a_whole_tree_passes_and_its_oddities_are_counted(images, tmp_path):
    said = check(images, tmp_path)
    assert f"train: 3 classes, {COUNT} images" in said
    assert "val: 3 classes, 6 images" in said
    for note in ("3 grey", "3 CMYK", "3 palette", "3 rotated by EXIF", "3 below 32", "3 named as"):
        assert note in said
    assert "all as it should be" in said
    again = check(images, tmp_path)
    assert "6 of 6 classes were checked before" in again
    # A file that changed is looked at again.
    (images / "train" / "n02" / "plain.JPEG").write_bytes(b"not a picture")
    said = check(images, tmp_path, status=1)
    assert "5 of 6 classes were checked before" in said
    assert "train/n02/plain.JPEG: cannot identify image file" in said


def test_everything_that_is_wrong_is_named(images, tmp_path):
    whole = (images / "train" / "n01" / "wide.JPEG").read_bytes()
    (images / "train" / "n01" / "wide.JPEG").write_bytes(whole[:-200])
    (images / "val" / "n02").rename(images / "val" / "n04")
    (images / "train" / "n03" / "notes.txt").write_text("no picture")
    shutil.rmtree(images / "val" / "n03")
    (images / "val" / "n03").mkdir()
    said = check(images, tmp_path, status=1, classes=4)
    for line in (
        "train/n01/wide.JPEG: image file is truncated",
        "train/n03/notes.txt: not an image by its name, ignored",
        "1 images cannot be decoded",
        "train/ has 3 classes, not 4",
        f"train/ has {COUNT - 1} images, not {COUNT}",
        "val/ has 4 images, not 6",
        "1 classes have no image, val/n03 first",
        "2 classes are not in both of train/ and val/, n02 first",
    ):
        assert line in said
    missing = script_runs.finish("prepare_imagenet", "check", tmp_path / "none", status=1)
    assert "train is not a folder" in missing


def test_a_check_that_was_killed_goes_on(images, tmp_path):
    journal = tmp_path / "journal.jsonl"
    check(images, tmp_path)
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:3]) + lines[3][:40])
    said = check(images, tmp_path)
    assert "3 of 6 classes were checked before" in said
    assert "all as it should be" in said


@pytest.mark.parametrize("form", ["table", "kit"])
def test_flat_validation_images_are_sorted_into_classes(form, images, tmp_path):
    expected = {path.name: path.parent.name for path in images.glob("val/*/*")}
    for path in list(images.glob("val/*/*")):
        path.rename(images / "val" / path.name)
    for name in CLASSES:
        (images / "val" / name).rmdir()
    if form == "table":
        labels = tmp_path / "LOC_val_solution.csv"
        rows = [f"{name[:-5]},{of} 1 2 30 40 {of} 5 6 7 8\n" for name, of in expected.items()]
        labels.write_text("ImageId,PredictionString\n" + "".join(rows))
    else:
        labels = tmp_path / "kit"
        (labels / "data").mkdir(parents=True)
        kinds = [("ILSVRC2012_ID", "<i4"), ("WNID", "O")]
        rows = [(3, "n01"), (1, "n02"), (2, "n03"), (4, "n09")]
        savemat(labels / "data" / "meta.mat", {"synsets": np.array(rows, dtype=kinds)})
        numbers = {"n01": 3, "n02": 1, "n03": 2}
        truth = "".join(f"{numbers[expected[name]]}\n" for name in sorted(expected))
        (labels / "data" / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    command = ("prepare_imagenet", "sort-val", images / "val", "--labels", labels)
    assert "6 moved, 6 of 6 in place" in script_runs.finish(*command)
    assert {p.name: p.parent.name for p in images.glob("val/*/*")} == expected
    assert "0 moved, 6 of 6 in place" in script_runs.finish(*command)
    (images / "val" / "stranger.JPEG").write_bytes(b"")
    said = script_runs.finish(*command, status=1)
    assert "has no class for 1 of 1 images, stranger.JPEG first: nothing was moved" in said


def test_labels_of_no_known_form_are_refused(images, tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"a": 1}))
    for labels, message in ((wrong, "is not Kaggle's"), (tmp_path, "is not the ILSVRC2012")):
        said = script_runs.finish(
            *("prepare_imagenet", "sort-val", images / "val", "--labels", labels), status=1
        )
        assert message in said
