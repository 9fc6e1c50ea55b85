"""Data that do not fit the model or the task are one line, before any training."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from image_forms import lay_out, write_tar
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import save_file
from tiny_runs import folder_of, tiny

from moh.config import ImagesConfig
from moh.data.latents import METADATA, CachedLatents, LatentIndex, payload_sha256, shard_path
from moh.data.readers import READERS
from moh.data.validation_images import ValidationImages
from moh.errors import RunError
from moh.runner import run
from moh.training.loop import Trainer
from moh.worker import build_task


def good(classes: int = 10, size: int = 28) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "train_images": draw.integers(0, 256, (40, size, size), dtype=np.uint8),
        "train_labels": np.arange(40) % classes,
        "test_images": draw.integers(0, 256, (20, size, size), dtype=np.uint8),
        "test_labels": np.arange(20) % classes,
    }


def changed(**arrays) -> dict[str, np.ndarray]:
    return good() | arrays


G = good()
REPEATED = np.repeat(G["train_images"][..., None], 4, axis=-1)
FAULTS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "more classes": (good(11), r"train_labels: labels reach 10, but model\.num_classes is 10 \(0"),
    "fewer classes": (good(9), r"train_labels: no image has label 9, but model\.num_classes is 10"),
    "a class absent": (
        changed(train_labels=np.where(G["train_labels"] == 4, 3, G["train_labels"])),
        r"train_labels: no image has label 4, ",
    ),
    "in the test split": (
        changed(test_labels=G["test_labels"] + 1),
        r"test_labels: labels reach 10, ",
    ),
    "negative": (changed(train_labels=G["train_labels"] - 1), r"train_labels: a label is -1, "),
    "negative in test": (changed(test_labels=G["test_labels"] - 2), r"test_labels: a label is -2"),
    "one-hot": (changed(train_labels=np.eye(10)[G["train_labels"]]), r"not one-hot"),
    "one-hot integers": (
        changed(test_labels=np.eye(10, dtype=int)[G["test_labels"]]),
        r"test_labels are int64 \(20, 10\).*not one-hot",
    ),
    "a column": (changed(train_labels=G["train_labels"][:, None]), r"train_labels are int64 \(40,"),
    "float labels": (changed(train_labels=G["train_labels"] + 0.5), r"train_labels are float64"),
    "truth values": (changed(test_labels=G["test_labels"] > 4), r"test_labels are bool"),
    "float images": (
        changed(train_images=G["train_images"] / np.float32(255)),
        r"train_images are float32; they must be uint8",
    ),
    "deep images": (
        changed(test_images=G["test_images"].astype(np.uint16)),
        r"test_images are uint16; they must be uint8",
    ),
    "four channels": (
        changed(train_images=REPEATED),
        r"train_images have 4 channels .*data\.channels is 1",
    ),
    "three channels": (
        changed(train_images=REPEATED[..., :3]),
        r"train_images have 3 channels .*data\.channels is 1",
    ),
    "channels first": (
        changed(test_images=np.zeros((20, 1, 28, 28), np.uint8)),
        r"test_images have 28 channels .*, last$",
    ),
    "not square": (changed(train_images=G["train_images"][:, :20]), r"are 28x20; .* square"),
    "not square in test": (changed(test_images=G["test_images"][:, :, :20]), r"are 20x28; "),
    "rows": (changed(train_images=G["train_images"].reshape(40, -1)), r"have shape \(40, 784\)"),
    "fewer labels": (changed(train_labels=G["train_labels"][:-1]), r"are 39, the images 40$"),
    "fewer test images": (changed(test_images=G["test_images"][1:]), r"are 20, the images 19$"),
    "no training": (
        changed(train_images=G["train_images"][:0], train_labels=G["train_labels"][:0]),
        r"train_images are empty",
    ),
    "no test": (
        changed(test_images=G["test_images"][:0], test_labels=G["test_labels"][:0]),
        r"test_images are empty",
    ),
    "a key missing": (
        {key: value for key, value in G.items() if key != "test_labels"},
        r"is not an image set: .*\(test_labels missing\)$",
    ),
    "objects": (
        changed(train_labels=G["train_labels"].astype(object)),
        r"train_labels holds Python objects, which are not read",
    ),
    "objects as names": (
        changed(class_names=np.array(["a"] * 10, dtype=object)),
        r"class_names holds Python objects",
    ),
    "nine names": (changed(class_names=np.array(list("abcdefghi"))), r"class_names are 9, but"),
    "a name twice": (changed(class_names=np.array(list("abcdefghia"))), r"have 'a' more than once"),
    "names that are numbers": (changed(class_names=np.arange(10)), r"class_names are int64"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    top = tmp_path_factory.mktemp("commands")
    return {family: tiny(family, top) for family in ("vit", "dit")}


def task_of(config, root: Path, **model):
    config = config.copy()
    config.data.root = str(root)
    config.model.update(model)
    task = build_task(OmegaConf.to_object(config))
    task.fingerprint()  # which a run takes before it trains
    return task


@pytest.mark.parametrize("family", ["vit", "dit"])
@pytest.mark.parametrize("fault", FAULTS)
def test_arrays_that_do_not_fit_are_one_line(fault, family, commands, tmp_path):
    arrays, message = FAULTS[fault]
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(RunError, match=message) as caught:
        task_of(commands[family], tmp_path / "x.npz")
    assert "\n" not in str(caught.value)
    assert f"data.root={tmp_path}/x.npz" in str(caught.value)


@pytest.mark.parametrize("family", ["vit", "dit"])
def test_a_model_of_too_few_classes_leaves_nothing(family, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "fit", lambda self: pytest.fail("it trained"))
    with pytest.raises(RunError, match=r"labels reach 9, but model\.num_classes is 9 \(0\.\.8\)"):
        run(tiny(family, tmp_path, "model.num_classes=9"))
    assert not (tmp_path / "results").exists()
    assert not list((tmp_path / "runs").glob("demo*"))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64])
def test_whole_numbers_of_any_type_and_sizes_of_any_kind_are_taken(kind, commands, tmp_path):
    arrays = good() | {
        "train_labels": G["train_labels"].astype(kind),
        "train_images": good(size=20)["train_images"][..., None],
    }
    np.savez(tmp_path / "x.npz", **arrays)
    data = task_of(commands["vit"], tmp_path / "x.npz").data
    assert data.train.shape == (40, 1, 28, 28)
    assert data.train_labels.tolist() == G["train_labels"].tolist()
    # The test images, of which an accuracy is, are as they were.
    assert data.preparation == "28 px"
    np.savez(tmp_path / "y.npz", **good(size=20))
    resized = task_of(commands["vit"], tmp_path / "y.npz").data
    assert resized.preparation == "20 px resized to 28 px bilinear"


def test_class_names_come_with_the_data(commands, tmp_path):
    names = [f"kind {letter}" for letter in "jihgfedcba"]
    np.savez(tmp_path / "named.npz", **changed(class_names=np.array(names)))
    np.savez(tmp_path / "plain.npz", **G)
    for family, config in commands.items():
        named = task_of(config, tmp_path / "named.npz")
        assert list(named.class_names) == names, family
        assert list(named.classes) == names
        plain = task_of(config, tmp_path / "plain.npz")
        assert list(plain.class_names) == [str(i) for i in range(10)]
        assert plain.classes is None
        embedded = build_task(OmegaConf.to_object(config))
        assert embedded.class_names[0] == "T-shirt"


def test_arrays_of_pixels_are_no_latents(tmp_path):
    with pytest.raises(RunError, match=r"task\.latent=true: data\.form=npz holds pixels"):
        run(tiny("dit", tmp_path, "task.latent=true", "mode=train"))


LATENT = ImagesConfig(name="own", form="latents", size=2, channels=4)
LATENT.mean, LATENT.std = [0.0] * 4, [1.0] * 4


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2], r"labels reach 2, but model\.num_classes is 2 \(0\.\.1\)"),
        ([0, 1, -1], r"a label is -1, "),
        ([0, 0, 0], r"no image has label 1, "),
        (np.array([0, 1, 1], np.float32), r"labels are float32 \(3,\), not int64"),
        (np.array([[0, 1], [1, 0], [0, 1]]), r"labels are int64 \(3, 2\), not int64 \(n,\)"),
    ],
)
def test_labels_of_cached_latents_are_checked(labels, message, tmp_path):
    index = LatentIndex(
        *(["a", "b"], 3, "0" * 64, 16, [4, 2, 2], "vae", "0" * 64, 1.0, 0.0, "fp32", "float32", 8)
    )
    (tmp_path / "index.json").write_text(json.dumps(dataclasses.asdict(index)))
    labels, moments = np.asarray(labels), np.zeros((3, 2, 2, 4, 2, 2), np.float32)
    about = {"index": index.fingerprint, "shard": 0, "skipped": {}}
    about["sha256"] = payload_sha256(moments, labels)
    parts = {"moments": moments, "labels": labels}
    save_file(parts, shard_path(tmp_path, 0), {METADATA: json.dumps(about)})
    with pytest.raises(RunError, match=message) as caught:
        CachedLatents(dataclasses.replace(LATENT, root=str(tmp_path)), 2)
    assert "\n" not in str(caught.value)


def picture() -> bytes:
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "PNG")
    return content.getvalue()


def column(kind: str):
    import datasets

    return {
        "no rows": ([], datasets.Value("int64")),
        "strings": (["cat", "dog"], datasets.Value("string")),
        "floats": ([0.0, 1.0], datasets.Value("float32")),
        "absent": ([0, None], datasets.Value("int64")),
        "lists": ([[0], [1]], datasets.List(datasets.Value("int64"))),
        "unknown": ([0, -1], datasets.Value("int64")),
        "too many": ([0, 2], datasets.Value("int64")),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no rows", r"holds no row"),
        ("strings", r"column label holds string, not one whole number an image"),
        ("floats", r"column label holds float, not one"),
        ("absent", r"column label is empty in 1 rows"),
        ("lists", r"column label holds list.*, not one"),
        ("unknown", r"a label is -1, "),
        ("too many", r"labels reach 2, but"),
    ],
)
def test_labels_of_a_table_are_checked(kind, message, tmp_path):
    import datasets

    labels, feature = column(kind)
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    rows = {"image": [{"bytes": picture(), "path": None}] * len(labels), "label": labels}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"validation": table}).save_to_disk(tmp_path / "saved")
    with pytest.raises(RunError, match=message) as caught:
        ValidationImages(data("datasets", tmp_path / "saved"), 2)
    assert "\n" not in str(caught.value)


def data(form: str, root: Path) -> ImagesConfig:
    config = ImagesConfig(name="own", root=str(root), form=form, size=8, workers=0)
    config.mean, config.std = [0.0] * 3, [1.0] * 3
    return config


def test_rows_without_an_image_are_named(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_list([{"image": None, "label": 0}], features=features)
    datasets.DatasetDict({"validation": table}).save_to_disk(tmp_path / "saved")
    with pytest.raises(RunError, match=r"cannot read image .*row 0: the row has none"):
        READERS["datasets"](tmp_path / "saved").image(0)
    table = datasets.Dataset.from_dict({"image": [3, 4], "label": [0, 1]})
    datasets.DatasetDict({"validation": table}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(RunError, match=r"column image holds .*, not image files"):
        READERS["datasets"](tmp_path / "numbers")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.png": picture(), "a.json": b'{"label": 0.7}'}, r"label in a\.json is 0\.7, not a"),
        ({"a.png": picture(), "a.json": b'{"label": null}'}, r"label in a\.json is None, not a"),
        ({"a.png": picture(), "a.json": b'["label"]'}, r"a has neither \.cls nor a label"),
        ({"a.png": picture(), "a.cls": b"cat"}, r"cannot read shard .*'cat'"),
        ({"a.png": picture(), "a.jpg": picture(), "a.cls": b"0"}, r"two images of key a$"),
        ({"a.png": picture(), "a.cls": b"-1"}, r"a label is -1, "),
        ({"a.cls": b"0"}, r"has no image with a class"),
    ],
)
def test_labels_of_shards_are_checked(members, message, tmp_path):
    root = write_tar(tmp_path / "val.tar", members)
    with pytest.raises(RunError, match=message) as caught:
        ValidationImages(data("webdataset", root), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["folder", "tar", "datasets"])
@pytest.mark.parametrize("classes", [1, 3])
def test_another_number_of_classes_is_refused_in_every_form(classes, form, tmp_path):
    files = {f"c{label}": {f"{label}.png": picture()} for label in range(classes)}
    root = lay_out(form, tmp_path / "val", files)
    with pytest.raises(RunError, match=r"classes, model|class folders") as caught:
        ValidationImages(data(form, root), 2)
    assert "num_classes is 2" in str(caught.value) or "nor 2 class folders" in str(caught.value)


def test_the_names_reach_the_record(tmp_path):
    names = [f"kind {letter}" for letter in "jihgfedcba"]
    np.savez(tmp_path / "named.npz", **changed(class_names=np.array(names)))
    config = tiny("vit", tmp_path, f"data.root={tmp_path}/named.npz")
    run(config)
    load = json.loads((folder_of(config) / "head_load.json").read_text())
    assert list(load["groups"]) == names
