"""Images in folders: the paper's augmentation, its order, and broken trees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_run import folder_of, weights

from moh.cli import compose_config
from moh.data.folder import FolderImages, RepeatedOrder
from moh.data.order import ShuffledOrder
from moh.errors import RunError
from moh.runner import run
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
            "trainer.checkpoint_every=8",
            "trainer.precision=fp32",
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

    def stopping(self, logged):
        if self.samples == 16 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return update(self, logged)

    stopped: list[bool] = []
    Trainer._update = stopping
    try:
        with pytest.raises(KeyboardInterrupt):
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
