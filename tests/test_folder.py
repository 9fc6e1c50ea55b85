"""Images in folders: the paper's augmentation, its order, and broken trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import made_images
import numpy as np
import pytest
import torch
from made_images import KINDS
from PIL import Image
from tiny_runs import folder_of, weights

from moh.cli import compose_config
from moh.data import pixels, reading
from moh.data.folder import FolderImages, RepeatedOrder
from moh.data.order import ShuffledOrder
from moh.errors import RunError, StoppedError
from moh.runner import run
from moh.tasks.classification import Classification
from moh.training.loop import Trainer
from moh.validation import validate

CLASSES = ("n01", "n02", "n03")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve training and six validation images of three classes, of several sizes and modes."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for name in CLASSES:
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (40 + 9 * i, 50, 3), dtype=np.uint8)
                image = Image.fromarray(pixels)
                image = image.convert("L") if i == 1 else image
                image.save(folder / f"{i}.png" if i == 2 else folder / f"{i}.JPEG")
    return tmp_path / "images"


def configure(tree: Path, folder: Path, *more: str):
    return compose_config(
        [
            "experiment=vit/moh_s_75",
            f"data.root={tree}",
            "data.size=32",
            "data.workers=0",
            "model.img_size=32",
            "model.num_classes=3",
            "model.name=transnext_micro",
            "+model.args.embed_dims=[24,48]",
            "+model.args.num_heads=[3,6]",
            "+model.args.depths=[1,1]",
            "+model.args.mlp_ratios=[2,2]",
            "+model.args.sr_ratios=[2,1]",
            "heads=moh_75",
            "trainer.samples=24",
            "trainer.global_batch=8",
            "trainer.device_batch=4",
            "task.mix_batch=4",
            "trainer.checkpoint_every=8",
            "trainer.precision=fp32",
            "task.mix_batch=2",
            "trainer.log_every=1",
            "optim.warmup_samples=8",
            f"runs_dir={folder}/runs",
            f"results_dir={folder}/results",
            "logger.progress=false",
            "logger.wandb=disabled",
            *more,
        ]
    )


def test_the_vit_recipe_trains_on_folders_and_a_start_in_the_middle_changes_nothing(tree, tmp_path):
    whole, halves = configure(tree, tmp_path / "a"), configure(tree, tmp_path / "b")
    run(whole)
    update = Trainer._update

    def stopping(self, *given):
        if self.samples == 16 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return update(self, *given)

    stopped: list[bool] = []
    Trainer._update = stopping
    try:
        with pytest.raises(StoppedError):
            run(halves)
    finally:
        Trainer._update = update
    run(halves)
    first, second = weights(whole), weights(halves)
    assert all(torch.equal(first[key], second[key]) for key in first)
    rows = (folder_of(whole) / "curves.jsonl").read_text().splitlines()
    assert [json.loads(row)["samples"] for row in rows] == [8, 16, 24]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_augmented_sample_depends_on_its_number_alone(tree, workers, tmp_path):
    typed = validate(configure(tree, tmp_path, f"data.workers={workers}"))
    data = FolderImages(typed.data, typed.task, 3)
    order = data.order(0)
    together = torch.cat([data.train_batch(order, first, 4)["images"] for first in (0, 4)])
    fresh = FolderImages(typed.data, typed.task, 3)
    later = fresh.train_batch(fresh.order(0), 4, 4)["images"]
    assert together.shape == (8, 3, 32, 32)
    assert torch.equal(together[4:], later)
    assert not torch.equal(together[:4], later)


def test_repeated_augmentation_shows_a_third_of_the_images_three_times():
    order = RepeatedOrder(1000, seed=1, repeats=3)
    indices, _ = order.take(0, 768)  # one pass: 1000 rounded down to a multiple of 256
    assert order.size == 768
    values, counts = indices.unique(return_counts=True)
    assert len(values) == 256
    assert (counts == 3).all()
    again, _ = order.take(768, 768)
    assert not torch.equal(again, indices)
    plain, _ = ShuffledOrder(1000, seed=1).take(0, 256)
    assert set(values.tolist()) == set(plain.tolist())


def test_copies_of_an_image_share_an_update_and_no_device_batch():
    plain = RepeatedOrder(1000, seed=1, repeats=3)
    order = RepeatedOrder(1000, seed=1, repeats=3, block=48, spread=8)
    for first in range(0, 768, 48):
        update, _ = order.take(first, 48)
        # The images of an update are those of the plain order: 16, three times each.
        assert sorted(update.tolist()) == sorted(plain.take(first, 48)[0].tolist())
        for device_batch in update.view(8, 6):
            assert len(device_batch.unique()) == 6
    # GPU r of the recipe takes every eighth sample of its list, from r on.
    assert torch.equal(order.take(6, 6)[0], plain.take(0, 48)[0][1::8])


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_that_share_a_batch_see_what_one_would(tree, workers, tmp_path, monkeypatch):
    # Mixing included: it is a matter of the device batch, which stays the same.
    typed = validate(configure(tree, tmp_path, f"data.workers={workers}"))
    one = Classification(validate(configure(tree, tmp_path)))
    whole = [one.batch(first, 4) for first in range(0, 48, 4)]
    starts = []
    load = reading.load
    monkeypatch.setattr(reading, "load", lambda *a: starts.append(a) or load(*a))
    for rank in (0, 2):
        own = Classification(typed)
        starts.clear()
        for first in range(4 * rank, 48, 12):
            batch = own.batch(first, 4)
            for key in ("images", "labels"):
                assert torch.equal(batch[key], whole[first // 4][key])
        # It learned the distance from two requests and then read ahead without starting anew.
        assert len(starts) == 2


def test_requests_at_equal_distances_are_guessed(monkeypatch):
    requests = reading.Requests()
    assert [requests.guessed(first, 4) for first in (8, 24, 40, 56)] == [False, False, True, True]
    # Another place, as after a resumption, and another size.
    assert [requests.guessed(first, 4) for first in (8, 24, 40)] == [False, False, True]
    assert [requests.guessed(first, 6) for first in (20, 26, 32)] == [False, True, True]
    monkeypatch.setattr(reading.distribution, "world_size", lambda: 4)
    requests = reading.Requests()
    assert [requests.guessed(first, 4) for first in (4, 20, 36)] == [False, True, True]


def test_batches_are_read_ahead_of_the_one_asked_for():
    made = []
    ahead = reading.ReadAhead(lambda first, count: made.append(first) or (first, count))
    assert [ahead(first, 2) for first in (4, 10, 16, 22)] == [(4, 2), (10, 2), (16, 2), (22, 2)]
    assert made.count(22) == 1
    deadline = time.monotonic() + 10
    while 28 not in made and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 28 in made

    def fail(first, count):
        raise RunError(f"cannot read {first}")

    with pytest.raises(RunError, match="cannot read 3"):
        reading.ReadAhead(fail)(3, 1)


def test_images_of_every_kind_are_shown_as_they_are(tmp_path):
    made = made_images.tree(tmp_path / "images")
    typed = validate(configure(made, tmp_path))
    data = FolderImages(typed.data, typed.task, 3)
    batch = data.train_batch(data.order(0), 0, 48)
    assert batch["images"].isfinite().all()
    where = made / "train" / "n01"
    plain = np.asarray(pixels.open_picture(where / "plain.JPEG"), dtype=int)
    assert plain.shape == (48, 60, 3)
    for name in ("grey.JPEG", "cmyk.JPEG", "palette.png", "misnamed.JPEG"):
        assert pixels.open_picture(where / name).mode == "RGB"
    original = np.asarray(made_images.picture(KINDS.index("misnamed")))
    assert np.array_equal(np.asarray(pixels.open_picture(where / "misnamed.JPEG")), original)
    # Rotation by EXIF is ignored, as in every training on ImageNet.
    rotated = np.asarray(pixels.open_picture(where / "rotated.JPEG"), dtype=int)
    original = np.asarray(made_images.picture(KINDS.index("rotated")), dtype=int)
    assert np.abs(rotated - original).mean() < 10


def test_every_operation_of_the_policy_runs_at_its_strongest(tree, tmp_path):
    typed = validate(configure(tree, tmp_path))
    data = FolderImages(typed.data, typed.task, 3)
    policy = next(step for step in data._augment.transforms if hasattr(step, "ops"))
    image = made_images.picture(0)
    for operation in policy.ops:
        operation.prob, operation.magnitude_std = 1, 0
        for level in (0, 5, 10):
            operation.magnitude = level
            assert operation(image).size == image.size
        if operation.name == "PosterizeIncreasing":
            assert operation(image).getextrema() == ((0, 0),) * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_image_that_cannot_be_read_ends_the_run_by_its_name(tree, workers, tmp_path):
    path = tree / "train" / "n03" / "3.JPEG"
    path.write_bytes(path.read_bytes()[:-300])
    config = configure(tree, tmp_path, f"data.workers={workers}")
    with pytest.raises(RunError, match=r"^cannot read image .*n03/3\.JPEG: .*truncated") as caught:
        run(config)
    assert "\n" not in str(caught.value)


def test_validation_images_are_resized_and_cropped_as_the_protocol_says(tree, tmp_path):
    typed = validate(configure(tree, tmp_path))
    data = FolderImages(typed.data, typed.task, 3)
    images, labels = (torch.cat(x) for x in zip(*data.test_batches(4), strict=True))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    with Image.open(tree / "val" / "n01" / "0.JPEG") as image:
        short = int(32 / 0.875)
        width, height = image.size
        scale = short / min(width, height)
        resized = image.convert("RGB").resize(
            (int(width * scale), int(height * scale)), Image.Resampling.BICUBIC
        )
        left, top = (round((side - 32) / 2) for side in resized.size)
        expected = np.asarray(resized.crop((left, top, left + 32, top + 32)), dtype=np.float32)
    mean = np.array(typed.data.mean, dtype=np.float32)
    std = np.array(typed.data.std, dtype=np.float32)
    expected = (expected / 255 - mean) / std
    difference = np.abs(images[0].permute(1, 2, 0).numpy() - expected)
    assert difference.max() < 0.05


def test_broken_trees_are_one_line(tree, tmp_path):
    with pytest.raises(RunError, match=r"3 class folders, model.num_classes is 1000"):
        run(configure(tree, tmp_path, "model.num_classes=1000"))
    with pytest.raises(RunError, match=r"has no val/, nor 3 class folders; it has"):
        run(configure(tmp_path, tmp_path))
    (tree / "train" / "n02" / "0.JPEG").write_bytes(b"not a picture")
    with pytest.raises(RunError, match=r"cannot read image .*n02/0\.JPEG") as caught:
        run(configure(tree, tmp_path))
    assert "\n" not in str(caught.value)


LOADING = """
import sys, time
import torch
from moh.data.reading import load
from moh.errors import StoppedError
from moh.signals import stop_at_once

class Slow(torch.utils.data.Dataset):
    def __getitem__(self, key):
        time.sleep(0.1)
        return torch.zeros(1)

try:
    with stop_at_once("evaluation"):
        for batch in load(Slow(), [[(0,)]] * 1000, 2):
            print("loading", flush=True)
except StoppedError as error:
    print(error, file=sys.stderr)
    sys.exit(error.EXIT_STATUS)
"""


def test_a_signal_to_the_whole_group_ends_loaders_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "loading\n"
        os.killpg(process.pid, signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75
    assert told == "evaluation: stopped by SIGTERM; the same command goes on\n"
