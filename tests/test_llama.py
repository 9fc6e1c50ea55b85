"""MoH in LLaMA: equal to its definition, and untouched by padding, caching and checkpointing."""

from __future__ import annotations

import copy
import math

import naive
import pytest
import torch
from tiny_llama import DIM, HEADS, ROUTERS, SIZES, close, llama, moh_llama, plan_of, tokens
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

import moh
from moh.backbones.llama import MoHLlamaConfig
from moh.heads import routers


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("num_shared", [0, 1, 3])
def test_gates_of_one_are_llama_bit_for_bit_with_gradients(num_shared, implementation):
    baseline = llama(attn_implementation=implementation)
    options = moh.RouterOptions(kind="query_norm", straight_through=False)
    ours = moh.convert(copy.deepcopy(baseline), plan_of(num_shared, HEADS - num_shared), options)
    ids = tokens(3, 10)
    for model in (baseline, ours):
        model(ids, labels=ids).loss.backward()
    assert torch.equal(ours(ids).logits, baseline(ids).logits)
    grads = dict(baseline.named_parameters())
    assert all(torch.equal(p.grad, grads[name].grad) for name, p in ours.named_parameters())


def test_conversion_keeps_every_parameter_and_the_random_stream():
    baseline = llama()
    before = {name: value.clone() for name, value in baseline.state_dict().items()}
    stream = torch.get_rng_state()
    ours = moh.convert(baseline, plan_of())
    assert torch.equal(torch.get_rng_state(), stream)
    after = ours.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(".router." in name for name in set(after) - set(before))


def test_revert_gives_back_classes_config_and_logits():
    baseline, ids = llama(), tokens(2, 7)
    logits, config = baseline(ids).logits, baseline.config.to_dict()
    ours = moh.revert(moh.convert(baseline, plan_of()))
    assert type(ours) is LlamaForCausalLM
    assert type(ours.model) is LlamaModel
    assert type(ours.model.layers[0].self_attn) is LlamaAttention
    assert type(ours.config) is LlamaConfig
    assert ours.config.to_dict() == config
    assert ours.model.layers[1].self_attn.config is ours.config
    assert torch.equal(ours(ids).logits, logits)


def test_converting_a_model_leaves_another_with_the_same_config_object_alone():
    config = LlamaConfig(**SIZES)
    baseline, ours = LlamaForCausalLM(config), moh.convert(LlamaForCausalLM(config), plan_of())
    assert type(baseline.config) is LlamaConfig
    assert type(ours.config) is MoHLlamaConfig
    assert ours.model.layers[0].self_attn.config is ours.config


def naive_attention(layer, x_ND, positions, options):
    """One sample through one attention layer by its definition, causal; with its routing."""

    def split(weight):
        return (x_ND @ weight.T).unflatten(-1, (-1, DIM)).transpose(0, 1)

    def rotate(x_HNK):
        angle_NK = positions[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
        a, b = x_HNK.chunk(2, dim=-1)
        cos, sin = angle_NK.cos(), angle_NK.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    q, k, v = (split(getattr(layer, f"{name}_proj").weight) for name in "qkv")
    plan, router = layer.router.plan, layer.router
    routing = []
    for n in range(len(x_ND)):
        if options.kind == "query_norm":
            routing.append(naive.query_norm_gates(q[:, n], plan.num_shared, plan.top_k, True))
        else:
            weights = [getattr(router, name) for name in ("routed", "stage", "shared")]
            routing.append(
                naive.two_stage_gates(
                    x_ND[n],
                    plan.num_shared,
                    plan.num_routed,
                    plan.top_k,
                    *(None if linear is None else linear.weight for linear in weights),
                    "released",
                )
            )
    q, k = rotate(q), rotate(k)
    rows = []
    for n in range(len(x_ND)):
        heads = []
        for h in range(HEADS):
            group = h * len(k) // HEADS
            logits = [q[h, n] @ k[group, m] / math.sqrt(DIM) for m in range(n + 1)]
            weights = naive.softmax(logits)
            mixed = sum(w * v[group, m] for m, w in enumerate(weights))
            heads.append(routing[n][0][h] * mixed)
        rows.append(torch.cat(heads) @ layer.o_proj.weight.T)
    return torch.stack(rows), routing


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize(("num_shared", "top_k"), [(0, 1), (1, 2), (2, 1)])
def test_a_layer_equals_the_naive_version_with_gradients(kind, num_shared, top_k):
    model = moh_llama(kind, plan_of(num_shared, top_k))
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 5, HEADS * DIM, requires_grad=True)
    positions = torch.arange(5)
    rotary = model.model.rotary_emb(x, positions[None])
    target = torch.randn(5, HEADS * DIM)
    ours, _ = layer(x, rotary)
    loss = F.mse_loss(ours[0], target) + 0.3 * layer.router.balance_loss()
    inputs = [x, *layer.parameters()]
    grads = torch.autograd.grad(loss, inputs)

    theirs, routing = naive_attention(layer, x[0], positions, ROUTERS[kind])
    aux = naive.balance_loss([p for _, p, _ in routing], [s for _, _, s in routing], "released")
    expected = torch.autograd.grad(F.mse_loss(theirs, target) + 0.3 * aux, inputs)
    close(ours[0], theirs)
    for grad, wanted in zip(grads, expected, strict=True):
        close(grad, wanted, 1e-4)


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding_changes_neither_logits_nor_statistics(kind, implementation):
    model = moh_llama(kind, attn_implementation=implementation)
    lengths = [1, 2, 3, 5, 8, 9, 11, 12]
    sequences = [tokens(length) for length in lengths]
    sums = torch.zeros(2, 2, HEADS - 1)
    singles = []
    for sequence in sequences:
        singles.append(model(sequence[None]).logits[0])
        sums += torch.stack([torch.stack(r.statistics[:2]) for _, r in routers(model)])
    losses = []
    for filler in (0, 7):
        ids = torch.full((8, 12), filler)
        mask = torch.zeros(8, 12, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, -len(sequence) :], mask[row, -len(sequence) :] = sequence, 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        for row, single in enumerate(singles):
            close(logits[row, -len(single) :], single, 1e-4)
        statistics = [router.statistics for _, router in routers(model)]
        close(torch.stack([torch.stack(s[:2]) for s in statistics]), sums, 1e-4)
        assert all(s.num_tokens == sum(lengths) for s in statistics)
        losses.append(moh.balance_loss(model))
    close(losses[0], losses[1])


@pytest.mark.parametrize("kind", ROUTERS)
def test_cached_steps_equal_one_full_forward(kind):
    model, ids = moh_llama(kind), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    full = model(ids, attention_mask=mask, position_ids=positions).logits
    pieces, cache = [], None
    for start, stop in ((0, 4), (4, 5), (5, 7), (7, 9)):
        out = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            cache=cache,
            use_cache=True,
        )
        pieces.append(out.logits)
        cache = out.cache
        assert all(r.statistics.num_tokens == mask[:, start:stop].sum() for _, r in routers(model))
    kept = mask.bool()
    close(torch.cat(pieces, dim=1)[kept], full[kept])


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_mask_that_serves_again_changes_no_statistics(kind):
    model, ids = moh_llama(kind), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        model(ids, attention_mask=mask)
        mask.fill_(True)
    assert [router.statistics.num_tokens for _, router in routers(model)] == [15, 15]


@pytest.mark.parametrize("kind", ROUTERS)
def test_generate_from_padded_prompts_equals_greedy_steps_without_cache(kind):
    model = moh_llama(kind)
    prompts = [tokens(3), tokens(6)]
    ids = torch.stack([F.pad(prompt, (6 - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([F.pad(torch.ones_like(p), (6 - len(p), 0)) for p in prompts])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for prompt, row in zip(prompts, made, strict=True):
        for _ in range(5):
            prompt = torch.cat([prompt, model(prompt[None]).logits[0, -1:].argmax(-1)])
        assert torch.equal(row[6:], prompt[-5:])


@pytest.mark.parametrize("kind", ROUTERS)
def test_activation_checkpointing_changes_no_gradient(kind):
    plain = moh_llama(kind).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.activation_checkpointing_enable()
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for model in (plain, checkpointed):
        loss = model(ids, attention_mask=mask, labels=ids).loss
        (loss + 0.5 * moh.balance_loss(model)).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in checkpointed.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name
    close(moh.balance_loss(checkpointed), moh.balance_loss(plain))


def test_checkpointing_that_would_lose_the_balance_loss_is_refused():
    with pytest.raises(ValueError, match="use_reentrant=False"):
        moh_llama().activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"), pytest.warns(FutureWarning):
        moh_llama().gradient_checkpointing_enable({"use_reentrant": True})


def test_a_zero_query_gives_no_nan():
    model = moh_llama("query_norm").train()
    torch.nn.init.zeros_(model.model.layers[0].self_attn.q_proj.weight)
    ids = tokens(2, 6)
    (model(ids, labels=ids).loss + moh.balance_loss(model)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_attention_implementation_can_be_switched(kind):
    model, ids = moh_llama(kind), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    logits = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    out = model(ids, attention_mask=mask, output_attentions=True)
    assert model.config._attn_implementation == "eager"
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, HEADS, 7, 7)] * 2
    close(out.logits[mask.bool()], logits[mask.bool()])


@pytest.mark.parametrize("kind", ROUTERS)
def test_routing_is_float32_in_bfloat16_models_and_under_autocast(kind):
    ids = tokens(2, 7)
    half = moh_llama(kind).to(torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16
    assert moh.balance_loss(half).dtype == torch.float32
    model = moh_llama(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ids).logits.isfinite().all()
    statistics = next(routers(model))[1].statistics
    assert statistics.probs_sum_E.dtype == torch.float32
    close(statistics.probs_sum_E.sum(), torch.tensor(14.0))


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_model_compiles_without_graph_breaks(kind):
    model, ids = moh_llama(kind, plan_of(depth=1), num_hidden_layers=1), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    expected = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    loss = moh.balance_loss(model)
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    ours = compiled(ids, attention_mask=mask, use_cache=False).last_hidden_state
    close(ours, expected)
    close(moh.balance_loss(model), loss)
