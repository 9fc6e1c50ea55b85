"""Generation with cached keys: equal to full passes, by one dispatch, without moving the cache."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_execution import FAMILIES, converted
from tiny_llama import HEADS, close, llama, moh_llama, plan_of, tokens
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import moh
import moh.backbones.llama as llama_module
from moh.backbones.llama_cache import RoomyLayer
from moh.heads import one_query

EXECUTIONS = ("dense", "sparse", "auto")
KEY_HEADS = (1, 2, HEADS)


def growing(config):
    return DynamicCache(config=config)


def without_layers(_):
    return DynamicCache()


def static(config):
    return StaticCache(config=config, max_cache_len=24)


CACHES = {"none": lambda _: None, "growing": growing, "lazy": without_layers, "static": static}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def model_of(execution, key_heads=2, kind="two_stage", plan=None):
    model = moh_llama(kind, plan, num_key_value_heads=key_heads)
    moh.set_execution(model, execution)
    return model


def greedy(model, prompt, steps):
    """The continuation by full passes of dense execution."""
    other = copy.deepcopy(model)
    moh.set_execution(other, "dense")
    with torch.no_grad():
        for _ in range(steps):
            prompt = torch.cat([prompt, other(prompt[None]).logits[0, -1:].argmax(-1)])
    return prompt


@pytest.mark.parametrize("key_heads", KEY_HEADS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_cached_steps_equal_a_full_pass(execution, cache, key_heads):
    """Also after a prompt of several tokens and pieces of several tokens behind cached ones."""
    model, ids = model_of(execution, key_heads), tokens(3, 15)
    with torch.no_grad():
        dense = copy.deepcopy(model)
        moh.set_execution(dense, "dense")
        full = dense(ids, use_cache=False).logits
        held, pieces = CACHES[cache](model.config), []
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11), (11, 12), (12, 13), (13, 15)):
            out = model(ids[:, start:stop], cache=held, use_cache=True)
            held = out.cache
            pieces.append(out.logits)
    close(torch.cat(pieces, dim=1), full, 3e-5)


@pytest.mark.parametrize("key_heads", [1, HEADS])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_generation_from_padded_prompts_equals_full_passes(execution, cache, key_heads):
    model = model_of(execution, key_heads)
    prompts = [tokens(3), tokens(6), tokens(5)]
    ids = torch.stack([F.pad(prompt, (6 - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([F.pad(torch.ones_like(p), (6 - len(p), 0)) for p in prompts])
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, cache_implementation=cache
    )
    for prompt, row in zip(prompts, made, strict=True):
        assert torch.equal(row[6:], greedy(model, prompt, 6)[-6:])


@pytest.mark.parametrize("kind", ["two_stage", "query_norm"])
@pytest.mark.parametrize("execution", ["sparse", "auto"])
def test_every_way_to_generate_equals_dense(execution, kind):
    """Beams are reordered, guesses of a small model and of the prompt are taken back."""
    model, ids = model_of("dense", HEADS, kind), tokens(2, 7)
    ways = {
        "beams": (ids, {"num_beams": 3, "num_return_sequences": 2}),
        "assistant": (ids[:1], {"assistant_model": model_of("sparse")}),
        "prompt lookup": (ids[:1].repeat(1, 2), {"prompt_lookup_num_tokens": 3}),
    }
    for name, (prompt, options) in ways.items():
        texts = []
        for how in ("dense", execution):
            moh.set_execution(model, how)
            texts.append(model.generate(prompt, max_new_tokens=9, do_sample=False, **options))
        assert torch.equal(*texts), name
        if "num_beams" not in options:
            assert torch.equal(texts[0][0], greedy(model, prompt[0], 9)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_attends_through_the_one_dispatch(family, monkeypatch):
    """But TransNeXt's windows, of a few dozen keys, which are always dense."""
    module = {
        "vit": "moh.backbones.vit",
        "transnext": "moh.backbones.transnext_attention",
        "dit": "moh.backbones.dit_attention",
        "llama": "moh.backbones.llama",
    }[family]
    model, arguments = converted(family)
    layers = [m for m in model.modules() if "router" in dict(m.named_children())]
    expected = [m.router for m in layers if type(m).__name__ != "MoHAggregatedAttention"]
    for execution in EXECUTIONS:
        moh.set_execution(model, execution)
        seen = []

        def spy(router, *rest, seen=seen, **named):
            seen.append(router)
            return moh.heads.execution.attend(router, *rest, **named)

        monkeypatch.setattr(f"{module}.attend", spy)
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                model(*arguments)
        assert expected
        assert [id(router) for router in seen] == [id(router) for router in expected] * 2


def test_a_step_of_sparse_generation_reads_active_key_heads_alone(monkeypatch):
    """What was cached of the others may be anything."""
    model = model_of("sparse", HEADS, plan=plan_of(1, 1))
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 1, layer.q_proj.in_features)
    rotary = model.model.rotary_emb(x, torch.tensor([[5]]))
    keys, values = torch.randn(2, 1, HEADS, 5, 8)
    with torch.no_grad():
        found = []
        idle = layer.router(x).gates_BNH[0, 0] == 0
        assert idle.sum() == HEADS - 2
        for spoilt in (False, True):
            cache = DynamicCache()
            k = keys.clone()
            if spoilt:
                k[:, idle] = float("nan")
            cache.update(k, values, 0)
            found.append(layer(x, rotary, cache=cache)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("per_head_mask", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4, 8])
@pytest.mark.parametrize("layout", ["cache", "tokens"])
@pytest.mark.parametrize("masked", ["no", "one", "samples", "heads"])
def test_one_query_equals_pytorchs_attention(masked, layout, key_heads, per_head_mask):
    """Any set of active heads, any layout, any mask that broadcasts."""
    B, H, M, K = 3, 8, 11, 16
    q = torch.randn(B, H, 1, K)
    k, v = torch.randn(2, B, key_heads, M, K)
    if layout == "tokens":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    shape = {"no": None, "one": (1, M), "samples": (B, 1, 1, M), "heads": (B, H, 1, M)}[masked]
    mask = None if shape is None else torch.rand(shape) < 0.8
    if mask is not None:
        mask[..., 0] = True
        if per_head_mask:
            mask = torch.zeros(shape).masked_fill_(~mask, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    for _ in range(4):
        weights = (torch.rand(B, 1, 6) < 0.5).float()
        load = one_query.Load(weights)
        with torch.no_grad():
            y = one_query.attend_once(q, k, v, load, mask, None)
        active = torch.cat([torch.ones(B, 1, 2), weights], dim=-1).unsqueeze(-1).bool()
        close(y * active, expected.transpose(1, 2) * active)


@pytest.mark.parametrize("count", range(1, 9))
def test_parts_are_the_active_heads_each_once(count):
    for number in range(2**count):
        active = [bool(number >> bit & 1) for bit in range(count)]
        parts = list(one_query._parts(active))
        heads = [head for part in parts for head in range(count)[part]]
        assert sorted(heads) == [head for head in range(count) if active[head]]
        assert sum(len(range(count)[part]) % 2 for part in parts) <= 1


def rows(*shape):
    return torch.randn(*shape)


def filled(length=5, batch=2):
    layer = RoomyLayer()
    keys, values = torch.randn(2, batch, 2, length, 4)
    layer.update(keys, values)
    return layer, keys, values


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("no_gradients")
def test_new_rows_are_written_in_place_and_views_keep_their_contents():
    layer, keys, values = filled()
    place, moves = layer.keys.data_ptr(), 0
    for _ in range(300):
        before, contents = layer.keys, layer.keys.clone()
        new = torch.randn(2, 2, 2, 1, 4)
        held = layer.update(*new)
        keys, values = torch.cat([keys, new[0]], -2), torch.cat([values, new[1]], -2)
        assert torch.equal(before, contents)
        assert held[0] is layer.keys
        moves += layer.keys.data_ptr() != place
        place = layer.keys.data_ptr()
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values, values)
    assert layer.get_seq_length() == 305
    assert 0 < moves < 6


CHANGES = {
    "crop": lambda layer: layer.crop(-2),
    "crop all": lambda layer: layer.crop(-5),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([-1])),
    "reset": lambda layer: layer.reset(),
    "first sample": lambda layer: vars(layer).update(keys=layer.keys[:1], values=layer.values[:1]),
    "last rows": lambda layer: vars(layer).update(
        keys=layer.keys[:, :, 2:], values=layer.values[:, :, 2:]
    ),
    "double": lambda layer: vars(layer).update(
        keys=layer.keys.double(), values=layer.values.double()
    ),
}


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_does_what_the_librarys_does(change):
    ours, keys, values = filled()
    theirs = DynamicLayer()
    theirs.update(keys, values)
    for _ in range(3):
        for layer in (ours, theirs):
            CHANGES[change](layer)
        batch = theirs.keys.shape[0] if theirs.get_seq_length() else 2
        new = torch.randn(2, batch, 2, 5, 4)
        for one, other in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_a_layer_grow_apart(copied):
    layer, keys, _ = filled()
    other = copied(layer)
    new = torch.randn(2, 2, 2, 1, 4)
    for one, added in ((layer, new), (other, -new), (layer, new), (other, -new)):
        one.update(*added)
    assert torch.equal(layer.keys, torch.cat([keys, new[0], new[0]], -2))
    assert torch.equal(other.keys, torch.cat([keys, -new[0], -new[0]], -2))


@pytest.mark.usefixtures("no_gradients")
def test_taking_tokens_back_moves_nothing():
    layer, *_ = filled()
    place = layer.keys.data_ptr()
    for _ in range(40):
        layer.update(*torch.randn(2, 2, 2, 3, 4))
        layer.crop(-3)
    assert layer.keys.data_ptr() == place


def test_gradients_pass_through_cached_steps():
    """A prefix that is trained, then a step: as the library's cache gives them."""
    model, ids = model_of("sparse"), tokens(2, 9)
    found = []
    for held in (None, DynamicCache()):
        model.zero_grad()
        if held is None:
            logits = model(ids, use_cache=False).logits
        else:
            parts = ids.split([4, 1, 4], dim=1)
            logits = torch.cat([model(part, cache=held).logits for part in parts], dim=1)
        logits.square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-4)


def test_a_cache_made_without_gradients_serves_a_step_with_them_and_another_mode():
    model, ids = model_of("auto"), tokens(1, 9)
    full = model(ids, use_cache=False).logits
    pieces, held = [], DynamicCache()
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.no_grad)
    for mode, part in zip(modes, ids.split([3, 2, 2, 2], dim=1), strict=True):
        with mode():
            pieces.append(model(part, cache=held).logits.detach().clone())
    close(torch.cat(pieces, dim=1), full, 3e-5)


@pytest.mark.usefixtures("no_gradients")
def test_only_growing_caches_are_given_room():
    model, ids = model_of("auto"), tokens(1, 4)

    class Own(DynamicLayer):
        pass

    own, used = DynamicCache(config=model.config), DynamicCache(config=model.config)
    own.layers = [Own(), Own()]
    for layer in range(2):
        used.update(rows(1, 2, 3, 8), rows(1, 2, 3, 8), layer)
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    llama_module.make_room(offloaded, 0)
    assert type(offloaded.layers[0]) is DynamicLayer
    for cache, kind in ((own, Own), (used, RoomyLayer), (DynamicCache(), RoomyLayer)):
        model(ids, cache=cache)
        assert {type(layer) for layer in cache.layers} == {kind}
    assert {type(layer) for layer in model(ids).cache.layers} == {RoomyLayer}
    plain = llama()
    assert {type(layer) for layer in plain(ids).cache.layers} == {DynamicLayer}
