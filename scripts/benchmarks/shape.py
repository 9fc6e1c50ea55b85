"""The shape of one measurement, and what it costs at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moh.heads import LayerPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_REFERENCE = 2**30  # logits that the plain reference may build: 4 GiB in float32


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer.

    Attributes:
        tokens: keys, M.
        queries: N; 1 with cached keys.
        heads, head_dim, batch: H, K, B.
        key_heads: G, a divisor of ``heads``.
        ratio: wanted activated ratio; the nearest whole number of heads is taken.
        shared_share: shared heads over active heads.
        causal, backward: as the words say.
        load: ``even``: every routed head is selected as often; ``skewed``: head i as 1 / i.
    """

    tokens: int
    queries: int
    heads: int
    head_dim: int
    batch: int
    key_heads: int
    ratio: float
    shared_share: float
    causal: bool
    backward: bool
    dtype: str
    device: str
    load: str = "even"

    def __post_init__(self) -> None:
        for name in ("tokens", "queries", "heads", "head_dim", "batch", "key_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads {self.key_heads} is no divisor of {self.heads} heads")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio {self.ratio} is not in (0, 1]")
        if not 0 <= self.shared_share < 1:
            raise ValueError(f"shared_share {self.shared_share} is not in [0, 1)")
        if self.causal and self.queries != self.tokens:
            raise ValueError(f"causal needs as many queries as tokens, not {self.queries}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda: no GPU is visible here; allowed: cpu")

    @property
    def plan(self) -> LayerPlan:
        """The head budget nearest to the wanted ratio and shared share."""
        active = max(1, round(self.ratio * self.heads))
        shared = min(round(self.shared_share * active), active - 1)
        return LayerPlan(self.heads, self.head_dim, shared, active - shared)

    @property
    def reference_fits(self) -> bool:
        """Whether the plain reference's logits fit in memory, twice in a backward pass."""
        logits = self.batch * self.heads * self.queries * self.tokens
        return logits * (2 if self.backward else 1) <= LARGEST_REFERENCE

    @property
    def attention_limit(self) -> float:
        """Least ratio for attention alone: the heads that are active."""
        return self.plan.num_active / self.plan.num_heads

    @property
    def layer_limit(self) -> float:
        """Least ratio for a layer: query, attention and output of the active heads alone.

        Keys and values of every head are made, and the router's logits are new.
        """
        width = self.heads * self.head_dim
        seen = self.tokens / 2 if self.causal else self.tokens
        active = self.attention_limit
        projections, attention = 4 * width**2, 2 * seen * width
        router = width * (self.heads + 2)
        least = (2 + 2 * active) * width**2 + active * attention + router
        return least / (projections + attention)

    def select(self) -> Tensor:
        """Which routed heads each token selects, bool (B, N, E)."""
        generator = torch.Generator().manual_seed(0)
        routed, k = self.plan.num_routed, self.plan.top_k
        size = (self.batch, self.queries, routed)
        # The k largest of log-weights plus Gumbel noise: k draws without replacement.
        noise = -torch.empty(size).exponential_(generator=generator).log()
        if self.load == "skewed":
            noise -= torch.arange(1, routed + 1).log()
        index = noise.topk(k, dim=-1).indices
        selected = torch.zeros(size, dtype=torch.bool).scatter(-1, index, True)
        return selected.to(self.device)
