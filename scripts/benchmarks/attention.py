"""Contenders for attention alone and for a layer with its projections and router."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

import moh
from benchmarks.reference import make_plain, plain_attention
from benchmarks.shape import DTYPES, AttentionShape
from benchmarks.timing import Contender
from moh.heads import HeadPlan, RouterOptions, Routing, attend, build_router, execution_of
from moh.heads.slots import Load

EXECUTIONS = ("dense", "sparse", "auto")


def attention_contenders(shape: AttentionShape) -> tuple[dict[str, Contender], str]:
    """Attention alone, from queries, keys and values to gated heads; and what auto takes.

    The gates are given: what a router costs belongs to the layer.
    """
    B, N, M, H, G, K = (
        shape.batch,
        shape.queries,
        shape.tokens,
        shape.heads,
        shape.key_heads,
        shape.head_dim,
    )
    torch.manual_seed(0)
    options = {"dtype": DTYPES[shape.dtype], "device": shape.device}
    # In memory as a projection leaves them, token by token, or as a cache does, head by head.
    q, k, v = (
        torch.randn(B, length, heads, K, **options).transpose(1, 2)
        for length, heads in ((N, H), (M, G), (M, G))
    )
    if M > N:
        k, v = k.contiguous(), v.contiguous()
    for x in (q, k, v):
        x.requires_grad_(shape.backward)
    selected = shape.select()
    shared = selected.new_ones(B, N, shape.plan.num_shared)
    gates = torch.cat([shared, selected], dim=-1).float().requires_grad_(shape.backward)
    routing = Routing(gates, selected, selected.float())
    gradient = torch.randn(B, N, H, K, **options)

    def timed(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Contender:
        if not shape.backward:
            return _without_gradients(forward)
        return lambda: torch.autograd.grad(forward(), inputs, gradient)

    def library() -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=G != H)
        return y.transpose(1, 2)

    def with_execution(execution: str) -> Callable[[], Tensor]:
        router = build_router(
            1, shape.plan, RouterOptions(kind="query_norm", execution=execution), nn.init.zeros_
        )
        return lambda: attend(router, routing, q, k, v, is_causal=shape.causal)

    found = {"mha": timed(library, (q, k, v))}
    for execution in EXECUTIONS:
        found[execution] = timed(with_execution(execution), (q, k, v, gates))
    if shape.reference_fits:
        found["reference"] = timed(
            lambda: plain_attention(q, k, v, gates, is_causal=shape.causal), (q, k, v, gates)
        )
    router = build_router(1, shape.plan, RouterOptions(kind="query_norm"), nn.init.zeros_)
    with _gradients(shape.backward):
        return found, execution_of(router, q, k, is_causal=shape.causal, load=Load(selected))


def layer_contenders(shape: AttentionShape) -> tuple[dict[str, Contender], str]:
    """timm's attention layer: projections, router, balance loss; and what auto takes."""
    if shape.queries != shape.tokens or shape.key_heads != shape.heads:
        raise ValueError("a layer has as many queries as tokens and as many key heads as heads")
    torch.manual_seed(0)
    width = shape.heads * shape.head_dim
    options: dict[str, Any] = {"dtype": DTYPES[shape.dtype], "device": shape.device}
    layer = nn.Sequential(Attention(width, shape.heads, qkv_bias=True)).to(**options)
    layer.train(shape.backward)
    x = torch.randn(shape.batch, shape.tokens, width, **options).requires_grad_(shape.backward)
    gradient = torch.randn_like(x)
    converted = moh.convert(copy.deepcopy(layer), HeadPlan((shape.plan,)))

    def timed(model: nn.Sequential) -> Contender:
        def forward() -> Tensor:
            return model[0](x, is_causal=shape.causal)

        def step() -> None:
            y = forward()
            balance = moh.balance_loss(model)
            wanted = [x, *model.parameters()]
            if balance is None:
                torch.autograd.grad(y, wanted, gradient)
            else:
                torch.autograd.grad([y, balance], wanted, [gradient, torch.ones_like(balance)])

        return step if shape.backward else _without_gradients(forward)

    found = {"mha": timed(layer)}
    for execution in EXECUTIONS:
        model = copy.deepcopy(converted)
        moh.set_execution(model, execution)
        found[execution] = timed(model)
    if shape.reference_fits:
        found["reference"] = timed(make_plain(copy.deepcopy(converted)))
    q = torch.empty(shape.batch, shape.heads, shape.tokens, shape.head_dim, device=shape.device)
    with _gradients(shape.backward):
        q.requires_grad_(shape.backward)
        return found, execution_of(converted[0].router, q, q, is_causal=shape.causal)


def _gradients(wanted: bool) -> Any:
    return nullcontext() if wanted else torch.no_grad()


def _without_gradients(forward: Callable[[], object]) -> Contender:
    def run() -> object:
        with torch.no_grad():
            return forward()

    return run
