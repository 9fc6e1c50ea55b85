"""The head plan: which heads each layer has, shares and activates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerPlan:
    """Head budget of one attention layer.

    Attributes:
        num_heads: H, all heads of the layer.
        head_dim: K, width of one head.
        num_shared: heads that every token uses.
        top_k: routed heads that each token selects.

    Raises:
        ValueError: the numbers cannot describe a layer; the message names them.
    """

    num_heads: int
    head_dim: int
    num_shared: int
    top_k: int

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.head_dim < 1:
            raise ValueError(
                f"num_heads {self.num_heads} and head_dim {self.head_dim} must both be at least 1"
            )
        if not 0 <= self.num_shared <= self.num_heads:
            raise ValueError(f"num_shared {self.num_shared} is not in 0..{self.num_heads} heads")
        if not 0 <= self.top_k <= self.num_routed:
            raise ValueError(f"top_k {self.top_k} > {self.num_routed} routed heads")
        if self.num_routed and not self.top_k:
            raise ValueError(
                f"top_k 0 with {self.num_routed} routed heads: they would never be used; "
                f"set num_shared to {self.num_heads} or top_k to at least 1"
            )

    @property
    def num_routed(self) -> int:
        """E, the heads that the router chooses from."""
        return self.num_heads - self.num_shared

    @property
    def num_active(self) -> int:
        """Heads that each token uses."""
        return self.num_shared + self.top_k

    @property
    def all_shared(self) -> bool:
        """True where nothing is routed: every head is weighted, none is skipped."""
        return self.num_routed == 0


@dataclass(frozen=True)
class HeadPlan:
    """Head budgets of all attention layers of a model, first layer first.

    Plain MHA has no head plan at all; do not build one for it.
    """

    layers: tuple[LayerPlan, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a head plan needs at least one layer")

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> LayerPlan:
        return self.layers[index]

    @property
    def num_heads(self) -> int:
        """Heads summed over layers."""
        return sum(layer.num_heads for layer in self.layers)

    @property
    def num_active(self) -> int:
        """Active heads a token, summed over layers."""
        return sum(layer.num_active for layer in self.layers)

    @property
    def num_shared(self) -> int:
        """Shared heads summed over layers."""
        return sum(layer.num_shared for layer in self.layers)

    @property
    def activated_ratio(self) -> float:
        """Active heads over all heads: the paper's "activated heads (%)" as a fraction."""
        return self.num_active / self.num_heads

    @property
    def shared_share(self) -> float:
        """Shared heads over active heads: the paper's Table 6 axis as a fraction."""
        return self.num_shared / self.num_active

    @property
    def routed_layers(self) -> int:
        """Layers that route; the rest are all-shared."""
        return sum(not layer.all_shared for layer in self.layers)

    @classmethod
    def from_groups(
        cls,
        layers: Sequence[int],
        num_heads: Sequence[int],
        head_dim: Sequence[int],
        num_shared: Sequence[int],
        top_k: Sequence[int],
    ) -> HeadPlan:
        """Build a plan from runs of equal layers (ViT stages, thirds of a DiT).

        Args:
            layers: layers in each run.
            num_heads: heads of each layer of the run; likewise the others.

        Raises:
            ValueError: lists of different lengths, or an impossible layer, named by its number.
        """
        columns = {
            "num_heads": num_heads,
            "head_dim": head_dim,
            "num_shared": num_shared,
            "top_k": top_k,
        }
        for name, column in columns.items():
            if len(column) != len(layers):
                raise ValueError(
                    f"{name} {list(column)} has {len(column)} entries for {len(layers)} groups "
                    f"of layers {list(layers)}"
                )
        plans: list[LayerPlan] = []
        for count, *values in zip(layers, *columns.values(), strict=True):
            try:
                plans.extend([LayerPlan(*values)] * count)
            except ValueError as error:
                raise ValueError(f"{error} in layer {len(plans)}") from None
        return cls(tuple(plans))

    @classmethod
    def from_ratio(
        cls,
        num_heads: Sequence[int],
        head_dim: Sequence[int],
        ratio: float,
        shared_share: float = 0.4,
    ) -> HeadPlan:
        """Build the plan whose activated ratio is nearest to ``ratio``, evenly over depth.

        Each layer activates ``floor(ratio * num_heads)`` heads; the heads still missing to the
        rounded total go to the deepest layers first, since the paper gives shallow layers the
        smaller budget. The paper recommends a shared share above 0.4 (Table 6).

        Args:
            num_heads: heads of each layer.
            head_dim: width of a head in each layer.
            ratio: wanted activated ratio, in (0, 1].
            shared_share: shared heads over active heads in each layer, in [0, 1).

        Raises:
            ValueError: a ratio that leaves a layer without active heads, or out of range.
        """
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"ratio {ratio} is not in (0, 1]")
        if not 0 <= shared_share < 1:
            raise ValueError(f"shared_share {shared_share} is not in [0, 1)")
        # 1e-9 keeps 0.7 * 10 = 6.999... from losing a head.
        active = [int(ratio * heads + 1e-9) for heads in num_heads]
        missing = round(ratio * sum(num_heads)) - sum(active)
        for index in sorted(range(len(active)), reverse=True)[:missing]:
            active[index] += 1
        plans = []
        for index, (heads, dim, used) in enumerate(zip(num_heads, head_dim, active, strict=True)):
            if used < 1:
                raise ValueError(
                    f"ratio {ratio} leaves no active head of {heads} in layer {index}; "
                    f"the least that works is {math.ceil(100 / min(num_heads)) / 100}"
                )
            shared = min(round(shared_share * used), used - 1)
            plans.append(LayerPlan(heads, dim, shared, used - shared))
        return cls(tuple(plans))

    def to_dict(self) -> list[dict[str, int]]:
        """The plan as JSON data, a dict a layer."""
        return [asdict(layer) for layer in self.layers]

    @classmethod
    def from_dict(cls, layers: Sequence[Mapping[str, Any]]) -> HeadPlan:
        """Inverse of :meth:`to_dict`."""
        return cls(tuple(LayerPlan(**layer) for layer in layers))

    def __str__(self) -> str:
        return (
            f"{len(self)} layers, {self.num_active}/{self.num_heads} heads active "
            f"({100 * self.activated_ratio:.1f} %), "
            f"{100 * self.shared_share:.1f} % of them shared, {self.routed_layers} layers routed"
        )
