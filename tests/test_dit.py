"""DiT and MoH in diffusers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor
from omegaconf import OmegaConf
from torch import nn

from moh import HeadPlan, RouterOptions, attention_layers, balance_loss, convert, head_plan, revert
from moh.backbones.build import build_model, make_plan
from moh.backbones.dit import DiT
from moh.backbones.published.dit import from_published, to_published
from moh.config import DiTConfig, HeadsConfig
from moh.heads import Routing, routers

ROOT = Path(__file__).parents[1]
PARITY = ROOT.parent / "shared" / "parity"

PLAN = HeadPlan.from_groups([1, 1, 1], [2, 4, 6], [8, 8, 8], [2, 1, 2], [0, 2, 2])

# Measured on the authors' code: all parameters, frozen positions included.
PARAMETERS = {
    "s2": (32_963_360, 32_997_152, 32_998_688),
    "b2": (130_512_416, 130_638_368, 130_638_368),
    "l2": (458_102_816, 458_512_416, 458_528_800),
    "xl2": (675_129_632, 675_666_464, 675_689_504),
}
ACTIVE_HEADS = {
    "s2": (64, 54, 72),
    "b2": (129, 108, 144),
    "l2": (344, 288, 384),
    "xl2": (403, 336, 448),
}
SIZES = list(PARAMETERS)


def small_dit(**changes):
    """Three layers of 2, 4 and 6 heads of width 8, with every parameter away from zero."""
    torch.manual_seed(0)
    arguments = {
        "input_size": 4,
        "patch_size": 2,
        "in_channels": 2,
        "hidden_size": 24,
        "depth": 3,
        "num_heads": [2, 4, 6],
        "head_dim": 8,
        "num_classes": 5,
    }
    return stir(DiT(**(arguments | changes)))


def stir(model):
    """DiT starts at zero output: random weights make differences visible."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def inputs(channels=2, size=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, channels, size, size, generator=generator)
    return x, torch.tensor([0, 10, 999]), torch.tensor([0, 4, 4])


def same_state(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    return all(torch.equal(state[name], expected[name]) for name in state)


def open_all_gates(model, monkeypatch):
    """Replace every router's decision by gates of one."""
    for _, router in routers(model):

        def ones(x_BND, *args, heads=router.plan.num_heads):
            gates = x_BND.new_ones(*x_BND.shape[:2], heads)
            return Routing(gates, gates[..., :0].bool(), gates[..., :0])

        monkeypatch.setattr(router, "forward", ones)


def read_config(group, name, schema):
    file = OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml")
    file.pop("defaults")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), file))


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_and_activated_ratios_are_the_papers(size):
    model = read_config("model", f"dit_{size}", DiTConfig)
    rows = [HeadsConfig()] + [
        read_config("heads", f"dit_{size}_{ratio}", HeadsConfig) for ratio in (90, 75)
    ]
    counts, active = [], []
    for heads in rows:
        with torch.device("meta"):
            built = build_model(model, heads)
        counts.append(sum(parameter.numel() for parameter in built.parameters()))
        plan = head_plan(built)
        if plan is not None:
            active.append(plan.num_active)
    assert tuple(counts) == PARAMETERS[size]
    assert (*active, plan.num_heads) == ACTIVE_HEADS[size]


def test_the_s2_plan_spends_less_on_shallow_layers_as_released():
    heads = read_config("heads", "dit_s2_75", HeadsConfig)
    plan = make_plan(heads, [(6, 64)] * 12)
    assert [layer.num_shared for layer in plan] == [2, 2] + [3] * 8 + [6, 6]
    assert [layer.top_k for layer in plan] == [1] * 6 + [2] * 4 + [0, 0]


def test_initialisation_is_dits():
    torch.manual_seed(0)
    model = DiT(input_size=8, hidden_size=64, depth=2, num_heads=4, num_classes=7)
    block = model.blocks[0]
    # Output zero, every block the identity: adaLN-zero.
    assert not model(*inputs(channels=4, size=8)).any()
    assert not block.norm1.linear.weight.any()
    # One xavier draw for the fused query-key-value matrix, (3 * 64 + 64) features.
    bound = (6 / (4 * 64)) ** 0.5
    for linear in (block.attn.to_q, block.attn.to_k, block.attn.to_v):
        assert 0.97 * bound < linear.weight.abs().max() <= bound
        assert not linear.bias.any()
    patch_bound = (6 / (64 + 4 * 2 * 2)) ** 0.5
    assert 0.97 * patch_bound < model.patch_embed.proj.weight.abs().max() <= patch_bound
    assert model.label_embed.weight.shape == (8, 64)
    assert model.label_embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.pos_embed.requires_grad


def test_gates_of_one_are_mha_bit_for_bit(monkeypatch):
    model = small_dit()
    expected = model(*inputs())
    open_all_gates(convert(model, PLAN), monkeypatch)
    assert torch.equal(model(*inputs()), expected)


def test_gates_of_one_are_mha_bit_for_bit_in_diffusers_own_dit(monkeypatch):
    torch.manual_seed(0)
    model = stir(
        DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=2,
            sample_size=4,
            num_embeds_ada_norm=5,
        )
    )
    x, t, labels = inputs(channels=4)
    expected = model(x, t, labels).sample
    convert(model, HeadPlan.from_groups([2], [4], [8], [1], [2]))
    assert not torch.equal(model(x, t, labels).sample, expected)
    open_all_gates(model, monkeypatch)
    assert torch.equal(model(x, t, labels).sample, expected)


@pytest.mark.parametrize("qk_norm", [None, "layer_norm"])
def test_gates_of_one_keep_query_and_key_norms(qk_norm, monkeypatch):
    attn = stir(Attention(16, heads=4, dim_head=8, bias=True, qk_norm=qk_norm))
    x = torch.randn(2, 5, 16)
    expected = attn(x)
    open_all_gates(convert(attn, HeadPlan.from_groups([1], [4], [8], [1], [2])), monkeypatch)
    assert torch.equal(attn(x), expected)


def test_convert_and_revert_leave_the_baseline_untouched():
    model, baseline = small_dit(), small_dit()
    names = set(baseline.state_dict())
    stream = torch.get_rng_state()
    convert(model, PLAN, RouterOptions(gate_scale="paper"))
    assert torch.equal(torch.get_rng_state(), stream)
    assert names < set(model.state_dict())
    assert head_plan(model) == PLAN
    assert model.config.head_plan == PLAN.to_dict()
    assert model.config.router["gate_scale"] == "paper"
    revert(model)
    assert model.config.head_plan is None
    assert same_state(model, baseline)
    assert torch.equal(model(*inputs()), baseline(*inputs()))


@pytest.mark.parametrize("kind", ["mha", "moh", "converted", "reverted"])
def test_save_pretrained_keeps_weights_heads_and_config(kind, tmp_path):
    model = small_dit(head_plan=PLAN.to_dict() if kind == "moh" else None)
    if kind in ("converted", "reverted"):
        convert(model, PLAN, RouterOptions(kind="query_norm"), seed=3)
    if kind == "reverted":
        revert(model)
    model.save_pretrained(tmp_path)
    loaded = DiT.from_pretrained(tmp_path)
    assert head_plan(loaded) == (PLAN if kind in ("moh", "converted") else None)
    assert same_state(loaded, model)
    assert torch.equal(loaded(*inputs()), model(*inputs()))
    assert not loaded.pos_embed.requires_grad


def test_from_config_of_a_converted_model_has_its_heads():
    model = convert(small_dit(), PLAN, RouterOptions(two_stage=False))
    rebuilt = DiT.from_config(model.config)
    assert list(rebuilt.state_dict()) == list(model.state_dict())


def test_published_names_there_and_back_are_exact():
    model = convert(small_dit(), PLAN)
    published = to_published(model.state_dict())
    assert published["blocks.1.attn.qkv.weight"].shape == (3 * 4 * 8, 24)
    assert published["blocks.1.attn.wg.weight"].shape == (3, 24)
    assert published["blocks.1.attn.wg_0.weight"].shape == (2, 24)
    assert published["blocks.2.attn.wg_1.weight"].shape == (2, 24)
    back = from_published(published)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_a_name_that_is_not_dits_is_named_on_loading():
    model = small_dit()
    published = to_published(model.state_dict())
    published["blocks.0.attn.surprise.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn\.surprise\.weight"):
        model.load_state_dict(from_published(published), strict=True)
    lone = {"blocks.0.attn.to_q.weight": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"no blocks\.0\.attn\.to_k\.weight"):
        to_published(lone)


def gradients(model, call):
    model.train().zero_grad()
    balance = call(*inputs()).square().mean() + 0.01 * balance_loss(model)
    balance.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_changes_neither_gradients_nor_balance_loss():
    model = convert(small_dit(), PLAN)
    expected, loss = gradients(model, model), balance_loss(model)
    model.enable_gradient_checkpointing()
    assert all(torch.equal(g, expected[n]) for n, g in gradients(model, model).items())
    assert torch.equal(balance_loss(model), loss)


def test_compiles_without_graph_breaks_with_the_same_gradients():
    model = convert(small_dit(), PLAN)
    expected = gradients(model, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name, gradient in gradients(model, compiled).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_only_plain_self_attention_is_converted():
    plain = {"query_dim": 32, "heads": 2, "dim_head": 8}
    others = [
        {"cross_attention_dim": 12},
        {"kv_heads": 1},
        {"norm_num_groups": 4},
        {"spatial_norm_dim": 4},
        {"added_kv_proj_dim": 4},
        {"residual_connection": True},
        {"rescale_output_factor": 2.0},
        {"processor": AttnProcessor()},
    ]
    assert len(attention_layers(Attention(**plain))) == 1
    for changes in others:
        assert not attention_layers(Attention(**plain, **changes)), changes


def test_what_moh_attention_cannot_honour_is_refused():
    attn = convert(
        Attention(16, heads=2, dim_head=8), HeadPlan.from_groups([1], [2], [8], [1], [1])
    )
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="attention_mask"):
        attn(x, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        attn(x, encoder_hidden_states=x)
    with pytest.raises(ValueError, match="revert"):
        attn.set_processor(AttnProcessor())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_size": 5}, "input_size 5 is no multiple of patch_size 2"),
        ({"num_heads": [2, 4]}, "num_heads has 2 entries for 3 layers"),
        ({"num_heads": 5, "head_dim": None}, "num_heads 5 in layer 0 does not divide"),
        ({"head_plan": PLAN.to_dict()[:2]}, "the head plan has 2 layers, DiT has 3"),
    ],
)
def test_impossible_sizes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small_dit(**changes)


def test_inputs_of_another_size_are_named():
    with pytest.raises(ValueError, match=r"inputs \(2, 6, 6\) are not \(2, 4, 4\)"):
        small_dit()(*inputs(size=6))


@pytest.mark.skipif(not PARITY.is_dir(), reason="no reference numbers beside the repository")
@pytest.mark.parametrize("path", sorted(PARITY.glob("dit*.safetensors")), ids=lambda p: p.stem)
def test_agrees_with_the_reference_numbers(path, monkeypatch):
    from safetensors import safe_open

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from parity.dit import check

    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checked = set()
    for name, expected, ours in check(case, stored):
        checked.add(name)
        error = (ours - expected).abs().max() / expected.abs().max()
        assert error <= (2e-4 if "grad" in name else 2e-5), name
    given = {"diffusion/noise", "diffusion/respaced25_index"}
    results = {n for n in stored if not n.startswith(("weights/", "input/", "cfg/input_"))}
    assert checked == results - given
