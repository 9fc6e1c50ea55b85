"""The controls are what they say: chance, always the same heads, the printed equations."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_llama import moh_llama, plan_of, tokens
from tiny_runs import folder_of, tiny, weights

import moh
from moh.backbones.build import build_model
from moh.backbones.dit_attention import xavier_init
from moh.errors import RunError
from moh.heads import (
    LayerPlan,
    RouterOptions,
    balance_loss,
    build_router,
    combine,
    draws_by_prefix,
    head_load,
    routers,
    set_draws,
)
from moh.runner import run
from moh.training.loop import Trainer
from moh.validation import validate
from moh.worker import build_task

PLAN = LayerPlan(num_heads=8, head_dim=4, num_shared=2, top_k=2)


def router_of(selection, dim=6, plan=PLAN):
    return build_router(dim, plan, RouterOptions(selection=selection), xavier_init)


def test_keys_are_spread_like_random_numbers():
    keys = combine(3, torch.arange(100_000))
    assert len(keys.unique()) == 100_000
    bits = (keys[:, None] >> torch.arange(64)) & 1
    torch.testing.assert_close(bits.float().mean(0), torch.full((64,), 0.5), atol=0.01, rtol=0)
    assert not torch.equal(combine(3, 4), combine(4, 3))
    assert torch.equal(combine(3, torch.tensor([1, 2]))[1], combine(3, 2))


def test_random_heads_are_selected_evenly_and_independently():
    router = router_of("random")
    set_draws(router, combine(0, torch.arange(200)))
    selected_BNE = router(torch.randn(200, 100, 6)).selected_BNE
    assert (selected_BNE.sum(-1) == 2).all()
    load_E = selected_BNE.float().mean((0, 1))
    torch.testing.assert_close(load_E, torch.full((6,), 1 / 3), atol=0.012, rtol=0)
    # Between tokens, samples and layers: two draws of 2 of 6 share 2/3 of a head on average.
    for first, second in (
        (selected_BNE[:, 1:], selected_BNE[:, :-1]),
        (selected_BNE[1:], selected_BNE[:-1]),
    ):
        shared = (first & second).sum(-1).float().mean()
        assert shared == pytest.approx(2 / 3, abs=0.02)


def test_layers_draw_for_themselves():
    pair = torch.nn.ModuleList([router_of("random"), router_of("random")])
    set_draws(pair, combine(0, torch.arange(50)))
    x = torch.randn(50, 40, 6)
    first, second = (router(x).selected_BNE for router in pair)
    assert (first & second).sum(-1).float().mean() == pytest.approx(2 / 3, abs=0.05)


def test_a_draw_belongs_to_a_sample_whatever_the_batch():
    router, x = router_of("random"), torch.randn(6, 5, 6)
    set_draws(router, combine(7, torch.arange(6)))
    together = router(x).selected_BNE
    for first, last in ((0, 1), (1, 3), (3, 6)):
        set_draws(router, combine(7, torch.arange(first, last)))
        assert torch.equal(router(x[first:last]).selected_BNE, together[first:last])
        doubled = router(torch.cat([x[first:last]] * 2)).selected_BNE  # guidance
        assert torch.equal(doubled, torch.cat([together[first:last]] * 2))
    with pytest.raises(ValueError, match="draws of 3 samples of 5 tokens for a batch of 4"):
        router(x[:4])
    set_draws(router, None)
    assert not torch.equal(router(x).selected_BNE, router(x).selected_BNE)


def test_draws_leave_the_global_stream_alone():
    router = router_of("random")
    set_draws(router, combine(0, torch.arange(2)))
    state = torch.get_rng_state()
    router(torch.randn(2, 3, 6, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["two_stage", "query_norm"])
def test_fixed_heads_are_those_of_a_smaller_model(kind):
    """Only W_r differs: the heads behind the first k add nothing and learn nothing."""
    options = RouterOptions(kind=kind, selection="fixed")
    router = build_router(6, PLAN, options, xavier_init)
    x, q = torch.randn(3, 9, 6), torch.randn(3, 8, 9, 4)
    routing = router(x, q)
    assert (routing.gates_BNH[..., :4] > 0).all()
    assert (routing.gates_BNH[..., 4:] == 0).all()
    for weight in router.parameters():
        weight.data.requires_grad_()
    if kind == "two_stage":
        routing.gates_BNH.square().sum().backward()
        selected, others = router.routed.weight.grad.abs().split([2, 4])
        assert others.max() < 1e-4 * selected.max()


@pytest.mark.parametrize("selection", ["random", "fixed"])
def test_a_control_has_no_balance_loss_and_still_a_head_load(selection):
    router = router_of(selection)
    router(torch.randn(4, 50, 6))
    assert balance_loss(router) is None
    (load_E,) = head_load(router).values()
    assert load_E.sum() == pytest.approx(2)


def test_paper_gates_sum_to_at_most_one():
    options = RouterOptions(gate_scale="paper")
    router = build_router(6, PLAN, options, xavier_init)
    gates_BNH = router(torch.randn(4, 50, 6)).gates_BNH
    assert (gates_BNH.sum(-1) <= 1 + 1e-6).all()
    assert ((gates_BNH[..., 2:] > 0).sum(-1) == 2).all()


@pytest.mark.parametrize("family", ["vit", "dit"])
def test_evaluating_a_random_control_does_not_depend_on_the_batch(family, tmp_path):
    loads = []
    for batch in (3, 20):
        config = tiny(family, tmp_path, "heads.selection=random", f"eval.batch={batch}")
        typed = validate(config)
        model = build_model(typed.model, typed.heads, typed.seed).eval()
        loads.append(build_task(typed).look(model, 20, lambda *_: None).head_load)
    assert loads[0] == loads[1]
    assert min(loads[0]["overall"][0]) > 0


def random_llama():
    options = RouterOptions(selection="random")
    return moh.convert(moh.revert(moh_llama()), plan_of(), options)


def selections(model, keep, *args, **kwargs):
    """Selected heads (B, N, E) of each layer, tokens where ``keep`` is false left out."""
    found: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda _m, _i, routing: found.append(routing.selected_BNE))
        for _, router in routers(model)
    ]
    with torch.no_grad():
        output = model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return [selected[keep] for selected in found], output


def test_text_selects_by_its_prefix_in_any_batch_padding_and_cache():
    model, ids = random_llama(), tokens(1, 9)
    everything = torch.ones(1, 9, dtype=torch.bool)
    with draws_by_prefix(model, 0):
        alone, _ = selections(model, everything, ids)
        other = torch.cat([tokens(1, 9), ids])
        kept = torch.tensor([[False] * 9, [True] * 9])
        in_a_batch, _ = selections(model, kept, other)
        right = torch.cat([ids, torch.zeros(1, 3, dtype=torch.int64)], 1)
        padded, _ = selections(model, torch.arange(12)[None] < 9, right)
        left = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
        mask = (torch.arange(12)[None] >= 3).long()
        shifted, _ = selections(model, mask.bool(), left, attention_mask=mask)
        seen = mask[:, :8]
        first, output = selections(model, seen.bool(), left[:, :8], attention_mask=seen)
        cached = first
        for length in range(9, 13):
            step, output = selections(
                model,
                torch.ones(1, 1, dtype=torch.bool),
                left[:, length - 1 : length],
                attention_mask=mask[:, :length],
                cache=output.past_key_values,
            )
            cached = [torch.cat(pair) for pair in zip(cached, step, strict=True)]
    for found in (in_a_batch, padded, shifted, cached):
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    # Another word earlier is another text.
    changed = ids.clone()
    changed[0, 2] = (ids[0, 2] + 1) % 60 + 1
    with draws_by_prefix(model, 0):
        after, _ = selections(model, everything, changed)
    assert torch.equal(after[0][:2], alone[0][:2])
    assert not torch.equal(after[0][3:], alone[0][3:])


def test_a_stopped_random_control_goes_on_bit_for_bit_and_in_any_pieces(tmp_path, monkeypatch):
    more = ["heads.selection=random", "trainer.checkpoint_every=16"]
    whole = tiny("vit", tmp_path / "a", *more)
    run(whole)
    stopped = tiny("vit", tmp_path / "b", *more)
    update = Trainer._update

    def stopping(self, *how):
        if self.samples == 32 and not stopping.done:
            stopping.done = True
            raise RunError("stop")
        return update(self, *how)

    stopping.done = False
    monkeypatch.setattr(Trainer, "_update", stopping)
    with pytest.raises(RunError):
        run(stopped)
    run(stopped)
    monkeypatch.setattr(Trainer, "_update", update)
    first, second = weights(whole), weights(stopped)
    assert all(torch.equal(first[key], second[key]) for key in first)
    scores = [(folder_of(c) / "metrics.json").read_text() for c in (whole, stopped)]
    assert scores[0] == scores[1]
    pieces = tiny("vit", tmp_path / "c", *more, "trainer.device_batch=4")
    run(pieces)
    third = weights(pieces)
    for key, value in first.items():
        if value.is_floating_point():
            torch.testing.assert_close(third[key], value, rtol=1e-3, atol=1e-5)
    curve = (folder_of(whole) / "curves.jsonl").read_text().splitlines()
    assert json.loads(curve[0])["balance_loss"] is None


def test_nothing_is_drawn_where_nothing_is_random():
    model = moh_llama()
    with draws_by_prefix(model, 0) as nothing:
        assert nothing is None
        assert not model._forward_pre_hooks
    set_draws(model, combine(0, torch.arange(2)))
    assert all(router.draws is None for _, router in routers(model))
