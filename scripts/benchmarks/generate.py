"""Contenders for generation: ``model.generate`` of a LLaMA, a token or the first token.

The time of a token is measured behind keys and values drawn at random, since what they are makes
no difference to it and filling a long cache takes two cores minutes. The first token is that of a
real prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import moh
from benchmarks.attention import EXECUTIONS
from benchmarks.shape import DTYPES
from benchmarks.timing import Contender, interleave, summarize
from moh.backbones.llama_cache import make_room
from moh.heads import HeadPlan, LayerPlan, execution_of, routers

VOCABULARY = 1000  # a large one would hide the layers: they stand for those of a deeper model
CACHES = ("growing", "static")


@dataclass(frozen=True)
class GenerateShape:
    """Greedy generation by a LLaMA of random weights.

    Attributes:
        context: tokens in the cache, or of the prompt.
        batch: sequences.
        layers, heads, head_dim: of the model; its width is ``heads * head_dim``.
        key_heads: a divisor of ``heads``.
        ratio: wanted activated ratio; the nearest whole number of heads is taken.
        shared_share: shared heads over active heads.
        new_tokens: made by one call.
        cache: transformers' ``growing`` or ``static`` one.
        first: time the prompt and the first token instead of the tokens after it.
    """

    context: int
    batch: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    ratio: float
    shared_share: float
    new_tokens: int
    cache: str
    first: bool
    dtype: str
    device: str

    def __post_init__(self) -> None:
        for name in ("context", "batch", "layers", "heads", "key_heads", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: it is rotated in pairs")
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads {self.key_heads} is no divisor of {self.heads} heads")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio {self.ratio} is not in (0, 1]")
        if not 0 <= self.shared_share < 1:
            raise ValueError(f"shared_share {self.shared_share} is not in [0, 1)")
        if self.first and self.cache == "static":
            raise ValueError("first-token is measured with a growing cache, not a static one")

    @property
    def plan(self) -> LayerPlan:
        """The head budget nearest to the wanted ratio and shared share."""
        active = max(1, round(self.ratio * self.heads))
        shared = min(round(self.shared_share * active), active - 1)
        return LayerPlan(self.heads, self.head_dim, shared, active - shared)

    def config(self) -> LlamaConfig:
        """Of the MHA model; feed-forward layers 8/3 of its width, in steps of 64."""
        width = self.heads * self.head_dim
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=-(-8 * width // 3 // 64) * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context + self.new_tokens + 1,
            bos_token_id=0,
            eos_token_id=None,  # every call makes all its tokens
            pad_token_id=0,
        )

    @property
    def limit(self) -> float:
        """Least ratio of a token's multiply-accumulates: queries and keys of the active heads."""
        config, plan = self.config(), self.plan
        width, active = config.hidden_size, plan.num_active / plan.num_heads
        seen = self.context / 2 if self.first else self.context
        # Query and output projections and attention, of which heads that are not active need none.
        of_heads = 2 * width**2 + 2 * seen * width
        others = 2 * width * self.key_heads * self.head_dim + 3 * width * config.intermediate_size
        output = width * VOCABULARY / self.layers / (self.context if self.first else 1)
        router = width * (self.heads + 2)
        return (active * of_heads + others + output + router) / (of_heads + others + output)


def measure_generation(shape: GenerateShape, seconds: float, rounds: int) -> dict[str, Any]:
    """The record of one shape; times are of a token of all sequences, or of the first one.

    Args:
        seconds, rounds: see :func:`benchmarks.timing.interleave`.
    """
    plan = shape.plan
    record: dict[str, Any] = {
        "what": "generate",
        **asdict(shape),
        "num_shared": plan.num_shared,
        "top_k": plan.top_k,
        "activated_ratio": round(plan.num_active / plan.num_heads, 4),
    }
    contenders, record["auto"] = generate_contenders(shape)
    times = interleave(contenders, seconds, rounds, shape.device)
    made = 1 if shape.first else shape.new_tokens
    by_token = {name: [taken / made for taken in found] for name, found in times.items()}
    record |= summarize(by_token, shape.limit)
    del record["reference_ms"]
    return record


def generate_contenders(shape: GenerateShape) -> tuple[dict[str, Contender], str]:
    """MHA, MHA with the cache that MoH has, MoH; and what auto takes at this length.

    Each call leaves the caches as it found them.
    """
    torch.manual_seed(0)
    config = shape.config()
    baseline = LlamaForCausalLM(config).to(DTYPES[shape.dtype]).to(shape.device).eval()
    converted = moh.convert(copy.deepcopy(baseline), HeadPlan((shape.plan,) * shape.layers))
    weights = {id(weight): weight for weight in converted.parameters()}
    models = {"mha": baseline}
    if shape.cache == "growing" and not shape.first:
        models["reserved"] = baseline
    for execution in EXECUTIONS:
        models[execution] = copy.deepcopy(converted, dict(weights))
        moh.set_execution(models[execution], execution)  # type: ignore[arg-type]
    length = shape.context + (0 if shape.first else 1)
    ids = torch.randint(1, VOCABULARY, (shape.batch, length), device=shape.device)
    if shape.first:
        found = {name: _first(model, ids) for name, model in models.items()}
    else:
        # Two caches: the library's, and one with room. MHA makes a static one as MoH does.
        plain = _filled(shape, config)
        roomy = plain
        if shape.cache == "growing":
            roomy = _filled(shape, config)
            for layer in range(shape.layers):
                make_room(roomy, layer)
        found = {
            name: _next(model, ids, plain if name == "mha" else roomy, shape.new_tokens)
            for name, model in models.items()
        }
    queries = shape.context if shape.first else 1
    q, k = (
        torch.empty(shape.batch, heads, tokens, shape.head_dim, device=shape.device)
        for heads, tokens in ((shape.heads, queries), (shape.key_heads, shape.context))
    )
    (_, router), *_ = routers(converted)
    with torch.no_grad():
        return found, execution_of(router, q, k, is_causal=shape.first)


def _filled(shape: GenerateShape, config: LlamaConfig) -> Cache:
    """A cache of random keys and values, always the same."""
    torch.manual_seed(0)
    size = shape.context + shape.new_tokens + 1
    static = shape.cache == "static"
    cache = StaticCache(config, max_cache_len=size) if static else DynamicCache(config=config)
    options: dict[str, Any] = {"dtype": DTYPES[shape.dtype], "device": shape.device}
    for layer in range(shape.layers):
        keys, values = (
            torch.randn(shape.batch, shape.key_heads, shape.context, shape.head_dim, **options)
            for _ in range(2)
        )
        cache.update(keys, values, layer)
    return cache


def _next(model: LlamaForCausalLM, ids: Tensor, cache: Cache, new_tokens: int) -> Contender:
    generate = _generate(model, ids, new_tokens)

    def run() -> Tensor:
        made = generate(cache=cache)
        cache.crop(-new_tokens)
        return made

    return run


def _first(model: LlamaForCausalLM, ids: Tensor) -> Contender:
    return _generate(model, ids, 1)


def _generate(model: LlamaForCausalLM, ids: Tensor, new_tokens: int) -> Callable[..., Tensor]:
    mask = torch.ones_like(ids)

    def run(**options: Any) -> Tensor:
        made: Tensor = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options
        )
        return made

    return run
