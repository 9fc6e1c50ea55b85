"""VAE latents: the cache, its script, its reader, and the same samples encoded while training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import script_runs
import torch
from made_images import CLASSES, KINDS, picture, small_vae, tree
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_runs import weights

from moh.cli import compose_config
from moh.config import ImagesConfig
from moh.data.encoding import EncodedFolder, Encoder, centre_crop
from moh.data.latents import CachedLatents, LatentIndex, shard_path
from moh.errors import RunError
from moh.runner import run

SIZE, SHARD = 16, 5
COUNT = len(CLASSES) * len(KINDS)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return tree(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return small_vae(tmp_path_factory.mktemp("vae"))


def arguments(images, vae, out, *more):
    return (
        *(images, out, "--vae", vae, "--size", SIZE, "--shard-images", SHARD),
        *("--batch", 3, "--workers", 0, "--device", "cpu", *more),
    )


@pytest.fixture(scope="module")
def cached(images, vae, tmp_path_factory):
    out = tmp_path_factory.mktemp("cached") / "latents"
    said = script_runs.finish("cache_latents", *arguments(images, vae, out))
    assert f"5 of 5 shards, {COUNT} of {COUNT} images, 0 skipped" in said
    return out


def config(root, form="latents", **changes) -> ImagesConfig:
    values = {"size": SIZE // 2, "channels": 4, "mean": [0.0] * 4, "std": [1.0] * 4, "workers": 0}
    return ImagesConfig(name="made", root=str(root), form=form, **values | changes)


def test_the_crop_halves_then_scales_then_cuts_the_middle():
    wide = picture(3, 336, 72)
    pixels = torch.tensor(np.asarray(wide), dtype=torch.float32).movedim(-1, 0)
    # Twice, to 84 x 18: a third time would be below 16.
    halved = torch.nn.functional.avg_pool2d(torch.nn.functional.avg_pool2d(pixels, 2), 2)
    halved = Image.fromarray(halved.movedim(0, -1).round().to(torch.uint8).numpy())
    scaled = halved.resize((75, 16), Image.Resampling.BICUBIC)
    expected = np.asarray(scaled.crop((29, 0, 45, 16)), dtype=int)
    assert np.abs(np.asarray(centre_crop(wide, 16), dtype=int) - expected).max() <= 3
    small, wider = picture(1, 16, 16), picture(0, 20, 16)
    assert np.array_equal(np.asarray(centre_crop(small, 16)), np.asarray(small))
    assert np.array_equal(np.asarray(centre_crop(wider, 16)), np.asarray(wider)[:, 2:18])
    assert centre_crop(picture(0, 1, 1), 16).size == (16, 16)


def test_a_cache_holds_mean_and_deviation_of_both_flips(cached, images, vae):
    index = LatentIndex.read(cached)
    assert (index.scale, index.shift, index.latent) == (0.25, 0.1, [4, 8, 8])
    encoder = Encoder(str(vae))
    assert index.vae_sha256 == encoder.sha256
    stored = load_file(shard_path(cached, 1))
    assert stored["moments"].shape == (SHARD, 2, 2, 4, 8, 8)
    files = sorted((images / "train" / "n01").iterdir())
    assert [f.name for f in files][5] == "plain.JPEG"
    image = centre_crop(Image.open(files[5]), SIZE)
    for flip in (0, 1):
        side = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image
        x = torch.tensor(np.asarray(side)).movedim(-1, 0)[None].float() / 127.5 - 1
        posterior = encoder.vae.encode(x).latent_dist
        moments = torch.from_numpy(stored["moments"][0, flip])
        torch.testing.assert_close(moments[0], posterior.mean[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(moments[1], posterior.std[0], atol=1e-5, rtol=1e-5)
    labels = np.concatenate([load_file(shard_path(cached, n))["labels"] for n in range(5)])
    assert labels.tolist() == [label for label in range(3) for _ in KINDS]


def test_samples_are_draws_from_the_posterior_by_number_alone(cached):
    data = CachedLatents(config(cached), 3)
    order = data.order(7)
    batch = data.train_batch(order, 0, 64)
    assert batch["images"].shape == (64, 4, 8, 8)
    indices, uniform = order.take(0, 64)
    stored = np.concatenate([load_file(shard_path(cached, n))["moments"] for n in range(5)])
    flips = (uniform[:, 0] < 0.5).long()
    assert 20 < flips.sum() < 44
    mean, std = torch.from_numpy(stored)[indices, flips].unbind(1)
    noise = (batch["images"] / 0.25 + 0.1 - mean) / std
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert torch.equal(batch["labels"], indices // len(KINDS))
    # Two processes, each with its half of every batch of 16; then one that begins late.
    for rank in (0, 1):
        own = CachedLatents(config(cached), 3)
        for first in range(0, 64, 16):
            start = first + 8 * rank
            part = own.train_batch(own.order(7) if first == 0 else order, start, 8)
            assert torch.equal(part["images"], batch["images"][start : start + 8])
    late = CachedLatents(config(cached), 3)
    part = late.train_batch(late.order(7), 48, 16)
    assert torch.equal(part["images"], batch["images"][48:])
    plain = CachedLatents(config(cached, flip=False), 3)
    assert not torch.equal(plain.train_batch(plain.order(7), 0, 64)["images"], batch["images"])


def test_encoding_while_training_gives_the_samples_of_the_cache(cached, images, vae):
    cache = CachedLatents(config(cached), 3)
    online = EncodedFolder(config(images, "folder_vae", vae=str(vae)), 3)
    assert online.class_names == cache.class_names == CLASSES
    expected = cache.train_batch(cache.order(3), 4, 32)
    batch = online.train_batch(online.order(3), 4, 32)
    assert batch["pixels"].dtype == torch.uint8
    assert torch.equal(batch["labels"], expected["labels"])
    torch.testing.assert_close(online.encode(batch), expected["images"], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_cache(cached, images, vae, tmp_path):
    out = tmp_path / "killed"
    command = arguments(images, vae, out)
    for shard in (0, 1, 3):
        script_runs.kill(
            *("cache_latents", *command), when=lambda shard=shard: shard_path(out, shard).is_file()
        )
    (out / ".train-00004.safetensors.1.tmp").write_bytes(b"left by a killed run")
    said = script_runs.finish("cache_latents", *command)
    assert "of 5 shards are there already" in said
    assert script_runs.files(out) == script_runs.files(cached)
    assert not list(out.glob(".train*"))


def test_a_full_disk_leaves_nothing_half_written(cached, images, vae, tmp_path):
    out = tmp_path / "full"
    with script_runs.small_files(10_000):
        said = script_runs.finish("cache_latents", *arguments(images, vae, out), status=1)
    assert "train-00000.safetensors: " in said
    assert "File too large" in said
    assert not list(out.glob("*.safetensors")) + list(out.glob(".train*"))
    script_runs.finish("cache_latents", *arguments(images, vae, out))
    assert script_runs.files(out) == script_runs.files(cached)


def test_parts_make_the_same_cache(cached, images, vae, tmp_path):
    out = tmp_path / "parts"
    said = script_runs.finish("cache_latents", *arguments(images, vae, out, "--part", "2/2"))
    assert "2 of 5 shards" in said
    with pytest.raises(RunError, match=r"train-00000\.safetensors is missing \(shard 1 of 5\)"):
        CachedLatents(config(out), 3)
    script_runs.finish("cache_latents", *arguments(images, vae, out, "--part", "1/2"))
    assert script_runs.files(out) == script_runs.files(cached)


def test_an_image_that_cannot_be_read_is_skipped_and_told(images, vae, tmp_path):
    broken = tmp_path / "images"
    shutil.copytree(images, broken)
    whole = (broken / "train" / "n02" / "plain.JPEG").read_bytes()
    (broken / "train" / "n02" / "plain.JPEG").write_bytes(whole[: len(whole) // 2])
    (broken / "train" / "n03" / "grey.JPEG").write_bytes(b"not a picture")
    out = tmp_path / "out"
    said = script_runs.finish("cache_latents", *arguments(broken, vae, out))
    assert "skipped train/n02/plain.JPEG: Truncated File Read" in said
    assert "skipped train/n03/grey.JPEG: cannot identify image file" in said
    assert f"{COUNT - 2} of {COUNT} images, 2 skipped" in said
    data = CachedLatents(config(out), 3)
    assert data.num_train == COUNT - 2
    assert len(data.train_batch(data.order(0), 0, 40)["labels"]) == 40
    assert "every shard is right" in script_runs.finish("cache_latents", out, "--verify")


def test_a_cache_that_is_cut_missing_or_foreign_is_named(cached, images, vae, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(cached, out)
    path = shard_path(out, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(RunError, match=r"train-00002\.safetensors is damaged") as caught:
        CachedLatents(config(out), 3)
    assert "\n" not in str(caught.value)
    said = script_runs.finish("cache_latents", out, "--verify", status=1).replace("\n", " ")
    assert "train-00002.safetensors is damaged" in said
    assert "made again" in script_runs.finish("cache_latents", *arguments(images, vae, out))
    assert path.read_bytes() == whole
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors["moments"][0, 0, 0, 0, 0, 0] += 1
    save_file(tensors, path, metadata)
    said = script_runs.finish("cache_latents", out, "--verify", status=1)
    assert "its checksum is another" in said
    path.write_bytes(shard_path(cached, 1).read_bytes())
    with pytest.raises(RunError, match=r"train-00002\.safetensors is of another cache"):
        CachedLatents(config(out), 3)
    other = script_runs.finish(
        "cache_latents", *arguments(images, vae, cached, "--dtype", "float16"), status=1
    )
    assert "holds a cache with another dtype (float32, not float16)" in other


def test_settings_that_do_not_fit_a_cache_are_one_line(cached, images, vae, tmp_path):
    wrong = [
        (config(tmp_path), r"cannot read .*index\.json: No such file"),
        (ImagesConfig(name="made", form="latents", size=8, mean=[0.0], std=[1.0]), "data.root"),
        (config(cached, size=32), "holds latents of 4x8x8, the data are 4x32x32"),
        (config(cached, std=[0.5] * 4), "scaled by their VAE's factor alone"),
    ]
    for settings, message in wrong:
        with pytest.raises(RunError, match=message) as caught:
            CachedLatents(settings, 3)
        assert "\n" not in str(caught.value)
    with pytest.raises(RunError, match=r"3 classes, model\.num_classes is 1000"):
        CachedLatents(config(cached), 1000)
    with pytest.raises(RunError, match=r"data\.vae is not set"):
        EncodedFolder(config(images, "folder_vae"), 3)
    with pytest.raises(RunError, match=r"VAE /nowhere is not a folder"):
        Encoder("/nowhere")
    torn = tmp_path / "vae"
    shutil.copytree(vae, torn)
    weights_file = torn / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights_file)
    tensors.pop("encoder.conv_in.weight")
    save_file(tensors, weights_file, {"format": "pt"})
    with pytest.raises(RunError, match=r"lacks 1 of its weights, encoder\.conv_in\.weight first"):
        Encoder(str(torn))
    weights_file.write_bytes(b"torn")
    with pytest.raises(RunError, match="cannot load VAE") as caught:
        Encoder(str(torn))
    assert "\n" not in str(caught.value)


def settings(folder: Path, *more: str):
    return compose_config(
        [
            "experiment=dit/mha_s2",
            "model.depth=2",
            "data.size=8",
            "model.input_size=8",
            "model.num_classes=3",
            "model.hidden_size=24",
            "trainer.samples=16",
            "trainer.global_batch=8",
            "trainer.device_batch=4",
            "trainer.checkpoint_every=8",
            "mode=train",
            f"runs_dir={folder}/runs",
            f"results_dir={folder}/results",
            "logger.progress=false",
            "logger.wandb=disabled",
            *more,
        ]
    )


def test_the_dit_recipe_trains_alike_on_the_cache_and_on_the_images(cached, images, vae, tmp_path):
    on_cache = settings(tmp_path / "a", f"data.root={cached}")
    run(on_cache)
    on_images = settings(
        tmp_path / "b",
        "data=imagenet_vae_256",
        f"data.root={images}",
        f"data.vae={vae}",
        "data.workers=0",
    )
    run(on_images)
    first, second = weights(on_cache), weights(on_images)
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key], atol=1e-4, rtol=1e-3)
    record = json.loads(next((tmp_path / "a").rglob("run.json")).read_text())
    assert record["data"]["train_images"] == COUNT
