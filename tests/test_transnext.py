"""TransNeXt and MoH-TransNeXt: against their definition, and what timm's users rely on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

import moh
from moh.backbones.published.vit import from_published, to_published
from moh.backbones.transnext import HEAD_BUDGETS, SIZES
from moh.backbones.transnext_attention import AggregatedAttention, TransNeXtAttention
from moh.backbones.transnext_positions import relative_coords
from moh.backbones.transnext_windows import add_window_values, window_dots
from moh.heads import Routing, routers

ROOT = Path(__file__).parents[1]
PARITY = ROOT.parent / "shared" / "parity"

TINY = {
    "img_size": 28,
    "in_chans": 1,
    "num_classes": 10,
    "patch_size": 2,
    "embed_dims": [16, 32],
    "num_heads": [2, 4],
    "depths": [1, 1],
    "mlp_ratios": [4, 4],
    "sr_ratios": [2, 1],
}
TINY_PLAN = moh.HeadPlan.from_groups([1, 1], [2, 4], [8, 8], [1, 1], [1, 2])


def tiny(plan=None, options=None, **overrides):
    torch.manual_seed(0)
    model = timm.create_model("transnext_micro", **{**TINY, **overrides})
    return model if plan is None else moh.convert(model, plan, options)


def images(height=28, width=28):
    return torch.randn(2, 1, height, width, generator=torch.Generator().manual_seed(1))


def all_gates_one(model):
    for _, router in routers(model):
        router.forward = lambda x, q: Routing(x.new_ones(*x.shape[:2], q.shape[1]), None, None)
    return model


# Counts measured on the released models.
@pytest.mark.parametrize(
    ("name", "parameters", "active", "heads"),
    [
        ("transnext_small", 49_741_564, None, None),
        ("transnext_base", 89_721_496, None, None),
        ("moh_transnext_small_75", 49_910_548, 323, 429),
        ("moh_transnext_small_80", 49_910_548, 343, 429),
        ("moh_transnext_base_75", 90_020_632, 441, 588),
        ("moh_transnext_base_50", 90_023_512, 294, 588),
    ],
)
def test_parameters_and_active_heads_are_those_of_the_released_models(
    name, parameters, active, heads
):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    plan = moh.head_plan(model)
    assert (plan and (plan.num_active, plan.num_heads)) == (active and (active, heads))


@pytest.mark.parametrize("name", HEAD_BUDGETS)
def test_recipes_and_registered_models_have_the_same_heads(name):
    recipe = OmegaConf.load(ROOT / f"conf/heads/{name.removeprefix('moh_')}.yaml")
    budget = HEAD_BUDGETS[name]
    assert tuple(recipe.num_shared) == budget["num_shared"]
    assert tuple(recipe.top_k) == budget["top_k"]
    assert tuple(recipe.layers) == SIZES[name.split("_")[2]]["depths"]


def parity_files():
    return sorted(PARITY.glob("vit_*.safetensors"))


@pytest.mark.skipif(not parity_files(), reason="no reference numbers beside the repository")
@pytest.mark.parametrize("path", parity_files(), ids=lambda path: path.stem)
def test_agrees_with_the_reference_implementation(path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from parity.vit import check
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    compared = set()
    for name, expected, ours in check(case, tensors):
        tolerance = 2e-4 if "grad" in name else 2e-5
        assert (expected - ours).abs().max() <= tolerance * expected.abs().max(), name
        compared.add(name)
    assert compared >= {name for name in tensors if not name.startswith(("weights/", "input/"))}


def naive_bias(layer, query, key, pretrain):
    """Position bias of one pair of places (row, column), (H,)."""
    coords = []
    for q, k, size in zip(query, key, pretrain, strict=True):
        d = (q - k) / (size - 1) * 8
        coords.append(math.copysign(math.log2(abs(d) + 1) / math.log2(8), d))
    coords = torch.tensor(coords, dtype=torch.float64)
    return layer.cpb_fc2(F.relu(layer.cpb_fc1(coords)))


def unit(x):
    return x / x.norm()


def randomised(layer):
    """All parameters away from their initial zeros and repetitions, in float64."""
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3
    return layer.double()


def gradients(output, layer, x):
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).double()
    loss = (output * target).sum()
    inputs = [x, *layer.parameters()]
    return torch.autograd.grad(loss, inputs, allow_unused=True)


def assert_same(actual, expected, layer, x):
    # The tables of coordinates and lengths are float32.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    pairs = zip(gradients(actual, layer, x), gradients(expected, layer, x), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_whole_grid_attention_is_its_definition_token_by_token():
    height, width, pretrain, H, K = 2, 3, (3, 4), 2, 4
    layer = randomised(TransNeXtAttention(H * K, H, (height, width), pretrain))
    x = torch.randn(1, height * width, H * K, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.qkv(x[0]).view(-1, 3, H, K).unbind(1)
    places = [(row, column) for row in range(height) for column in range(width)]
    tokens = []
    for i, place in enumerate(places):
        heads = []
        for h in range(H):
            scale = F.softplus(layer.temperature[h]) * math.log(len(places))
            query = (unit(q[i, h]) + layer.query_embedding[h, 0]) * scale[0, 0]
            logits = [
                query @ unit(k[j, h]) + naive_bias(layer, place, other, pretrain)[h]
                for j, other in enumerate(places)
            ]
            heads.append(torch.stack(logits).softmax(0) @ v[:, h])
        tokens.append(layer.proj(torch.cat(heads)))
    assert_same(layer(x)[0], torch.stack(tokens), layer, x)


def test_aggregated_attention_is_its_definition_token_by_token():
    height, width, sr, pretrain, H, K = 4, 6, 2, (5, 7), 2, 4
    layer = randomised(AggregatedAttention(H * K, H, (height, width), sr, pretrain))
    x = torch.randn(1, height * width, H * K, dtype=torch.float64, requires_grad=True)
    places = [(row, column) for row in range(height) for column in range(width)]
    at = {place: index for index, place in enumerate(places)}
    cells = [(row, column) for row in range(0, height, sr) for column in range(0, width, sr)]
    reduced = F.gelu(x[0] @ layer.sr.weight[:, :, 0, 0].T + layer.sr.bias)
    pooled = []
    for row, column in cells:
        inside = [at[row + a, column + b] for a in range(sr) for b in range(sr)]
        pooled.append(layer.norm(reduced[inside].mean(0)))
    q = layer.q(x[0]).view(-1, H, K)
    k, v = layer.kv(x[0]).view(-1, 2, H, K).unbind(1)
    pooled_k, pooled_v = layer.kv(torch.stack(pooled)).view(-1, 2, H, K).unbind(1)
    tokens = []
    for i, (row, column) in enumerate(places):
        window = [(row + a, column + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
        near = [(w, at[place]) for w, place in enumerate(window) if place in at]
        heads = []
        for h in range(H):
            scale = F.softplus(layer.temperature[h, 0, 0]) * math.log(len(near) + len(cells))
            query = (unit(q[i, h]) + layer.query_embedding[h, 0]) * scale
            logits = [query @ unit(k[j, h]) + layer.relative_pos_bias_local[h, w] for w, j in near]
            for cell, (top, left) in enumerate(cells):
                centre = (top + (sr - 1) / 2, left + (sr - 1) / 2)
                bias = naive_bias(layer, (row, column), centre, pretrain)[h]
                logits.append(query @ unit(pooled_k[cell, h]) + bias)
            weights = torch.stack(logits).softmax(0)
            output = weights[len(near) :] @ pooled_v[:, h]
            for weight, (w, j) in zip(weights, near, strict=False):
                learnt = unit(q[i, h]) @ layer.learnable_tokens[h, :, w]
                output = output + (weight + learnt + layer.learnable_bias[h, 0, w]) * v[j, h]
            heads.append(output)
        tokens.append(layer.proj(torch.cat(heads)))
    assert_same(layer(x)[0], torch.stack(tokens), layer, x)


@pytest.mark.parametrize(("grid", "window"), [((4, 5), 3), ((2, 3), 5), ((1, 1), 3), ((3, 3), 1)])
def test_windows_and_their_gradients_are_those_of_unfolded_neighbours(grid, window):
    """The gradients are written out by hand: against numbers, and against PyTorch's own."""
    torch.manual_seed(0)
    q, k, v, y = (torch.randn(2, *grid, 3, 4, dtype=torch.float64) for _ in range(4))
    weight = torch.randn(2, *grid, 3, window**2, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in (q, k, v, y, weight)]

    def unfolded(x):
        maps = x.flatten(3).permute(0, 3, 1, 2)
        found = F.unfold(maps, window, padding=window // 2)
        return found.view(2, 3, 4, window**2, *grid).permute(0, 4, 5, 1, 2, 3)

    dots = window_dots(q, k, window)
    added = add_window_values(y, weight, v, window)
    by_definition = torch.einsum("byxhk,byxhkw->byxhw", q, unfolded(k))
    sums = y + torch.einsum("byxhw,byxhkw->byxhk", weight, unfolded(v))
    torch.testing.assert_close(dots, by_definition)
    torch.testing.assert_close(added, sums)
    upstream = torch.randn_like(dots), torch.randn_like(added)
    ours = torch.autograd.grad([dots, added], tensors, upstream)
    theirs = torch.autograd.grad([by_definition, sums], tensors, upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    torch.autograd.gradcheck(lambda q, k: window_dots(q, k, window), (q, k))
    torch.autograd.gradcheck(lambda *xs: add_window_values(*xs, window), (y, weight, v))


def test_relative_coordinates_keep_their_scale_at_another_image_size():
    small, _ = relative_coords((7, 7), (7, 7), (7, 7))
    large, _ = relative_coords((14, 14), (14, 14), (7, 7))
    assert {tuple(row) for row in small.tolist()} < {tuple(row) for row in large.tolist()}
    assert small.max() == pytest.approx(math.log2(9) / 3)


def test_keys_lie_where_average_pooling_puts_them():
    (height, width), pooled, pretrain = (5, 7), (2, 3), (9, 9)
    rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(7.0), indexing="ij")
    queries = torch.stack([rows, columns])
    keys = F.adaptive_avg_pool2d(queries, pooled)
    d = (queries.flatten(1)[:, :, None] - keys.flatten(1)[:, None]) * 8 / (pretrain[0] - 1)
    table, index = relative_coords((height, width), pooled, pretrain)
    expected = d.sign() * (d.abs() + 1).log2() / math.log2(8)
    torch.testing.assert_close(table[index], expected.flatten(1).T)


def test_each_relative_coordinate_is_evaluated_once():
    table, index = relative_coords((12, 9), (5, 3), (12, 9))
    assert len({tuple(row) for row in table.tolist()}) == len(table)
    assert index.unique().tolist() == list(range(len(table)))


def test_all_gates_one_equals_mha_bit_for_bit():
    torch.testing.assert_close(
        all_gates_one(tiny(TINY_PLAN))(images()), tiny()(images()), rtol=0, atol=0
    )


def test_gates_weight_the_heads_before_the_output_projection():
    model = tiny(TINY_PLAN)
    for layer in (model.block1[0].attn, model.block2[0].attn):
        x = torch.randn(2, math.prod(layer.grid), layer.proj.in_features)
        y_BNHK, q_BHNK = layer.heads(x)
        gates = layer.router(x, q_BHNK).gates_BNH
        expected = layer.proj((gates.unsqueeze(-1) * y_BNHK).flatten(2))
        torch.testing.assert_close(layer(x), expected)
        assert not torch.allclose(layer(x), layer.project(y_BNHK))


def test_query_norm_routes_on_the_query_before_normalisation():
    model = tiny(TINY_PLAN, moh.RouterOptions(kind="query_norm"))
    queries = {}
    for name, router in routers(model):
        router.register_forward_pre_hook(lambda _, args, name=name: queries.update({name: args}))
    model(images())
    for name, query in (("block1.0", "q"), ("block2.0", "qkv")):
        x, q_BHNK = queries[f"{name}.attn.router"]
        attn = model.get_submodule(f"{name}.attn")
        projected = attn.get_submodule(query)(x)[..., : x.shape[-1]]
        expected = projected.unflatten(-1, (attn.num_heads, attn.head_dim)).transpose(1, 2)
        torch.testing.assert_close(q_BHNK, expected)


def test_a_registered_moh_model_is_its_baseline_plus_routers():
    small = {**TINY, "embed_dims": [24, 48, 96, 192], "num_heads": [3, 6, 12, 24]}
    small |= {"depths": [1, 1, 1, 1], "mlp_ratios": [2] * 4, "sr_ratios": [4, 2, 1, 1]}
    torch.manual_seed(3)
    baseline = timm.create_model("transnext_small", **small)
    following = torch.rand(4)
    torch.manual_seed(3)
    model = timm.create_model("moh_transnext_small_75", **small)
    assert torch.equal(torch.rand(4), following)
    weights = model.state_dict()
    for name, value in baseline.state_dict().items():
        assert torch.equal(weights.pop(name), value), name
    assert weights
    assert all(".router." in name for name in weights)
    torch.manual_seed(4)
    other = timm.create_model("moh_transnext_small_75", **small).state_dict()
    assert not any(torch.equal(other[name], value) for name, value in weights.items())


def test_published_names_round_trip_and_only_router_names_differ():
    ours = tiny(TINY_PLAN).state_dict()
    published = to_published(ours)
    renamed = {name.replace("attn.wg", "attn.router") for name in published if "attn.wg" in name}
    assert len(renamed) == sum(".router." in name for name in ours)
    assert {name for name in published if ".wg" not in name} == {
        name for name in ours if ".router." not in name
    }
    back = from_published(published | {"block1.0.attn.relative_pos_index": torch.zeros(3)})
    assert list(back) == list(ours)
    assert all(back[name] is value for name, value in ours.items())


def test_a_published_file_loads_through_timm(tmp_path):
    model = timm.create_model("transnext_tiny", **TINY)
    torch.save({"model": to_published(model.state_dict())}, tmp_path / "published.pth")
    loaded = timm.create_model(
        "transnext_tiny",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "published.pth"), "num_classes": 10},
        **{**TINY, "pretrain_size": 28},
    )
    assert torch.equal(loaded.eval()(images()), model.eval()(images()))


def test_published_weights_keep_their_scale_at_another_image_size(tmp_path):
    three = {**TINY, "in_chans": 3}
    model = timm.create_model("transnext_tiny", **three)
    torch.save(model.state_dict(), tmp_path / "published.pth")
    source = {"file": str(tmp_path / "published.pth"), "num_classes": 10}
    loaded = timm.create_model(
        "transnext_tiny", pretrained=True, pretrained_cfg_overlay=source, **three
    )
    assert loaded.block1[0].attn.pretrain_grid == (112, 112)


@pytest.mark.parametrize("kind", ["mha", "two_stage", "query_norm"])
def test_compiles_without_a_graph_break(kind):
    options = None if kind == "mha" else moh.RouterOptions(kind=kind)
    model = tiny(None if kind == "mha" else TINY_PLAN, options)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images()), model(images()))
    if kind != "mha":
        loss = moh.balance_loss(model)
        model(images())
        torch.testing.assert_close(loss, moh.balance_loss(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routes_in_float32_under_autocast(dtype):
    model = tiny(TINY_PLAN)
    routings = []
    for _, router in routers(model):
        router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    full = model(images())
    with torch.autocast("cpu", dtype=dtype):
        half = model(images())
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.02)
    assert {r.gates_BNH.dtype for r in routings} == {torch.float32}
    assert moh.balance_loss(model).dtype == torch.float32


def test_recomputed_blocks_give_the_same_gradients_and_balance_loss():
    def train(checkpointing):
        plan = moh.HeadPlan.from_groups([1, 2], [2, 4], [8, 8], [1, 1], [1, 2])
        model = tiny(plan, depths=[1, 2], drop_path_rate=0.3)
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(7)
        output = model.train()(images())
        balance = moh.balance_loss(model)
        (output.square().mean() + balance).backward()
        return balance.detach(), {name: p.grad for name, p in model.named_parameters()}

    kept, recomputed = train(False), train(True)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)
    assert recomputed[1]["block2.1.attn.router.routed.weight"].abs().sum() > 0
