"""The method against its definition, and the promises of head plan, routers and balance loss."""

from __future__ import annotations

import copy
import subprocess
import sys

import naive
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moh.heads import (
    HeadPlan,
    LayerPlan,
    RouterOptions,
    balance_loss,
    build_router,
    gate_heads,
    head_load,
)


def normal_init(weight, generator):
    return nn.init.normal_(weight, std=0.5, generator=generator)


def zero_init(weight, generator):
    return nn.init.zeros_(weight)


SPLITS = [(0, 3, 6), (1, 2, 5), (2, 1, 3), (2, 3, 5), (4, 0, 4), (1, 0, 1), (3, 1, 4), (2, 4, 6)]


@pytest.mark.parametrize("scale", ["released", "paper"])
@pytest.mark.parametrize("two_stage", [True, False])
@pytest.mark.parametrize(("shared", "top_k", "heads"), SPLITS)
def test_two_stage_equals_the_naive_version_with_gradients(shared, top_k, heads, two_stage, scale):
    B, N, D, K = 2, 5, 12, 4
    plan = LayerPlan(heads, K, shared, top_k)
    generator = torch.Generator().manual_seed(heads + top_k)
    options = RouterOptions(gate_scale=scale, two_stage=two_stage)
    router = build_router(D, plan, options, normal_init, generator)
    x = torch.randn(B, N, D, generator=generator, requires_grad=True)
    q, k, v = (torch.randn(B, heads, N, K, generator=generator) for _ in range(3))
    v.requires_grad_()
    target = torch.randn(B, N, heads, K, generator=generator)

    def loss_of(y, aux):
        return ((y - target) ** 2).mean() + (0.3 * aux if aux is not None else 0)

    routing = router(x, q)
    y_BHNK = F.scaled_dot_product_attention(q, k, v)
    y = gate_heads(y_BHNK.transpose(1, 2), routing.gates_BNH)
    aux = balance_loss(router)
    inputs = [x, v, *router.parameters()]
    grads = torch.autograd.grad(loss_of(y, aux), inputs, allow_unused=True)

    weight = {name: layer.weight for name, layer in router.named_children()}
    samples, probs, selected = [], [], []
    for b in range(B):
        gates = []
        for n in range(N):
            g, p, s = naive.two_stage_gates(
                x[b, n],
                shared,
                plan.num_routed,
                top_k,
                weight.get("routed"),
                weight.get("stage"),
                weight.get("shared"),
                scale,
            )
            gates.append(g)
            probs.append(p)
            selected.append(s)
        samples.append(naive.attention(q[b], k[b], v[b], gates))
    y_naive = torch.stack(samples)
    aux_naive = naive.balance_loss(probs, selected, scale) if plan.num_routed else None
    grads_naive = torch.autograd.grad(loss_of(y_naive, aux_naive), inputs, allow_unused=True)

    torch.testing.assert_close(y, y_naive, rtol=2e-5, atol=2e-6)
    assert (aux is None) == (aux_naive is None) == plan.all_shared
    if aux is not None:
        torch.testing.assert_close(aux, aux_naive, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(grads, grads_naive, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("straight_through", [True, False])
@pytest.mark.parametrize(("shared", "top_k", "heads"), [(0, 2, 4), (1, 3, 6), (3, 1, 6), (4, 2, 8)])
def test_query_norm_equals_the_naive_version_with_gradients(shared, top_k, heads, straight_through):
    B, N, K = 2, 4, 6
    options = RouterOptions(kind="query_norm", straight_through=straight_through)
    router = build_router(8, LayerPlan(heads, K, shared, top_k), options, normal_init)
    assert not list(router.parameters())
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(B, heads, N, K, generator=generator) for _ in range(3))
    target = torch.randn(B, N, heads, K, generator=generator)
    q.requires_grad_()

    routing = router(torch.empty(B, N, 8), q)
    y = gate_heads(F.scaled_dot_product_attention(q, k, v).transpose(1, 2), routing.gates_BNH)
    aux = balance_loss(router)
    (grad,) = torch.autograd.grad(((y - target) ** 2).mean() + 0.1 * aux, q)

    samples, probs, selected = [], [], []
    for b in range(B):
        decided = [
            naive.query_norm_gates(q[b, :, n], shared, top_k, straight_through) for n in range(N)
        ]
        samples.append(naive.attention(q[b], k[b], v[b], [d[0] for d in decided]))
        probs += [d[1] for d in decided]
        selected += [d[2] for d in decided]
    y_naive = torch.stack(samples)
    aux_naive = naive.balance_loss(probs, selected, "released")
    loss_naive = ((y_naive - target) ** 2).mean() + 0.1 * aux_naive
    (grad_naive,) = torch.autograd.grad(loss_naive, q)

    assert set(routing.gates_BNH.unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(y, y_naive, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(aux, aux_naive, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, grad_naive, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_query_norm_has_no_nan_where_all_norms_are_equal(value):
    router = build_router(4, LayerPlan(5, 3, 1, 2), RouterOptions(kind="query_norm"), normal_init)
    q = torch.full((1, 5, 2, 3), value, requires_grad=True)
    routing = router(torch.empty(1, 2, 4), q)
    (routing.gates_BNH.sum() + balance_loss(router)).backward()
    assert torch.isfinite(routing.gates_BNH).all()
    assert torch.isfinite(q.grad).all()
    assert (routing.selected_BNE.sum(-1) == 2).all()


def test_one_routed_head_needs_no_deviation():
    router = build_router(4, LayerPlan(3, 3, 2, 1), RouterOptions(kind="query_norm"), normal_init)
    q = torch.randn(1, 3, 2, 3, requires_grad=True)
    gates = router(torch.empty(1, 2, 4), q).gates_BNH
    gates.sum().backward()
    assert (gates == 1).all()
    assert torch.isfinite(q.grad).all()


def test_zero_logits_give_every_active_head_gate_one():
    """The released scaling starts a converted model as MHA with the unselected heads dropped."""
    plan = LayerPlan(8, 4, 3, 2)
    router = build_router(6, plan, RouterOptions(), zero_init)
    gates = router(torch.randn(2, 5, 6)).gates_BNH
    torch.testing.assert_close(gates.sum(-1), torch.full((2, 5), 5.0))
    torch.testing.assert_close(gates[gates > 0], torch.ones(50))


def test_gates_of_one_are_the_identity_bit_for_bit():
    y = torch.randn(2, 3, 4, 5)
    assert torch.equal(gate_heads(y, torch.ones(2, 3, 4)), y)


@pytest.mark.parametrize("kind", ["two_stage", "query_norm"])
def test_padding_counts_in_neither_loss_nor_load(kind):
    router = build_router(6, LayerPlan(6, 4, 2, 2), RouterOptions(kind=kind), normal_init)
    x, q = torch.randn(2, 7, 6), torch.randn(2, 6, 7, 4)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    router(x, q, mask)
    masked_loss, masked_load = balance_loss(router), head_load(router)[""]
    kept = [(x[0:1, 3:], q[0:1, :, 3:]), (x[1:2], q[1:2])]
    probs = torch.cat([router(a, b).probs_BNE[0] for a, b in kept])
    chosen = torch.cat([router(a, b).selected_BNE[0] for a, b in kept]).float()
    torch.testing.assert_close(masked_load, chosen.mean(0))
    torch.testing.assert_close(masked_loss, 4 * (probs.mean(0) * chosen.mean(0)).sum())


def test_each_forward_overwrites_the_statistics():
    router = build_router(6, LayerPlan(6, 4, 2, 2), RouterOptions(), normal_init)
    x = torch.randn(2, 7, 6)
    router(x)
    once = balance_loss(router)
    router(x)
    torch.testing.assert_close(balance_loss(router), once, rtol=0, atol=0)


def test_balanced_routing_costs_top_k():
    """At perfect balance the released loss is k (paper.md: 3.0 for k = 3, E = 6)."""
    plan = LayerPlan(6, 4, 0, 3)
    router = build_router(6, plan, RouterOptions(selection="random"), zero_init)
    with torch.no_grad():
        router(torch.randn(8, 2048, 6))
    assert router.balance_loss().item() == pytest.approx(3.0, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_is_float32_whatever_autocast_says(dtype):
    router = build_router(16, LayerPlan(8, 4, 2, 3), RouterOptions(), normal_init)
    x = torch.randn(2, 9, 16)
    expected = router(x)
    with torch.autocast("cpu", dtype=dtype):
        routing = router(x)
    assert routing.gates_BNH.dtype == torch.float32
    assert torch.equal(routing.gates_BNH, expected.gates_BNH)


def test_controls_select_k_heads_without_learning():
    x = torch.randn(4, 200, 6)
    fixed = build_router(6, LayerPlan(8, 4, 2, 2), RouterOptions(selection="fixed"), normal_init)
    assert fixed(x).selected_BNE[..., :2].all()
    assert not fixed(x).selected_BNE[..., 2:].any()
    drawn = build_router(6, LayerPlan(8, 4, 2, 2), RouterOptions(selection="random"), normal_init)
    selected = drawn(x).selected_BNE
    assert (selected.sum(-1) == 2).all()
    torch.testing.assert_close(
        selected.float().mean((0, 1)), torch.full((6,), 1 / 3), atol=0.08, rtol=0
    )


@given(
    heads=st.lists(st.integers(1, 32), min_size=1, max_size=12),
    ratio=st.floats(0.05, 1),
    share=st.floats(0, 0.95),
)
@settings(deadline=None, max_examples=200)
def test_a_plan_from_a_ratio_is_the_nearest_or_refused(heads, ratio, share):
    try:
        plan = HeadPlan.from_ratio(heads, [4] * len(heads), ratio, share)
    except ValueError:
        assert int(ratio * min(heads) + 1e-9) < 1
        return
    assert abs(plan.num_active - ratio * sum(heads)) <= 0.5 + 1e-6
    assert all(layer.top_k >= 1 for layer in plan)
    assert HeadPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 4, 0, 9), "top_k 9 > 8 routed heads"),
        ((8, 4, 9, 0), "num_shared 9 is not in 0..8 heads"),
        ((8, 4, 2, 0), "top_k 0 with 6 routed heads"),
        ((0, 4, 0, 0), "num_heads 0"),
    ],
)
def test_an_impossible_layer_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerPlan(*arguments)


def test_an_impossible_group_names_its_layer():
    with pytest.raises(ValueError, match="top_k 9 > 8 routed heads in layer 3"):
        HeadPlan.from_groups([3, 2], [8, 8], [4, 4], [4, 0], [2, 9])
    with pytest.raises(ValueError, match=r"num_shared .* has 1 entries for 2 groups"):
        HeadPlan.from_groups([3, 2], [8, 8], [4, 4], [4], [2, 2])


def test_unknown_router_words_are_refused():
    with pytest.raises(ValueError, match="two_stage, query_norm"):
        RouterOptions(kind="twostage")


def test_a_model_can_be_copied_after_a_forward_pass():
    router = build_router(6, LayerPlan(6, 4, 2, 2), RouterOptions(), normal_init)
    router(torch.randn(2, 7, 6))
    twin = copy.deepcopy(router)
    assert twin.statistics is None
    assert torch.equal(twin.routed.weight, router.routed.weight)


def test_heads_need_torch_alone():
    heavy = ["hydra", "timm", "diffusers", "transformers", "lm_eval", "wandb", "omegaconf"]
    code = f"import sys, moh.heads; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("num_shared", [1, 3])
def test_gates_without_gradients_are_those_with_them(num_shared):
    """Wide routers take a shorter way where no gradient is wanted."""
    torch.manual_seed(0)
    plan = LayerPlan(num_heads=8, head_dim=64, num_shared=num_shared, top_k=2)
    router = build_router(512, plan, RouterOptions(), normal_init)
    x, mask = torch.randn(2, 50, 512), torch.rand(2, 50) > 0.3
    trained, counted = router(x, None, mask), router.statistics
    with torch.no_grad():
        inferred = router(x, None, mask)
    torch.testing.assert_close(inferred.gates_BNH, trained.gates_BNH, rtol=1e-6, atol=1e-6)
    assert torch.equal(inferred.selected_BNE, trained.selected_BNE)
    assert torch.equal(inferred.probs_BNE, trained.probs_BNE)
    for ours, theirs in zip(router.statistics, counted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not inferred.gates_BNH.requires_grad


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("kind", "dim"), [("two_stage", 512), ("two_stage", 32), ("query_norm", 32)]
)
def test_statistics_are_of_the_forward_whatever_its_tensors_hold_later(kind, dim, inference):
    torch.manual_seed(0)
    router = build_router(dim, LayerPlan(8, 4, 2, 2), RouterOptions(kind=kind), normal_init)
    x, q, mask = torch.randn(2, 9, dim), torch.randn(2, 8, 9, 4), torch.rand(2, 9) > 0.3
    router(x, q, mask)
    expected = [part.detach().clone() for part in router.statistics]
    with inference():
        routing = router(x, q, mask)
        # Buffers that serve again: of the batch, and of the heads' output that gates may become.
        mask.fill_(True)
        x.zero_()
        q.zero_()
        routing.gates_BNH.zero_()
        statistics = router.statistics
    for ours, theirs in zip(statistics, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
