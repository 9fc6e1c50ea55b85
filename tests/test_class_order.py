"""One order of classes in every form, and the weights' own list of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import script_runs
import torch
from image_forms import FORMS, lay_out, tar_of, write_tar
from made_images import small_vae
from PIL import Image
from tiny_runs import folder_of, tiny
from torchvision.datasets import ImageFolder

from moh.config import ImagesConfig
from moh.data.encoding import EncodedFolder
from moh.data.latents import LatentIndex
from moh.data.readers import READERS
from moh.data.validation_images import ValidationImages
from moh.errors import RunError
from moh.runner import run, run_id
from moh.tasks.classification import Classification
from moh.training.loop import Trainer
from moh.validation import validate

NAMES = {
    "counted": ("kind1", "kind10", "kind2"),
    "capitals": ("B", "C", "a"),
    "numbers": tuple(str(i) for i in range(12)),
    "padded": ("01", "1", "10", "2"),
    "synsets": ("n01440764", "n01443537", "n02123045"),
}


def grey(value: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (8, 8), value).save(content, "PNG")
    return content.getvalue()


def files_of(names: tuple[str, ...]) -> dict[str, dict[str, bytes]]:
    """Two images a class; what they show is the class's place in ``names``."""
    return {
        name: {f"{name}-{i}.png": grey(10 * label + 1) for i in ("10", "9")}
        for label, name in enumerate(names)
    }


def images(root: Path, form: str, num_classes: int) -> ValidationImages:
    config = ImagesConfig(name="own", root=str(root), form=form, size=8, workers=0)
    config.mean, config.std = [0.0] * 3, [1.0] * 3
    return ValidationImages(config, num_classes)


def in_tars(how: str, root: Path, names: tuple[str, ...]) -> Path:
    """The same images in archives, the classes in any order."""
    files = dict(reversed(files_of(names).items()))
    if how == "one a class":
        for name, own in files.items():
            write_tar(root / f"{name}.tar", own)
        return root
    if how == "in an archive":
        return write_tar(root / "a.tar", {f"{n}.tar": tar_of(own) for n, own in files.items()})
    top = {"plain": "", "dotted": "./", "below": "data/val/"}[how]
    return write_tar(
        root / "a.tar", {f"{top}{n}/{f}": c for n, own in files.items() for f, c in own.items()}
    )


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("how", ["plain", "dotted", "below", "one a class", "in an archive"])
def test_folders_and_archives_number_the_same_classes_alike(how, kind, tmp_path):
    names = NAMES[kind]
    folder = lay_out("folder", tmp_path / "folder", dict(reversed(files_of(names).items())))
    (tmp_path / "tar").mkdir()
    one = images(folder, "folder", len(names))
    other = images(in_tars(how, tmp_path / "tar", names), "tar", len(names))
    for data in (one, other):
        assert data.class_names == names
        for batch, labels in data.test_batches(4):
            assert torch.equal((255 * batch[:, 0, 0, 0]).round().long() // 10, labels)
    assert one.fingerprint == other.fingerprint
    if kind != "numbers":
        assert names == tuple(ImageFolder(str(folder)).classes)


def test_latents_number_classes_as_images_do(tmp_path):
    names = NAMES["numbers"]
    lay_out("folder", tmp_path / "images" / "train", files_of(names))
    vae = small_vae(tmp_path / "vae")
    script_runs.finish(
        "cache_latents",
        *(tmp_path / "images", tmp_path / "out", "--vae", vae, "--size", 8),
        *("--workers", 0, "--device", "cpu"),
    )
    assert tuple(LatentIndex.read(tmp_path / "out").classes) == names
    config = ImagesConfig(name="own", root=str(tmp_path / "images"), form="folder_vae", size=4)
    config.channels, config.mean, config.std, config.vae = 4, [0.0] * 4, [1.0] * 4, str(vae)
    assert EncodedFolder(config, len(names)).class_names == names


def test_subfolders_of_some_classes_are_no_classes(tmp_path):
    files = {"a/x.png": grey(0), "b/deep/y.png": grey(1)}
    with pytest.raises(RunError, match=r"a/x\.png and b/deep/y\.png lie at different depths"):
        READERS["tar"](write_tar(tmp_path / "a.tar", files))
    with pytest.raises(RunError, match=r"x\.png lies in no class folder"):
        READERS["tar"](write_tar(tmp_path / "b.tar", {"x.png": grey(0)}))


def arrays(root: Path, names: tuple[str, ...] | None, shift: int = 0, seed: int = 0) -> Path:
    """An ``.npz`` of three classes of noise, told apart by brightness; labels shifted."""
    draw = np.random.default_rng(seed)
    parts = {}
    for split, count in (("train", 96), ("test", 48)):
        kinds = np.arange(count) % 3
        noise = draw.integers(0, 40, (count, 28, 28))
        parts[f"{split}_images"] = (noise + 90 * kinds[:, None, None]).astype(np.uint8)
        parts[f"{split}_labels"] = (kinds + shift) % 3
    if names:
        parts["class_names"] = np.array(names)
    root.parent.mkdir(parents=True, exist_ok=True)
    np.savez(root, **parts)
    return root


# Kind i of the second file is called as in the first one, and its label is another.
DARK_FIRST = ("dark", "grey", "light")
LIGHT_FIRST = ("light", "dark", "grey")
THREE = ["model.num_classes=3", "trainer.ema_decay=null", "eval.similarity_samples=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    top = tmp_path_factory.mktemp("trained")
    root = arrays(top / "own.npz", DARK_FIRST)
    config = tiny(
        *("vit", top, f"data.root={root}", *THREE, "trainer.samples=960", "optim.lr=0.01")
    )
    run(config)
    return config


def outcome(config) -> tuple[dict, dict, dict]:
    folder = folder_of(config)
    return tuple(
        json.loads((folder / f"{name}.json").read_text())
        for name in ("run", "metrics", "head_load")
    )


def test_a_run_records_its_classes_and_shows_their_names(trained):
    record, metrics, load = outcome(trained)
    assert record["classes"] == list(DARK_FIRST)
    assert list(load["groups"]) == list(DARK_FIRST)
    assert metrics["metrics"]["top1"]["value"] > 90
    assert metrics["metrics"]["top1"]["marks"] == []


def evaluated(trained, folder: Path, root: Path, *more: str):
    config = tiny(
        *("vit", folder, *THREE, "mode=eval", f"checkpoint={folder_of(trained)}"),
        *(f"data.root={root}", *more),
    )
    run(config)
    return config


def test_data_in_another_order_are_matched_by_name(trained, tmp_path, capsys):
    root = arrays(tmp_path / "other.npz", LIGHT_FIRST, shift=1)
    capsys.readouterr()
    record, metrics, load = outcome(evaluated(trained, tmp_path, root))
    assert capsys.readouterr().out.count("matched by name") >= 1
    top1 = metrics["metrics"]["top1"]
    assert top1["value"] == outcome(trained)[1]["metrics"]["top1"]["value"]
    assert top1["marks"] == ["classes matched by name"]
    assert list(load["groups"]) == list(DARK_FIRST)
    assert load["groups"] == outcome(trained)[2]["groups"]
    assert record["classes"] == list(DARK_FIRST)


def test_data_of_other_classes_are_refused(trained, tmp_path):
    root = arrays(tmp_path / "other.npz", ("dark", "grey", "white"))
    with pytest.raises(RunError, match=r"only in the data: white; .*list: light$") as caught:
        evaluated(trained, tmp_path, root)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "runs").glob("demo*"))


def test_data_without_names_are_taken_as_they_are(trained, tmp_path):
    root = arrays(tmp_path / "other.npz", None)
    _, metrics, load = outcome(evaluated(trained, tmp_path, root))
    assert metrics["metrics"]["top1"]["marks"] == []
    assert metrics["metrics"]["top1"]["value"] > 90
    assert list(load["groups"]) == list(DARK_FIRST)


def test_an_evaluation_of_a_runs_own_weights_keeps_its_classes(trained, tmp_path):
    top = Path(trained.runs_dir).parent
    root = arrays(tmp_path / "other.npz", LIGHT_FIRST, shift=1)
    own = tiny(
        *("vit", top, f"data.root={root}", *THREE, "trainer.samples=960", "optim.lr=0.01"),
        "mode=eval",
    )
    assert run_id(own) == run_id(trained)
    before = outcome(trained)
    run(own)
    record, metrics, _ = outcome(own)
    assert record["classes"] == list(DARK_FIRST)
    assert metrics["metrics"]["top1"]["marks"] == ["classes matched by name"]
    assert metrics["metrics"]["top1"]["value"] == before[1]["metrics"]["top1"]["value"]
    own.data.root = trained.data.root
    run(own)


def test_a_training_does_not_go_on_with_classes_in_another_order(tmp_path, monkeypatch):
    def command(root: Path):
        return tiny("vit", tmp_path, f"data.root={root}", *THREE, "mode=train")

    run(command(arrays(tmp_path / "own.npz", DARK_FIRST)))
    monkeypatch.setattr(Trainer, "fit", lambda self: pytest.fail("it went on"))
    with pytest.raises(RunError, match="classes in another order than the run began with"):
        run(command(arrays(tmp_path / "other.npz", LIGHT_FIRST, shift=1)))
    with pytest.raises(RunError, match=r"only in the data: a; .*list: dark$"):
        run(command(arrays(tmp_path / "third.npz", ("a", "grey", "light"))))


def test_converted_weights_carry_their_classes(trained, tmp_path):
    script_runs.finish("convert_checkpoint", folder_of(trained), tmp_path / "ours")
    root = arrays(tmp_path / "other.npz", LIGHT_FIRST, shift=1)
    metrics = outcome(evaluated(trained, tmp_path, root, f"checkpoint={tmp_path}/ours"))[1]
    assert metrics["metrics"]["top1"]["marks"] == ["classes matched by name"]
    assert metrics["metrics"]["top1"]["value"] > 90
    script_runs.finish("convert_checkpoint", tmp_path / "ours", tmp_path / "again")
    assert (tmp_path / "again" / "classes.json").is_file()


@pytest.mark.parametrize("form", FORMS)
def test_any_form_is_matched_by_its_names(form, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = ("kind10", "kind2", "kind1")  # the order of a table's own list
    files = files_of(names)
    root = lay_out(form, tmp_path / "val", files)
    typed = validate(tiny("vit", tmp_path, *THREE, "mode=eval", "data.channels=1"))
    typed.data.form, typed.data.root, typed.checkpoint = form, str(root), "given"
    task = Classification(typed)
    weights = ("kind2", "kind1", "kind10")
    task.take_classes(weights)
    labels = torch.cat([labels for _, labels in task.data.test_batches(4)])
    if form == "webdataset":  # which only numbers its classes
        assert task.classes is None
        assert torch.equal(task._of_model(labels), labels)
        return
    own = task.data.class_names
    assert [weights[k] for k in task._of_model(labels)] == [own[k] for k in labels]
    with pytest.raises(RunError, match=r"only in the data: kind10; only in the weights' list: x$"):
        task.take_classes(("kind1", "kind2", "x"))


def test_generated_classes_bear_the_names_of_the_weights(tmp_path):
    root = arrays(tmp_path / "own.npz", DARK_FIRST)
    config = tiny("dit", tmp_path, f"data.root={root}", *THREE)
    run(config)
    record, _, load = outcome(config)
    assert record["classes"] == list(DARK_FIRST)
    assert list(load["groups"]) == list(DARK_FIRST)
    given = [*THREE, "mode=eval", f"checkpoint={folder_of(config)}"]
    other = arrays(tmp_path / "other.npz", LIGHT_FIRST, shift=1)
    again = tiny("dit", tmp_path / "b", f"data.root={other}", *given)
    run(again)
    assert list(outcome(again)[2]["groups"]) == list(DARK_FIRST)
    third = arrays(tmp_path / "third.npz", ("a", "b", "c"))
    with pytest.raises(RunError, match=r"only in the data: a, b, c; .*: dark, grey, light$"):
        run(tiny("dit", tmp_path / "c", f"data.root={third}", *given))
