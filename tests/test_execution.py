"""Dense and sparse execution in every backbone: equal numbers, one choice, no graph breaks."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from tiny_llama import llama, moh_llama, plan_of, tokens

import moh
import moh.backbones.transnext
from moh.backbones.build import build_model
from moh.backbones.dit import DiT
from moh.cli import compose_config
from moh.config import HeadsConfig
from moh.evaluation.cost import describe_model
from moh.heads import (
    LayerPlan,
    RouterOptions,
    Routing,
    attend,
    build_router,
    execution_of,
    thresholds,
)
from moh.heads.thresholds import Shape, kind_of_work, sparse_is_faster
from moh.runner import config_hash
from moh.validation import validate


def vit():
    torch.manual_seed(0)
    arguments = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 5}
    arguments |= {"embed_dim": 32, "depth": 1, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    return model, (torch.randn(2, 1, 32, 32),)


def transnext():
    torch.manual_seed(0)
    model = timm.create_model(
        "transnext_micro",
        img_size=28,
        in_chans=1,
        num_classes=10,
        patch_size=2,
        embed_dims=[16, 32],
        num_heads=[2, 4],
        depths=[1, 1],
        mlp_ratios=[4, 4],
        sr_ratios=[2, 1],
    )
    return model, (torch.randn(2, 1, 28, 28),)


def dit():
    torch.manual_seed(0)
    model = DiT(
        input_size=8,
        patch_size=2,
        in_channels=2,
        hidden_size=32,
        depth=1,
        num_heads=4,
        num_classes=5,
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model, (torch.randn(2, 2, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 4]))


def language():
    torch.manual_seed(0)
    return llama(), (tokens(2, 17),)


FAMILIES = {"vit": vit, "transnext": transnext, "dit": dit, "llama": language}


def converted(family, **options):
    model, arguments = FAMILIES[family]()
    plan = moh.HeadPlan.from_ratio(*zip(*moh.head_shapes(model), strict=True), ratio=0.5)
    return moh.convert(model, plan, RouterOptions(**options)), arguments


def result(model, arguments):
    """Output, balance loss and all gradients of a training step."""
    model.zero_grad()
    torch.manual_seed(0)
    out = model(*arguments)
    out = getattr(out, "logits", out)
    balance = moh.balance_loss(model)
    (out.square().mean() + 0.1 * balance).backward()
    return [out, balance, *[p.grad for p in model.parameters() if p.requires_grad]]


def same(ours, theirs, tolerance=2e-5):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["two_stage", "query_norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_training_equals_dense_training(family, kind):
    model, arguments = converted(family, kind=kind)
    moh.set_execution(model, "dense")
    dense = result(model, arguments)
    moh.set_execution(model, "sparse")
    same(result(model, arguments), dense)
    moh.set_execution(model, "auto")
    assert torch.equal(result(model, arguments)[0], dense[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_gating_in_place_changes_no_bit(family):
    model, arguments = converted(family, execution="dense")
    model.eval().requires_grad_(False)
    outs = [model(*arguments)]
    with torch.no_grad():
        outs.append(model(*arguments))
    one, other = (getattr(out, "logits", out) for out in outs)
    assert torch.equal(one, other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_sparse_llama_keeps_the_padding_mask(side):
    model = moh_llama()
    ids, mask = tokens(3, 21), torch.ones(3, 21, dtype=torch.int64)
    for row, pad in enumerate((0, 4, 9)):
        mask[row, :pad] = 0
    if side == "right":
        mask = mask.flip(1)
    moh.set_execution(model, "dense")
    dense = model(ids, attention_mask=mask).logits
    moh.set_execution(model, "sparse")
    sparse = model(ids, attention_mask=mask).logits
    seen = mask.bool()
    torch.testing.assert_close(sparse[seen], dense[seen], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["two_stage", "query_norm"])
def test_sparse_generation_with_a_cache_equals_dense(kind):
    model = moh_llama(kind)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    texts = {}
    for execution in ("dense", "sparse"):
        moh.set_execution(model, execution)
        texts[execution] = model.generate(ids, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(texts["sparse"], texts["dense"])


def test_sparse_needs_pytorchs_attention():
    model = moh_llama()
    moh.set_execution(model, "sparse")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="sparse needs attn_implementation='sdpa', not 'eager'"):
        model(tokens(1, 5))
    moh.set_execution(model, "auto")
    model(tokens(1, 5))


def test_execution_is_saved_with_a_model(tmp_path):
    model = moh.convert(llama(), plan_of(), RouterOptions(execution="sparse"))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert {r.options.execution for _, r in moh.heads.routers(again)} == {"sparse"}


# DiT and LLaMA as they are by default: in their own tests.
@pytest.mark.parametrize(
    ("family", "execution"),
    [("vit", "auto"), ("transnext", "auto"), *[(family, "sparse") for family in FAMILIES]],
)
def test_compilation_meets_no_graph_break(family, execution):
    model, arguments = converted(family, execution=execution)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    one, other = compiled(*arguments), model(*arguments)
    same([getattr(one, "logits", one)], [getattr(other, "logits", other)])


@pytest.mark.parametrize("num_heads", [4, 8])  # one shared head, two of them
@pytest.mark.parametrize("execution", ["dense", "sparse", "auto"])
def test_inference_of_a_wide_model_compiles_whole(execution, num_heads):
    """Its routers take another path than narrow ones and those that train."""
    torch.manual_seed(0)
    arguments = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 5}
    arguments |= {"embed_dim": 256, "depth": 1, "num_heads": num_heads}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    plan = moh.HeadPlan.from_ratio(*zip(*moh.head_shapes(model), strict=True), ratio=0.75)
    moh.set_execution(moh.convert(model, plan), execution)
    images = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), model(images))


def test_a_compiled_training_step_equals_an_eager_one():
    """Forward and backward graph of a sparse model; the balance loss is read from it as ever."""
    model, arguments = converted("vit", execution="sparse")
    expected = result(model, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    out = compiled(*arguments)
    balance = moh.balance_loss(model)
    (out.square().mean() + 0.1 * balance).backward()
    same([out, balance, *[p.grad for p in model.parameters() if p.requires_grad]], expected)


def normal_init(weight, generator):
    return torch.nn.init.normal_(weight, generator=generator)


def router_of(num_heads=8, num_shared=2, top_k=2, **options):
    plan = LayerPlan(num_heads, 64, num_shared, top_k)
    return build_router(16, plan, RouterOptions(**options), normal_init)


@pytest.fixture
def least_keys(monkeypatch):
    """Thresholds of the tests' own."""
    found = {
        "head_dim": 64,
        "devices": {
            "cpu": {
                "least_keys": {
                    "bidirectional inference": {
                        "20": {"0.1": None, "0.25": 1600, "0.5": 100},
                        "80": {"0.25": 800, "0.5": 50},
                    },
                    "bidirectional inference, uneven": {"20": {"0.5": 300}},
                    "causal training": {"20": {"0.5": 300}},
                    "one query": {"20": {"0.5": 4000}},
                }
            }
        },
    }
    monkeypatch.setattr(thresholds, "MEASURED", found)


@pytest.mark.usefixtures("least_keys")
@pytest.mark.parametrize(
    ("shape", "faster"),
    [
        (Shape("cpu", 100, 100, 64, 8, 0.5, False, False), True),
        (Shape("cpu", 99, 99, 64, 8, 0.5, False, False), False),
        (Shape("cpu", 99, 99, 64, 80, 0.5, False, False), True),
        (Shape("cpu", 49, 49, 64, 80, 0.5, False, False), False),
        (Shape("cpu", 100, 100, 64, 8, 0.7, False, False), True),
        # Half way between a quarter and a half: the geometric mean of 1600 and 100.
        (Shape("cpu", 401, 401, 64, 8, 0.375, False, False), True),
        (Shape("cpu", 399, 399, 64, 8, 0.375, False, False), False),
        (Shape("cpu", 1600, 1600, 128, 8, 0.25, False, False), True),
        (Shape("cpu", 9000, 9000, 64, 8, 0.2, False, False), False),
        (Shape("cpu", 9000, 9000, 64, 8, 0.05, False, False), False),
        (Shape("cpu", 100, 100, 32, 8, 0.5, False, False), False),
        (Shape("cpu", 200, 200, 32, 8, 0.5, False, False), True),
        (Shape("cpu", 300, 300, 64, 8, 0.5, True, True), True),
        (Shape("cpu", 9000, 9000, 64, 8, 0.5, True, False), False),
        (Shape("cpu", 1, 5000, 64, 8, 0.5, False, False), True),
        (Shape("cpu", 1, 3000, 64, 8, 0.5, True, True), False),
        (Shape("cuda", 9000, 9000, 64, 8, 0.5, False, False), False),
    ],
)
def test_auto_goes_by_what_was_measured(shape, faster):
    assert sparse_is_faster(shape) is faster


@pytest.mark.usefixtures("least_keys")
def test_an_uneven_load_has_thresholds_of_its_own_where_it_was_measured():
    shape = Shape("cpu", 299, 299, 64, 8, 0.5, False, False)
    assert sparse_is_faster(shape)
    assert not sparse_is_faster(shape, uneven=True)
    assert sparse_is_faster(shape._replace(queries=300, keys=300), uneven=True)
    assert not sparse_is_faster(shape._replace(queries=300, keys=300, skipped=0.4), uneven=True)
    assert sparse_is_faster(shape._replace(causal=True, training=True, queries=300, keys=300), True)


@pytest.mark.usefixtures("least_keys")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("tokens_", "share", "execution"),
    [
        (240, 1.0, "sparse"),
        # Two shared heads and 2 * 1.25 of the routed ones of 8: 0.4375 skipped, 200 keys.
        (204, 1.25, "sparse"),
        (192, 1.25, "dense"),
        (240, 3.0, "dense"),
        (312, 3.0, "sparse"),  # any load
    ],
)
def test_auto_counts_what_an_uneven_load_leaves_over(
    gradients, tokens_, share, execution, monkeypatch
):
    """The first routed head has ``share`` times the mean of the routed heads' queries."""
    if gradients:
        kinds = thresholds.MEASURED["devices"]["cpu"]["least_keys"]
        for kind in ("bidirectional inference", "bidirectional inference, uneven"):
            kinds[kind.replace("inference", "training")] = kinds[kind]
    router, N = router_of(), tokens_
    E, k = router.plan.num_routed, router.plan.top_k
    token = torch.arange(N)
    # By turns among the others, and the first head for its share of the tokens.
    scores = -((token.unsqueeze(1) + torch.arange(E)) % (E - 1)).float()
    scores[:, 0] = torch.where(token < N * k * share / E, 1.0, -float(E))
    selected = torch.zeros(1, N, E, dtype=torch.bool)
    selected.scatter_(-1, scores.topk(k).indices.unsqueeze(0), True)
    assert selected.sum(1).max() == selected[..., 0].sum() == N * k * share / E
    gates = torch.cat([torch.ones(1, N, router.plan.num_shared), selected], dim=-1)
    taken = []
    monkeypatch.setattr(
        "moh.heads.execution.execution_of",
        lambda *arguments: taken.append(execution_of(*arguments)) or taken[-1],
    )
    q, key, value = (torch.randn(1, 8, N, 64, requires_grad=gradients) for _ in range(3))
    with torch.set_grad_enabled(gradients):
        y = attend(router, Routing(gates, selected, selected.float()), q, key, value)
        dense = attend(router_of(execution="dense"), Routing(gates, selected, gates), q, key, value)
    assert taken == [execution, "dense"]
    torch.testing.assert_close(y, dense, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("least_keys")
def test_auto_is_dense_where_the_fast_kernel_cannot_help():
    q = torch.randn(1, 8, 200, 64)
    bias = torch.zeros(1, 8, 200, 200)
    assert execution_of(router_of(), q, q) == "sparse"
    assert execution_of(router_of(), q, q, dropout_p=0.1) == "dense"
    assert execution_of(router_of(), q, q, bias.requires_grad_()) == "dense"
    assert execution_of(router_of(execution="sparse"), q, q, dropout_p=0.1) == "sparse"
    assert execution_of(router_of(execution="dense"), q, q) == "dense"
    assert execution_of(router_of(8, 8, 0, execution="sparse"), q, q) == "dense"


def test_the_thresholds_that_ship_are_whole():
    """Each kind of work is there, with numbers that make sense."""
    found = thresholds.MEASURED
    assert found["head_dim"] == 64
    kinds = {
        kind_of_work(queries, causal, training)
        for queries in (1, 2)
        for causal in (False, True)
        for training in (False, True)
    }
    assert kinds <= set(found["devices"]["cpu"]["least_keys"])
    for device in found["devices"].values():
        assert device["machine"]
        assert device["torch"]
        for kind, by_instances in device["least_keys"].items():
            assert kind.removesuffix(thresholds.UNEVEN) in kinds
            for instances, by_skipped in by_instances.items():
                assert int(instances) > 0
                for skipped, keys in by_skipped.items():
                    measured = device["sparse_over_dense"][kind][instances][skipped]
                    assert 0 < float(skipped) < 1
                    assert keys is None or min(map(int, measured)) <= keys
                    assert keys is None or keys <= max(map(int, measured))


@pytest.mark.parametrize("training", [False, True])
def test_the_demo_and_short_sequences_are_dense(training):
    """Their numbers are those of dense execution, bit for bit."""
    for tokens_, dim, causal in ((49, 32, False), (64, 32, False), (256, 32, True)):
        q = torch.randn(1, 8, tokens_, dim, requires_grad=training)
        assert execution_of(router_of(), q, q, is_causal=causal) == "dense"


def test_dense_execution_is_pytorchs_attention_and_one_product():
    router, x = router_of(), torch.randn(2, 12, 16)
    q, k, v = (torch.randn(2, 8, 12, 64) for _ in range(3))
    routing = router(x, q)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    expected = y * routing.gates_BNH.unsqueeze(-1)
    assert torch.equal(attend(router, routing, q, k, v), expected)
    with torch.no_grad():
        assert torch.equal(attend(router, routing, q, k, v), expected)


def test_execution_is_a_setting_of_the_heads():
    config = compose_config(["experiment=demo/vit/moh_75", "heads.execution=sparse"])
    typed = validate(config)
    model = build_model(typed.model, typed.heads)
    assert {router.options.execution for _, router in moh.heads.routers(model)} == {"sparse"}
    wrong = compose_config(["experiment=demo/vit/moh_75", "heads.execution=fast"])
    with pytest.raises(ValueError, match="execution 'fast' is not one of auto, dense, sparse"):
        validate(wrong)


def test_cost_does_not_depend_on_execution():
    """Multiply-accumulates are counted on the meta device, where nothing is selected."""
    config = validate(compose_config(["experiment=demo/vit/moh_75"]), paths=False)
    costs = []
    for execution in ("dense", "sparse"):
        heads = HeadsConfig(ratio=0.75, execution=execution)
        costs.append(describe_model(config.model, heads))
    assert costs[0] == costs[1]


def test_execution_is_no_part_of_a_runs_name():
    """It changes rounding alone; and a setting that later versions add renames no run."""
    config = compose_config(["experiment=demo/vit/moh_75"])
    before = OmegaConf.create(OmegaConf.to_container(config))
    del before.heads.straight_through
    assert config_hash(config) == config_hash(before)
    config.heads.execution = "dense"
    assert config_hash(config) == config_hash(before)
    config.heads.straight_through = False
    assert config_hash(config) != config_hash(before)
