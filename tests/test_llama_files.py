"""MoH LLaMA on disk and in configuration: saving, loading, published weights, the paper's sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny_llama import HEADS, ROUTERS, SIZES, llama, moh_llama, plan_of, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import moh
from moh.backbones.llama import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaModel
from moh.backbones.published.llama import config_from_published, from_published, to_published
from moh.heads import routers

PARITY = Path(__file__).parents[2] / "shared" / "parity"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("made", ["native", "converted"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_save_and_load(kind, made, tied, tmp_path):
    if made == "native":
        config = MoHLlamaConfig(
            **SIZES,
            tie_word_embeddings=tied,
            head_plan=plan_of().to_dict(),
            router=asdict(ROUTERS[kind]),
        )
        model = MoHLlamaForCausalLM(config).eval()
        assert model.config is config
    else:
        model = moh_llama(kind, tie_word_embeddings=tied)
    ids = tokens(2, 6)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MoHLlamaConfig)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "moh_llama"
    for cls in (MoHLlamaForCausalLM, AutoModelForCausalLM):
        loaded, report = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert type(loaded) is MoHLlamaForCausalLM
        assert moh.head_plan(loaded) == plan_of()
        assert next(routers(loaded))[1].options == ROUTERS[kind]
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is MoHLlamaModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_an_mha_checkpoint_in_a_moh_config_draws_router_weights_alone(tmp_path):
    baseline = llama()
    baseline.save_pretrained(tmp_path)
    config = MoHLlamaConfig(**SIZES, head_plan=plan_of().to_dict())
    model, report = MoHLlamaForCausalLM.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    assert report["missing_keys"]
    assert all(".router." in name for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in baseline.state_dict().items())
    assert all(loaded[name].std() > 0 for name in report["missing_keys"])


def test_a_moh_llama_starts_from_the_weights_of_a_llama_of_the_same_seed():
    torch.manual_seed(5)
    baseline = llama()
    torch.manual_seed(5)
    ours = MoHLlamaForCausalLM(MoHLlamaConfig(**SIZES, head_plan=plan_of().to_dict()))
    state = ours.state_dict()
    assert all(torch.equal(state[name], value) for name, value in baseline.state_dict().items())
    torch.manual_seed(6)
    other = MoHLlamaForCausalLM(MoHLlamaConfig(**SIZES, head_plan=plan_of().to_dict()))
    weights = [next(routers(model))[1].routed.weight for model in (ours, other)]
    assert not torch.equal(*weights)


def test_a_moh_config_without_heads_is_plain_attention(tmp_path):
    torch.manual_seed(5)
    baseline = llama()
    torch.manual_seed(5)
    ours = MoHLlamaForCausalLM(MoHLlamaConfig(**SIZES)).eval()
    ids = tokens(2, 6)
    assert moh.head_plan(ours) is None
    assert torch.equal(ours(ids).logits, baseline(ids).logits)
    moh.convert(ours, plan_of()).save_pretrained(tmp_path)
    assert moh.head_plan(AutoModelForCausalLM.from_pretrained(tmp_path)) == plan_of()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_plan": plan_of(depth=3).to_dict()}, "the head plan has 3 layers"),
        ({"head_plan": plan_of().to_dict(), "router": {"knid": "two_stage"}}, "'knid' is not one"),
        ({"head_plan": plan_of().to_dict(), "router": {"kind": "norm"}}, "kind 'norm' is not one"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        MoHLlamaForCausalLM(MoHLlamaConfig(**SIZES, **changes))
    assert "\n" not in str(refused.value)


def test_published_config_and_weights():
    published = {**SIZES, "model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}
    config = config_from_published(published)
    assert config.head_plan == plan_of(HEADS // 2, HEADS // 4).to_dict()
    assert not hasattr(config, "auto_map")
    state = llama().state_dict()
    model = MoHLlamaForCausalLM(config)
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    model.load_state_dict(from_published({**state, **computed}))
    back = to_published(model.state_dict())
    assert set(back) == set(state)
    assert all(torch.equal(back[name], value) for name, value in state.items())
    with pytest.raises(ValueError, match=r"router\.routed"):
        to_published(moh_llama("two_stage").state_dict())


@pytest.mark.parametrize(
    ("model", "millions"),
    # The paper's counts leave out norms: 185.6 and 880.8 for MHA, 186 and 882 with routers.
    [("llm_s", 185.6), ("llm_b", 880.8)],
)
def test_parameter_counts_and_ratios_of_the_language_models(model, millions):
    from omegaconf import OmegaConf

    from moh.backbones.build import build_model
    from moh.cli import compose_config

    counts = {}
    for heads in ("mha", f"{model}_75", f"{model}_50"):
        config = compose_config([f"model={model}", f"heads={heads}"])
        with torch.device("meta"):
            built = build_model(
                OmegaConf.to_object(config.model), OmegaConf.to_object(config.heads)
            )
        counts[heads] = sum(p.numel() for n, p in built.named_parameters() if "norm" not in n)
        if heads != "mha":
            assert moh.head_plan(built).activated_ratio == int(heads[-2:]) / 100
    assert round(counts["mha"] / 1e6, 1) == millions
    depth, width, heads = (
        getattr(built.config, name)
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    routers_only = depth * width * (heads + 2)
    assert counts[f"{model}_75"] - counts["mha"] == routers_only
    assert counts[f"{model}_50"] - counts["mha"] == routers_only


def test_continue_tuned_llama3_has_the_published_heads():
    from omegaconf import OmegaConf

    from moh.backbones.build import build_model
    from moh.cli import compose_config

    config = compose_config(["model=llama3_8b", "heads=llama3_8b_75"])
    with torch.device("meta"):
        built = build_model(OmegaConf.to_object(config.model), OmegaConf.to_object(config.heads))
    plan = moh.head_plan(built)
    assert plan.activated_ratio == 0.75
    assert set(plan) == {moh.LayerPlan(32, 128, 16, 8)}
    published = config_from_published({**built.config.to_dict(), "head_plan": None, "router": None})
    assert published.head_plan == plan.to_dict()
    assert not any(".router." in name for name in built.state_dict())


@pytest.mark.skipif(not PARITY.is_dir(), reason="no parity files")
@pytest.mark.parametrize("path", sorted(PARITY.glob("llama*.safetensors")), ids=lambda p: p.stem)
def test_parity_with_the_authors_code(path, monkeypatch):
    from safetensors import safe_open

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    from parity.llama import check

    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checked = set()
    for name, expected, ours in check(case, stored):
        checked.add(name)
        error = (ours - expected).abs().max() / expected.abs().max()
        assert error < (2e-4 if "grad" in name else 2e-5), name
    wanted = {n for n in stored if n.split("/")[0] in ("output", "cached", "train")}
    assert checked == wanted | {"padded/logits"}
