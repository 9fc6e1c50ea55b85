"""How alike the heads of a layer are: attention patterns and outputs (the paper's Table B).

For two heads of one layer, over the tokens of the evaluated samples:

- *pattern similarity*: ``1 - 1/2 E ||A - A'||_1`` of their attention patterns (see
  :mod:`moh.evaluation.patterns`): 1 for equal patterns, 0 for patterns without a common key. All
  heads enter, in a MoH model also those that a token did not select: a pattern has no gate.
- *output similarity*: the mean cosine of their outputs before the gates. All heads enter.
- *gated output similarity*: the same after the gates. A gate above zero turns no vector, so what
  changes is that a head which a token did not select puts out zero there, and its cosine counts
  as zero. For MHA it equals the output similarity.

A score of a model is the mean over the pairs of heads of each layer, then over the layers that
have two heads or more: each layer weighs the same. The paper gives the first formula and the word
cosine; it says neither which outputs nor how means are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moh.backbones.convert import Wiring, attention_layers, converted_layers
from moh.evaluation.patterns import attention_heads
from moh.heads import Routing
from moh.heads.router import no_autocast
from moh.tasks.base import Metric

KINDS = ("pattern", "output", "gated_output")
_CHUNK = 2**23  # weights held at once (32 MiB)


class _Layer:
    """Sums over tokens of one layer, (H, H) each in float64."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens = 0

    def add(self, kind: str, value_HH: Tensor) -> None:
        value_HH = value_HH.double().cpu()
        self.sums[kind] = self.sums[kind] + value_HH if kind in self.sums else value_HH

    def mean(self, kind: str) -> Tensor:
        """(H, H): symmetric; ones on the diagonal of patterns and outputs."""
        return self.sums[kind] / self.tokens


class HeadSimilarity:
    """Measures a model's heads during forward passes: ``with similarity.watch(model): ...``.

    Holds the patterns of one layer and of some of its queries at a time.
    """

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[HeadSimilarity]:
        """Measure every forward pass of the attention layers inside the block."""
        handles = []
        for name, module, wiring in [*attention_layers(model), *converted_layers(model)]:
            layer = self._layers.setdefault(name, _Layer())
            gates: list[Tensor] = []
            router = getattr(module, "router", None)
            if router is not None:
                handles.append(router.register_forward_hook(_keep_gates(gates)))
            handles.append(
                module.register_forward_hook(_measure(layer, wiring, gates), with_kwargs=True)
            )
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @property
    def tokens(self) -> int:
        """Queries measured, summed over layers."""
        return sum(layer.tokens for layer in self._layers.values())

    def scores(self) -> dict[str, float]:
        """``pattern``, ``output`` and ``gated_output`` similarity of the model.

        Empty without a layer of two heads.
        """
        layers = [layer for layer in self._layers.values() if layer.tokens]
        pairs = [[_pairs(layer.mean(kind)) for layer in layers] for kind in KINDS]
        means = [[float(p.mean()) for p in layer if len(p)] for layer in pairs]
        return {
            kind: sum(values) / len(values)
            for kind, values in zip(KINDS, means, strict=True)
            if values
        }

    def to_json(self, samples: str) -> dict[str, Any] | None:
        """Matrices by layer, None if no layer was seen.

        Args:
            samples: what was evaluated, in words.

        Returns:
            ``samples``, ``layers``, ``tokens`` (queries measured in each), and for each kind of
            similarity ``pattern``, ``output``, ``gated_output``: [layer][head][head].
        """
        seen = {name: layer for name, layer in self._layers.items() if layer.tokens}
        if not seen:
            return None
        data: dict[str, Any] = {
            "samples": samples,
            "layers": list(seen),
            "tokens": [layer.tokens for layer in seen.values()],
        }
        for kind in KINDS:
            data[kind] = [
                [[round(value, 5) for value in row] for row in layer.mean(kind).tolist()]
                for layer in seen.values()
            ]
        return data


def similarity_metrics(similarity: HeadSimilarity, samples: str) -> dict[str, Metric]:
    """The scores as metrics of a run: ``pattern_similarity`` and the other two.

    Args:
        samples: what was evaluated, in words.
    """
    protocols = {
        "pattern": "1 - 1/2 E|A - A'| of the attention patterns of all heads",
        "output": "cosine of the outputs of all heads, before the gates",
        "gated_output": "cosine of the outputs after the gates, 0 where a head is not selected",
    }
    return {
        f"{kind}_similarity": Metric(
            value,
            "",
            similarity.tokens,
            None,
            f"{protocols[kind]}; mean over pairs, then layers; {samples}",
        )
        for kind, value in similarity.scores().items()
    }


def _pairs(matrix_HH: Tensor) -> Tensor:
    """Values of the pairs of different heads, each pair once."""
    heads = len(matrix_HH)
    first, second = torch.triu_indices(heads, heads, offset=1)
    return matrix_HH[first, second]


def _keep_gates(gates: list[Tensor]) -> Any:
    def keep(module: nn.Module, inputs: Any, routing: Routing) -> None:
        gates[:] = [routing.gates_BNH.detach()]

    return keep


def _measure(layer: _Layer, wiring: Wiring, gates: list[Tensor]) -> Any:
    """A forward hook that adds one batch to ``layer``."""

    @torch.no_grad()
    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        with no_autocast(next(module.parameters()).device.type):
            heads = attention_heads(module, wiring.mha, args, kwargs)
        B, N, H, _K = heads.outputs_BNHK.shape
        layer.tokens += B * N
        rows = max(1, _CHUNK // (B * H * heads.num_keys))
        for start in range(0, N, rows):
            pattern_BRHM = heads.weights(slice(start, start + rows)).transpose(1, 2)
            distance_BRHH = torch.cdist(pattern_BRHM, pattern_BRHM, p=1)
            layer.add("pattern", (1 - distance_BRHH / 2).sum(dim=(0, 1), dtype=torch.float64))
        unit_THK = _unit(heads.outputs_BNHK).flatten(0, 1)
        layer.add("output", _products(unit_THK))
        if gates:
            unit_THK = unit_THK * (gates[0] > 0).flatten(0, 1)[:, :, None]
        layer.add("gated_output", _products(unit_THK))

    return measure


def _unit(y_BNHK: Tensor) -> Tensor:
    """Vectors of length one; zero stays zero."""
    norm_BNH1 = y_BNHK.norm(dim=-1, keepdim=True)
    return torch.where(norm_BNH1 > 0, y_BNHK / norm_BNH1, 0.0)


def _products(unit_THK: Tensor) -> Tensor:
    """Inner products of all pairs of heads, summed over tokens: (H, H)."""
    return (unit_THK @ unit_THK.transpose(1, 2)).sum(0, dtype=torch.float64)
