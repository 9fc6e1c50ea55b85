"""Sets of pictures, reference statistics and the scores made of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from moh.errors import RunError
from moh.evaluation.extraction import cached_features, extract
from moh.evaluation.features import FeatureExtractor, Features
from moh.evaluation.fidelity import inception_score, precision_recall
from moh.evaluation.frechet import frechet_distance, statistics_of
from moh.evaluation.image_sets import FolderImages, NpzImages, TensorImages, open_images
from moh.evaluation.reference import Reference
from moh.evaluation.scores import scores

ROOT = Path(__file__).parents[1]


def pictures(count: int, size: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def save_folder(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:04d}.png")
    return folder


def as_tensor(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).movedim(-1, 1)


def silent(*_: Any) -> None:
    pass


def test_a_folder_is_read_in_order_of_name_as_rgb(tmp_path):
    images = pictures(5)
    folder = save_folder(tmp_path / "set", images)
    (folder / "notes.txt").write_text("no picture")
    (folder / "._0001.png").write_text("no picture either")
    Image.fromarray(images[0, :, :, 0]).save(folder / "0005.PNG")
    found = FolderImages(folder)
    assert len(found) == 6
    assert torch.equal(found.read(1, 4), as_tensor(images[1:4]))
    assert torch.equal(found.read(5, 6)[0], torch.from_numpy(images[0, :, :, 0]).expand(3, 8, 8))
    nested = save_folder(tmp_path / "classes" / "cat", images[:2])
    assert len(FolderImages(nested.parent)) == 2


def test_a_folder_that_is_no_set_costs_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty holds no pictures \(\.bmp, \.jpeg, \.jpg, "):
        open_images(tmp_path / "empty")
    folder = save_folder(tmp_path / "set", pictures(2))
    Image.fromarray(pictures(1, 9)[0]).save(folder / "0002.png")
    with pytest.raises(RunError, match=r"0002\.png is 9x9, 0000\.png 8x8: a set must be of one"):
        FolderImages(folder).read(0, 3)
    (folder / "0001.png").write_bytes((folder / "0001.png").read_bytes()[:60])
    with pytest.raises(RunError, match=r"cannot read image .*0001\.png"):
        FolderImages(folder).read(0, 2)
    with pytest.raises(RunError, match=r"absent\.npz does not exist"):
        open_images(tmp_path / "absent.npz")
    with pytest.raises(RunError, match="neither a folder of pictures"):
        open_images(folder / "0000.png")


@pytest.mark.parametrize("compression", [ZIP_STORED, ZIP_DEFLATED])
def test_an_npz_is_streamed_in_any_order(compression, tmp_path):
    images = pictures(7)
    path = tmp_path / "set.npz"
    save = np.savez if compression == ZIP_STORED else np.savez_compressed
    save(path, arr_0=images, arr_1=np.arange(7))
    found = NpzImages(path)
    assert len(found) == 7
    for start, stop in ((0, 2), (2, 5), (6, 9), (1, 3), (1, 3)):
        assert torch.equal(found.read(start, stop), as_tensor(images[start:stop]))


def test_an_npz_that_is_no_set_names_what_it_holds(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, images=pictures(2), labels=np.zeros(2))
    with pytest.raises(RunError, match=r"set\.npz has no arr_0; it holds images, labels"):
        NpzImages(path)
    np.savez(path, pictures(2).astype(np.float32))
    with pytest.raises(RunError, match=r"arr_0 .* float32 \(2, 8, 8, 3\): pictures are uint8"):
        NpzImages(path)
    np.savez(path, pictures(2)[:, :, :, 0])
    with pytest.raises(RunError, match=r"uint8 \(2, 8, 8\): pictures are uint8 \(N, H, W, 3\)"):
        NpzImages(path)
    np.savez(path, pictures(40))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(RunError, match=r"cannot read .*set\.npz"):
        NpzImages(path)


class TinyInception(FeatureExtractor):
    """Stands for the Inception network: three pooled features, two spatial ones, two classes."""

    name = "inception"
    metric = "FID"
    pipeline = "tiny"
    dim = 3
    spatial_dim = 2
    weights_sha256 = "0" * 64

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(1, 1)

    def extract(self, images_BCHW: Tensor) -> Features:
        x = images_BCHW.float() / 255
        probs = x[:, :2].mean((2, 3)).softmax(-1)
        return Features(x.mean((2, 3)), x[:, 0, 0, :2], probs)


class TinyOther(TinyInception):
    """Another network: no spatial features, no class probabilities."""

    name = "other"
    metric = "FD-Other"
    spatial_dim = 0

    def extract(self, images_BCHW: Tensor) -> Features:
        return Features(super().extract(images_BCHW).pooled_BD)


def tensors(count: int, seed: int) -> TensorImages:
    return TensorImages(as_tensor(pictures(count, seed=seed)), "pictures", f"seed {seed}")


def features_of(source: TensorImages, network: FeatureExtractor) -> Features:
    return network(source.read(0, len(source)))


@pytest.mark.parametrize("batch", [3, 64])
def test_scores_are_those_of_all_features_whatever_the_batch(batch):
    network, real, drawn = TinyInception(), tensors(20, 1), tensors(17, 2)
    reference = extract(real, network, batch, silent)
    generated = extract(drawn, network, batch, silent, with_probs=True)
    found = scores(network, reference, generated)
    r, g = features_of(real, network), features_of(drawn, network)
    fid = frechet_distance(statistics_of(r.pooled_BD), statistics_of(g.pooled_BD))
    sfid = frechet_distance(statistics_of(r.spatial_BS), statistics_of(g.spatial_BS))
    precision, recall = precision_recall(r.pooled_BD, g.pooled_BD)
    expected = {
        "fid": fid,
        "sfid": sfid,
        "inception_score": inception_score(g.probs_BC),
        "precision": precision,
        "recall": recall,
    }
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value, rel=1e-6), name


def test_scores_of_another_network_carry_its_name():
    network = TinyOther()
    sets = [extract(tensors(9, seed), network, 4, silent, with_probs=True) for seed in (1, 2)]
    assert list(scores(network, *sets)) == ["fd_other", "precision_other", "recall_other"]


def adm_batch(path: Path, count: int = 8, **changes: Any) -> Path:
    """A reference batch in ADM's form, for :class:`TinyInception`."""
    arrays: dict[str, Any] = {
        "mu": np.array([0.1, 0.2, 0.3]),
        "sigma": np.diag([0.1, 0.2, 0.3]),
        "mu_s": np.array([0.4, 0.5]),
        "sigma_s": np.diag([0.4, 0.5]),
        "arr_0": pictures(count, seed=1),
    } | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_an_adm_batch_gives_its_statistics_and_its_pictures_the_manifold(tmp_path):
    network, drawn = TinyInception(), tensors(20, 2)
    path = adm_batch(tmp_path / "VIRTUAL.npz")
    reference = Reference.open(path, TinyInception)
    assert reference.label == "the statistics of VIRTUAL.npz, 8 images"
    known = reference.features(network, 4, None, silent)
    found = scores(network, known, extract(drawn, network, 4, silent))
    g = features_of(drawn, network)
    mean, covariance = g.pooled_BD.double().mean(0), g.pooled_BD.double().T.cov()
    shift = (mean - torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)).square().sum()
    sigma = torch.diag(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    cross = torch.linalg.eigvals(sigma @ covariance).real.sqrt().sum()
    fid = shift + covariance.trace() + sigma.trace() - 2 * cross
    assert found["fid"].value == pytest.approx(float(fid), rel=1e-6)
    r = network(as_tensor(pictures(8, seed=1)))
    expected = precision_recall(r.pooled_BD, g.pooled_BD)
    assert (found["precision"].value, found["recall"].value) == expected
    assert "8 real and 20 generated" in found["precision"].detail


def test_parts_of_an_adm_batch_give_the_scores_that_they_can(tmp_path):
    network, drawn = TinyInception(), extract(tensors(9, 2), TinyInception(), 4, silent)

    def names(**changes: Any) -> list[str]:
        path = adm_batch(tmp_path / "part.npz", **changes)
        known = Reference.open(path, TinyInception).features(network, 4, None, silent)
        return list(scores(network, known, drawn))

    assert names(arr_0=None) == ["fid", "sfid"]
    assert names(arr_0=None, mu_s=None, sigma_s=None) == ["fid"]
    assert names(mu=None, sigma=None, mu_s=None, sigma_s=None) == [
        "fid",
        "sfid",
        "precision",
        "recall",
    ]
    # The statistics are of Inception; another network sees the pictures alone.
    other = Reference.open(adm_batch(tmp_path / "part.npz"), TinyOther)
    assert other.pooled is None
    assert len(other.images) == 8


def test_a_reference_that_cannot_serve_costs_one_line(tmp_path):
    def refused(match: str, network: type = TinyInception, **changes: Any) -> None:
        with pytest.raises(RunError, match=match):
            Reference.open(adm_batch(tmp_path / "ref.npz", **changes), network)

    refused(r"needs mu and sigma; it holds mu, mu_s, sigma_s, arr_0", sigma=None)
    refused(r"needs mu_s and sigma_s; it holds mu, sigma, mu_s, arr_0", sigma_s=None)
    refused(r"mu is \(2,\), sigma \(3, 3\); features inception give \(3,\)", mu=np.zeros(2))
    none = dict.fromkeys(("sigma", "mu_s", "sigma_s", "arr_0", "mu"))
    refused(r"holds images: features inception need pictures in arr_0, or mu", **none, images=[1])
    refused(r"holds mu, .*: features other need pictures in arr_0$", TinyOther, arr_0=None)


def test_features_of_a_reference_are_kept_between_runs(tmp_path, monkeypatch):
    network, source = TinyInception(), tensors(9, 1)
    first = cached_features(source, network, 4, tmp_path / "cache", silent)
    monkeypatch.setattr(TinyInception, "extract", lambda *_: pytest.fail("extracted again"))
    again = cached_features(source, network, 4, tmp_path / "cache", silent)
    assert torch.equal(first.kept_KD, again.kept_KD)
    for name in ("pooled", "spatial"):
        before, after = getattr(first, name), getattr(again, name)
        assert torch.equal(before.covariance, after.covariance)
        assert torch.equal(before.root, after.root)
    monkeypatch.undo()
    # A file that was cut short is made again.
    file = next((tmp_path / "cache").iterdir())
    os.truncate(file, 100)
    remade = cached_features(source, network, 4, tmp_path / "cache", silent)
    assert torch.equal(first.kept_KD, remade.kept_KD)


@pytest.fixture
def score_images(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import score_images

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["score_images.py", *map(str, arguments)])
        return score_images.main()

    return call


def test_the_command_scores_two_sets(score_images, tmp_path, capsys, monkeypatch):
    folder = save_folder(tmp_path / "drawn", pictures(12, seed=1))
    np.savez(tmp_path / "real.npz", pictures(10, seed=2))
    monkeypatch.setattr("score_images.load_features", lambda *_: TinyInception())
    assert score_images(folder, tmp_path / "real.npz", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["generated"] == {"name": "drawn", "images": 12, "size": "8x8"}
    assert record["reference"] == "10 images of real.npz"
    assert list(record["scores"]) == ["fid", "sfid", "inception_score", "precision", "recall"]
    network = TinyInception()
    real, drawn = (network(as_tensor(pictures(n, seed=s))).pooled_BD for n, s in ((10, 2), (12, 1)))
    fid = frechet_distance(statistics_of(real), statistics_of(drawn))
    assert record["scores"]["fid"] == pytest.approx(fid, rel=1e-6)

    monkeypatch.setattr("score_images.load_features", lambda *_: TinyOther())
    assert score_images(folder, folder) == 0
    shown = capsys.readouterr().out
    assert "FD-Other" in shown
    assert "drawn: 12 images, 8x8; fewer than 50,000" in shown
    assert "FID" not in shown


def test_the_command_tells_a_mistake_in_one_line(score_images, tmp_path, capsys):
    folder = save_folder(tmp_path / "drawn", pictures(2))

    def error(*arguments: object) -> str:
        assert score_images(*arguments) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        return lines[0]

    assert error(folder, tmp_path / "absent").endswith("absent does not exist")
    (folder / "config.yaml").write_text("name: run\n")
    assert "holds no samples: evaluate the run with eval.save_samples=true" in error(folder, folder)
    (folder / "config.yaml").unlink()
    missing = tmp_path / "weights.pth"
    assert "no feature weights at" in error(folder, folder, "--features-path", missing)
