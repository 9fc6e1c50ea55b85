"""Accuracy on ImageNet-like data: every form of the same images, every process, honest records."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_run import folder_of

from moh import distribution
from moh.backbones.build import build_model
from moh.backbones.published.vit import to_published
from moh.cli import compose_config
from moh.config import ImagesConfig
from moh.data import imagenet
from moh.data.labelled import Images
from moh.data.readers import READERS
from moh.data.validation_images import ValidationImages
from moh.errors import RunError
from moh.reporting.records import load_records
from moh.runner import run, run_id
from moh.validation import validate

CLASSES = ("n01440764", "n01443537", "n01484850")  # the first three of ImageNet-1k
PER_CLASS = 5

SMALL = [
    "data.workers=0",
    "data.size=32",
    "model.img_size=32",
    "model.num_classes=3",
    "model.name=transnext_micro",
    "+model.args.embed_dims=[24,48]",
    "+model.args.num_heads=[3,6]",
    "+model.args.depths=[1,1]",
    "+model.args.mlp_ratios=[2,2]",
    "+model.args.sr_ratios=[2,1]",
    "heads.layers=[1,1]",
    "heads.num_shared=[3,2]",
    "heads.top_k=[0,2]",
    "eval.batch=4",
]


@dataclass
class Lies:
    """The same images in every form."""

    folder: Path
    tar: Path
    webdataset: Path
    datasets: Path
    saved: Path


@pytest.fixture(scope="module")
def lies(tmp_path_factory) -> Lies:
    """Five JPEGs of each of three classes: a tree, an archive, shards, parquet, saved tables."""
    import datasets

    top = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    rows = []
    for label, name in enumerate(CLASSES):
        folder = top / "folder" / "val" / name
        folder.mkdir(parents=True)
        for i in range(PER_CLASS):
            small = draw.integers(0, 256, (6, 7, 3), dtype=np.uint8)
            image = Image.fromarray(small).resize((50 + 9 * i, 44), Image.Resampling.BICUBIC)
            image = image.convert("L") if i == 1 else image
            path = folder / f"ILSVRC2012_val_{label}{i}.JPEG"
            image.save(path)
            rows.append((label, name, path))
    with tarfile.open(top / "val.tar", "w") as archive:
        for _, name, path in rows:
            archive.add(path, f"{name}/{path.name}")
    (top / "shards").mkdir()
    for shard in range(2):
        with tarfile.open(
            top / "shards" / f"imagenet1k-validation-{shard:02d}.tar", "w"
        ) as archive:
            for label, name, path in rows[shard::2]:
                archive.add(path, f"{name}/{path.stem}.jpg")
                content = str(label).encode()
                member = tarfile.TarInfo(f"{name}/{path.stem}.cls")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    table = datasets.Dataset.from_list(
        [{"image": {"bytes": p.read_bytes(), "path": p.name}, "label": k} for k, _, p in rows],
        features=features,
    )
    (top / "parquet" / "data").mkdir(parents=True)
    table.to_parquet(top / "parquet" / "data" / "validation-00000-of-00001.parquet")
    (top / "parquet" / "data" / "train-00000-of-00001.parquet").write_bytes(b"never opened")
    datasets.DatasetDict({"validation": table}).save_to_disk(top / "saved")
    return Lies(top / "folder", top / "val.tar", top / "shards", top / "parquet", top / "saved")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def configure(root: Path, folder: Path, *more: str):
    return compose_config(
        [
            "experiment=vit/moh_b_75",
            f"data.root={root}",
            *SMALL,
            "mode=eval",
            f"runs_dir={folder}/runs",
            f"results_dir={folder}/results",
            "logger.progress=false",
            "logger.wandb=disabled",
            *more,
        ]
    )


def images(root: Path, form: str = "folder", workers: int = 0) -> ValidationImages:
    """The validation images at a place, for a model of three classes at 32 pixels."""
    config = ImagesConfig(
        name="imagenet-1k",
        root=str(root),
        size=32,
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
        form=form,
        workers=workers,
    )
    return ValidationImages(config, 3)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A file of the authors' form for the small model."""
    typed = validate(configure(Path(), Path()), paths=False)
    model = build_model(typed.model, typed.heads, seed=3)
    with torch.no_grad():
        model.head.weight.mul_(20)  # or every image would be of one class
    path = tmp_path_factory.mktemp("weights") / "moh.pth"
    torch.save({"model": to_published(model.state_dict()), "epoch": 299}, path)
    return path


def record_of(config) -> tuple[dict, dict]:
    folder = Path(config.results_dir) / "runs" / run_id(config)
    read = (json.loads((folder / name).read_text()) for name in ("run.json", "metrics.json"))
    run_json, metrics = read
    return run_json, metrics["metrics"]


def test_one_command_scores_the_authors_file_with_nothing_but_validation_images(
    lies, published, tmp_path
):
    config = configure(lies.folder, tmp_path, f"checkpoint={published}")
    run(config)
    record, metrics = record_of(config)
    assert record["status"] == "evaluated"
    assert record["name"] == "vit/moh_b_75-eval"
    assert record["checkpoint"]["path"] == str(published)
    assert len(record["checkpoint"]["sha256"]) == 64
    assert "share" not in record
    assert record["data"]["train_images"] == 0
    assert record["data"]["test_images_per_class"] == "5"
    assert metrics["top1"]["n"] == 15
    assert 0 < metrics["top1"]["value"] < 100
    assert metrics["top1"]["protocol"] == (
        "imagenet-1k, 15 test images, short side resized to 36 bicubic, center crop 32, "
        "mean 0.485 0.456 0.406, std 0.229 0.224 0.225, fp32"
    )
    # Counted by hand from the same images.
    typed = validate(config)
    model = build_model(typed.model, typed.heads).eval()
    from moh.weights import locate

    locate(published).load_into(model, "timm", ema=True)
    data = ValidationImages(typed.data, 3)
    with torch.no_grad():
        hits = [(model(x).argmax(-1) == y).sum().item() for x, y in data.test_batches(4)]
    assert metrics["top1"]["value"] == pytest.approx(100 * sum(hits) / 15)


def test_weights_that_do_not_fit_leave_nothing(lies, published, tmp_path):
    other = configure(lies.folder, tmp_path, f"checkpoint={published}", "heads.num_shared=[3,3]")
    with pytest.raises(RunError, match=r"does not fit the model; .*router\.routed") as caught:
        run(other)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_given_weights_never_stand_for_a_training(lies, published, tmp_path):
    config = configure(lies.folder, tmp_path, f"checkpoint={published}")
    run(config)
    records = load_records(tmp_path / "results")
    assert not records.problems
    assert records.of("vit/moh_b_75") == []
    assert [r.get("status") for r in records.of("vit/moh_b_75-eval")] == ["evaluated"]
    # Another file is another record, the same file in another place is not.
    copy = tmp_path / "copy.pth"
    shutil.copyfile(published, copy)
    assert run_id(configure(lies.folder, tmp_path, f"checkpoint={copy}")) == run_id(config)
    state = torch.load(copy)
    state["model"]["head.bias"][0] += 1
    torch.save(state, copy)
    assert run_id(configure(lies.folder, tmp_path, f"checkpoint={copy}")) != run_id(config)


def test_an_experiment_for_published_weights_records_under_its_own_name(lies, published, tmp_path):
    named = compose_config(
        [
            "experiment=vit/published_moh_b_75",
            f"data.root={lies.folder}",
            *SMALL,
            f"runs_dir={tmp_path}/runs",
            f"results_dir={tmp_path}/results",
            "logger.progress=false",
            "logger.wandb=disabled",
            f"checkpoint={published}",
        ]
    )
    run(named)
    assert record_of(named)[0]["name"] == "vit/published_moh_b_75"


@pytest.mark.parametrize("form", ["tar", "webdataset", "datasets", "saved"])
def test_every_form_holds_the_same_images(form, lies):
    def read(form: str, root: Path) -> dict[bytes, int]:
        data = images(root, form)
        assert data.class_names[:3] in (CLASSES, ("0", "1", "2"))
        assert data.num_test == 15
        pairs = [
            (image.numpy().tobytes(), int(label))
            for batch, labels in data.test_batches(4)
            for image, label in zip(batch, labels, strict=True)
        ]
        return dict(pairs)

    root = getattr(lies, form)
    assert read("datasets" if form == "saved" else form, root) == read("folder", lies.folder)


@pytest.mark.slow
def test_two_processes_count_each_image_once_and_score_alike(lies, published, tmp_path):
    scores = []
    for processes in (1, 2):
        config = configure(
            lies.folder,
            tmp_path / str(processes),
            f"checkpoint={published}",
            f"launcher.processes={processes}",
            "trainer.threads=1",
        )
        run(config)
        record, metrics = record_of(config)
        assert record["processes"] == processes
        folder = Path(config.results_dir) / "runs" / run_id(config)
        scores.append((metrics, json.loads((folder / "head_load.json").read_text())))
    assert scores[0] == scores[1]
    assert scores[1][0]["top1"]["n"] == 15


def test_batches_are_the_same_and_shared_out_whole(lies, monkeypatch):
    data = images(lies.folder)

    def batches(rank: int, size: int) -> list[bytes]:
        monkeypatch.setattr(distribution, "rank", lambda: rank)
        monkeypatch.setattr(distribution, "world_size", lambda: size)
        return [batch.numpy().tobytes() for batch, _ in data.test_batches(4)]

    alone = sorted(batches(0, 1))
    for processes in (2, 3, 5):
        shares = [batches(rank, processes) for rank in range(processes)]
        assert sorted(part for share in shares for part in share) == alone


def test_half_precision_is_said_beside_the_score(lies, published, tmp_path):
    config = configure(
        lies.folder,
        tmp_path,
        f"checkpoint={published}",
        "eval.precision=bf16",
        "eval.head_load=false",
    )
    run(config)
    metrics = record_of(config)[1]
    assert metrics["top1"]["marks"] == ["bf16 autocast"]
    assert metrics["top1"]["protocol"].endswith("bf16")
    assert not (folder_of(config) / "head_load.json").exists()


# What timm's pretrained_cfg of these says: 160 pixels, crop 0.95.
@pytest.mark.parametrize(("model", "how"), [("test_vit", "bicubic"), ("test_resnet", "bilinear")])
def test_any_timm_model_is_scored_as_its_own_weights_want(model, how, lies, tmp_path):
    import timm

    weights = timm.create_model(model, num_classes=3).state_dict()
    torch.save({"state_dict": weights}, tmp_path / "weights.pth")
    config = compose_config(
        [
            "experiment=vit/timm",
            f"model.name={model}",
            "model.num_classes=3",
            f"checkpoint={tmp_path}/weights.pth",
            f"data.root={lies.folder}/val",  # the folder of classes itself
            "data.workers=0",
            f"runs_dir={tmp_path}/runs",
            f"results_dir={tmp_path}/results",
            "logger.progress=false",
            "logger.wandb=disabled",
        ]
    )
    run(config)
    record, metrics = record_of(config)
    assert record["name"] == "vit/timm"
    assert record["model"] == model
    wanted = f"short side resized to 168 {how}, center crop 160, mean 0.5 0.5 0.5, std 0.5 0.5 0.5"
    assert wanted in metrics["top1"]["protocol"]


def test_pretrained_weights_that_cannot_be_had_are_one_line(lies, tmp_path):
    config = compose_config(
        [
            "experiment=vit/timm",
            "model.name=test_vit",
            f"data.root={lies.folder}",
            f"runs_dir={tmp_path}/runs",
            f"results_dir={tmp_path}/results",
        ]
    )
    config.data.name = "three classes"
    config.data.workers = 0
    with pytest.raises(RunError, match=r"3 class folders, model.num_classes is 1000"):
        run(config)
    typed = validate(config)
    with pytest.raises(
        RunError, match=r"no pretrained weights of test_vit: .*checkpoint="
    ) as caught:
        build_model(typed.model, typed.heads)
    assert "\n" not in str(caught.value)


def broken(root: Path, how: str) -> Path:
    """A copy of the tree, broken."""
    val = root / "val"
    if how == "flat":
        for path in sorted(val.glob("*/*")):
            path.rename(val / path.name)
        for path in val.iterdir():
            if path.is_dir():
                path.rmdir()
    elif how == "two classes":
        shutil.rmtree(val / CLASSES[1])
    elif how == "no val":
        val.rename(root / "train")
    elif how == "empty class":
        for path in (val / CLASSES[1]).iterdir():
            path.unlink()
    elif how == "corrupt":
        path = sorted((val / CLASSES[1]).iterdir())[2]
        path.write_bytes(path.read_bytes()[:200])
    return root


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("flat", r"val: 15 images and no class folders; torchvision\.datasets\.ImageNet"),
        ("two classes", r"val has 2 class folders, model\.num_classes is 3"),
        ("no val", r"has no val/, nor 3 class folders; it has 1 folders: train"),
        ("empty class", r"cannot read images in .*n01443537"),
        ("corrupt", r"cannot read image .*n01443537/ILSVRC2012_val_12\.JPEG: "),
    ],
)
def test_a_broken_tree_is_one_line(how, message, lies, tmp_path):
    shutil.copytree(lies.folder, tmp_path / "tree")
    root = broken(tmp_path / "tree", how)
    with pytest.raises(RunError, match=message) as caught:
        list(images(root, workers=int(how == "corrupt")).test_batches(4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        ("tar", "cut", "cannot read image|cannot read archives"),
        ("tar", "nothing", "holds no .tar archive"),
        ("webdataset", "cut", "cannot read shard|cannot read image"),
        ("webdataset", "label", r"labels reach 7, but model\.num_classes is 3 \(0\.\.2\)"),
        ("webdataset", "no label", "neither .cls nor a label"),
        ("datasets", "cut", "cannot read data set"),
        ("datasets", "nothing", "holds no .parquet file"),
    ],
)
def test_broken_archives_are_one_line(form, damage, message, lies, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    name = {"datasets": "validation-0.parquet"}.get(form, "val-0.tar")
    if damage == "cut":
        source = {
            "tar": lies.tar,
            "webdataset": sorted(lies.webdataset.iterdir())[0],
            "datasets": next(lies.datasets.rglob("validation*.parquet")),
        }[form]
        whole = source.read_bytes()
        (root / name).write_bytes(whole[: len(whole) // 2])
    elif damage != "nothing":
        with tarfile.open(root / name, "w") as archive:
            picture = sorted(lies.folder.rglob("*.JPEG"))[0].read_bytes()
            files = {"a.jpg": picture} | ({"a.cls": b"7"} if damage == "label" else {})
            for file, content in files.items():
                member = tarfile.TarInfo(file)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    with pytest.raises(RunError, match=message) as caught:
        list(images(root, form).test_batches(4))
    assert "\n" not in str(caught.value)


class Named(Images):
    """Images of which only the classes matter."""

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self.class_names, self.labels = class_names, range(len(class_names))

    def name(self, index: int) -> str:
        return str(index)

    def open(self, index: int):
        raise NotImplementedError


def test_only_imagenets_classes_in_its_order_are_called_imagenet():
    from timm.data import ImageNetInfo

    synsets, info = imagenet.synsets(), ImageNetInfo("imagenet-1k")
    words = tuple(info.index_to_description(i) for i in range(1000))

    def check(names: tuple[str, ...]) -> tuple[str, ...]:
        return imagenet.check_classes(Named(names), "imagenet-1k", 1000, "val")

    assert synsets[:3] == CLASSES
    assert len(set(synsets)) == 1000
    assert list(synsets) == sorted(synsets)
    for names in (synsets, words, tuple(str(i) for i in range(1000))):
        assert check(names) == names
    with pytest.raises(RunError, match=r"998 classes, .*1000; missing: n01440764, n01484850$"):
        check((synsets[1], *synsets[3:]))
    with pytest.raises(RunError, match=r"class 0 is .*ImageNet's is n01440764 \(tench\)"):
        check(tuple(sorted(words)))
    with pytest.raises(RunError, match=r"class 0 is .* in their order"):
        check(synsets[::-1])
    assert imagenet.marks("imagenet-1k", 1000, 49_999) == ["49,999 of 50,000 images"]
    assert imagenet.marks("imagenet-1k", 1000, 50_000) == []


def test_folders_that_are_numbers_count_as_numbers(lies, tmp_path):
    for label in range(12):
        target = tmp_path / "val" / str(label)
        target.mkdir(parents=True)
        shutil.copyfile(sorted(lies.folder.rglob("*.JPEG"))[0], target / f"{label}.JPEG")
    reader = READERS["folder"](tmp_path / "val")
    assert [Path(reader.name(i)).stem for i in range(12)] == [str(label) for label in reader.labels]
