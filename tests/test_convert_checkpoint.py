"""Checkpoints in their authors' forms become this project's and go back, tensor for tensor."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_run import folder_of, tiny
from torch import Tensor, nn

import moh
from moh.backbones.build import build_model
from moh.backbones.published.infer import family_of, heads_of
from moh.backbones.published.load import read_state
from moh.errors import RunError
from moh.runner import run, run_id
from moh.validation import validate
from moh.weights import locate

ROOT = Path(__file__).parents[1]
PARITY = ROOT.parent / "shared" / "parity"
sys.path.insert(0, str(ROOT / "scripts"))
convert_checkpoint: Any = import_module("convert_checkpoint")

State = dict[str, Tensor]


@dataclass
class Case:
    """A small model of the authors.

    Attributes:
        state: weights under their published names.
        settings: ``--experiment`` and settings that name the model.
        run: model -> output for the case's input.
        expected: what the authors' code returned for it; None for weights of our own making.
    """

    state: State
    settings: list[str]
    run: Callable[[nn.Module], Tensor]
    expected: Tensor | None
    config: dict[str, Any]


VIT = [
    "--experiment",
    "vit/moh_b_75",
    "model.name=transnext_micro",
    "model.img_size=64",
    "data.size=64",
    "model.num_classes=10",
    "+model.args.embed_dims=[16,32,48,64]",
    "+model.args.num_heads=[2,4,6,8]",
    "+model.args.depths=[1,1,2,1]",
    "+model.args.mlp_ratios=[4,4,2,2]",
    "heads.layers=[1,1,2,1]",
    "heads.num_shared=[2,4,2,3]",
    "heads.top_k=[0,0,2,3]",
]
DIT = [
    "--experiment",
    "dit/moh_xl2_90",
    "model.input_size=8",
    "data.size=8",
    "model.hidden_size=48",
    "model.depth=3",
    "model.num_classes=10",
    "heads.layers=[1,1,1]",
    "heads.num_heads=[4,6,8]",
    "heads.head_dim=8",
    "heads.num_shared=[4,2,4]",
    "heads.top_k=[0,2,2]",
]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FILES = {"vit": "vit_transnext_tiny", "dit": "dit_tiny", "llama": "llama_h8_kv4"}


def case_of(family: str, stored: bool) -> Case:
    """A case from the stored reference numbers, or of the same form with weights of our own."""
    tensors: State = {}
    if stored:
        path = PARITY / f"{FILES[family]}.safetensors"
        if not path.is_file():
            pytest.skip("no parity files")
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    prefix = "weights/"
    state = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
    torch.manual_seed(0)
    if family == "vit":
        x = tensors.get("input/x", torch.randn(2, 3, 64, 64))
        case = Case(state, VIT, lambda model: model(x), tensors.get("output/logits"), {})
    elif family == "dit":
        inputs = [tensors.get(f"input/{key}") for key in ("x", "t", "class")]
        if not stored:
            inputs = [torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10])]
        case = Case(state, DIT, lambda model: model(*inputs), tensors.get("output/y"), {})
    else:
        ids = tensors.get("input/ids", torch.arange(24).view(2, 12))
        expected = tensors.get("output/logits")
        case = Case(state, [], lambda model: model(ids).logits, expected, LLAMA)
    if not stored:
        case.state = own_state(family, case.settings)
    return case


def own_state(family: str, settings: list[str]) -> State:
    """Random weights under published names."""
    names = import_module(f"moh.backbones.published.{family}")
    if family == "llama":
        from moh.backbones.llama import MoHLlamaForCausalLM

        model: nn.Module = MoHLlamaForCausalLM(names.config_from_published(LLAMA))
    else:
        config = convert_checkpoint.experiment(settings[1], settings[2:])
        model = build_model(config.model, config.heads)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return names.to_published(model.state_dict())


def write_authors(family: str, case: Case, folder: Path, how: str = "bin") -> Path:
    """The files as the authors' training scripts and hub pages have them."""
    state = case.state
    if family == "vit":
        path = folder / "moh.pth"
        whole = {
            "model": state,
            "optimizer": {
                "state": {0: {"exp_avg": torch.zeros(2)}},
                "param_groups": [{"lr": 1e-5}],
            },
            "lr_scheduler": {"t_initial": 300},
            "epoch": 299,
            "scaler": {"scale": 65536.0},
            "args": argparse.Namespace(model="moh", drop_path=0.6, opt_betas=None),
            "max_accuracy": 84.9,
        }
        torch.save(whole, path)
    elif family == "dit":
        path = folder / "0400000.pt"
        raw = {f"module.{name}": value + 1 for name, value in state.items()}
        args = argparse.Namespace(model="MoH-DiT-XL/2-90")
        torch.save({"model": raw, "ema": state, "opt": {}, "args": args}, path)
    else:
        path = folder / "llama"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(case.config))
        (path / "tokenizer.json").write_text("{}")
        (path / "modeling_llama.py").write_text("raise RuntimeError('code of a folder was run')")
        write_shards(state, path, how)
    return path


def write_shards(state: State, folder: Path, how: str) -> None:
    """Two shards with their index."""
    name = {"bin": "pytorch_model", "safetensors": "model"}[how]
    parts = [dict(list(state.items())[start::2]) for start in range(2)]
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"{name}-{number:05d}-of-00002.{how}"
        write = torch.save if how == "bin" else save_file
        write(part, folder / file)
        index |= dict.fromkeys(part, file)
    content = {"metadata": {}, "weight_map": index}
    (folder / f"{name}.{how}.index.json").write_text(json.dumps(content))


def convert(*arguments: object) -> None:
    """The script's work, its failures as exceptions."""
    options = convert_checkpoint.parser().parse_intermixed_args([str(a) for a in arguments])
    convert_checkpoint.convert(options)


def load_with_library(family: str, folder: Path) -> nn.Module:
    """The converted folder as a user of the library loads it."""
    if family == "vit":
        import timm

        import moh.backbones.timm_moh

        return timm.create_model(f"local-dir:{folder}", pretrained=True)
    if family == "dit":
        from moh.backbones.dit import DiT

        return DiT.from_pretrained(folder)
    from transformers import AutoModelForCausalLM

    import moh.backbones.llama  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("stored", [False, True], ids=["own", "parity"])
@pytest.mark.parametrize("family", ["vit", "dit", "llama"])
@torch.no_grad()
def test_there_and_back(family, stored, tmp_path, capsys):
    case = case_of(family, stored)
    source = write_authors(family, case, tmp_path)
    convert(source, tmp_path / "ours", *case.settings)
    assert "heads active" in capsys.readouterr().out
    model = load_with_library(family, tmp_path / "ours").eval()
    output = case.run(model)
    if case.expected is not None:
        error = (output - case.expected).abs().max() / case.expected.abs().max()
        assert error < 2e-5
    convert(tmp_path / "ours", tmp_path / "back", "--to", "published")
    back = read_state(tmp_path / "back")
    assert back.keys() == case.state.keys()
    for name, value in case.state.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value), name
    # What was written back is read as the authors' own is.
    convert(tmp_path / "back", tmp_path / "again", *case.settings)
    assert torch.equal(case.run(load_with_library(family, tmp_path / "again").eval()), output)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("how", ["bin", "safetensors"])
def test_shards_keep_their_type_and_bring_the_tokenizer(how, tmp_path):
    case = case_of("llama", stored=False)
    case.state = {name: value.bfloat16() for name, value in case.state.items()}
    case.config = {**LLAMA, "torch_dtype": "bfloat16"}
    source = write_authors("llama", case, tmp_path, how)
    convert(source, tmp_path / "ours")
    assert (tmp_path / "ours" / "tokenizer.json").is_file()
    assert not (tmp_path / "ours" / "modeling_llama.py").exists()
    model = load_with_library("llama", tmp_path / "ours")
    assert moh.head_plan(model).activated_ratio == 0.75
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    convert(tmp_path / "ours", tmp_path / "back", "--to", "published")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["auto_map"] == LLAMA["auto_map"]
    assert config["model_type"] == "llama"
    back = read_state(tmp_path / "back")
    assert all(torch.equal(back[name], value) for name, value in case.state.items())
    (source / f"{'pytorch_model' if how == 'bin' else 'model'}-00002-of-00002.{how}").unlink()
    with pytest.raises(RunError, match=r"lacks .*-00002-of-00002\..* of 2 files"):
        convert(source, tmp_path / "other")


RELATIVES = {
    "vit/moh_s_75": ["vit/mha_s", "vit/moh_s_75", "vit/moh_s_80"],
    "dit/moh_xl2_90": ["dit/mha_xl2", "dit/moh_xl2_90", "dit/moh_xl2_90_2m", "dit/moh_xl2_75_2m"],
}


@pytest.mark.parametrize("name", RELATIVES)
def test_a_file_is_known_by_its_shapes(name, monkeypatch):
    """Full-size state dicts without their memory."""
    monkeypatch.setattr(convert_checkpoint, "experiments", lambda: RELATIVES[name])
    config = convert_checkpoint.experiment(name, [])
    model = convert_checkpoint.build_empty(config.model, config.heads)
    published = import_module(f"moh.backbones.published.{name.split('/')[0]}")
    state = published.to_published(model.state_dict())
    family, found, built = convert_checkpoint.fitting_model(Path("x.pth"), state)
    assert (family, found) == (config.model.family, f"experiment {name}")
    assert moh.head_plan(built) == moh.head_plan(model)
    del state["blocks.0.attn.qkv.weight" if name.startswith("dit") else "head.weight"]
    with pytest.raises(RunError, match=r"shapes of no experiment.*--experiment"):
        convert_checkpoint.fitting_model(Path("x.pth"), state)


def test_heads_are_read_from_router_shapes():
    state = case_of("vit", stored=False).state
    assert family_of(state) == "timm"
    assert heads_of(state) == [
        "1 x (2 shared, 0 routed)",
        "1 x (4 shared, 0 routed)",
        "2 x (2 shared, 4 routed)",
        "1 x (3 shared, 5 routed)",
    ]


class Call:
    """A pickle that runs code."""

    def __reduce__(self):
        return (print, ("code was run",))


def test_bad_sources_are_one_line_and_leave_nothing(tmp_path, capsys):
    case = case_of("vit", stored=False)
    good = write_authors("vit", case, tmp_path)
    (tmp_path / "torn.pth").write_bytes(good.read_bytes()[:5000])
    torch.save({"model": case.state, "hook": Call()}, tmp_path / "code.pth")
    without = {n: v for n, v in case.state.items() if n != "block3.1.attn.wg_0.weight"}
    torch.save({"model": without | {"extra.bias": torch.ones(1)}}, tmp_path / "keys.pth")
    (tmp_path / "page.pth").write_text("<html>Not Found</html>")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "odd.pth").write_bytes(b"\x80\x02no pickle at all")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Call(), protocol=2))
    (tmp_path / "newer.pth").write_bytes(pickle.dumps(Call(), protocol=4))
    (tmp_path / "there").mkdir()
    other = [s.replace("heads.num_shared=[2,4,2,3]", "heads.num_shared=[2,4,1,3]") for s in VIT]
    for source, out, settings, message in (
        ("moh.pth", "there", VIT, r"there exists; choose another name"),
        ("none.pth", "out", VIT, r"checkpoint .*none\.pth does not exist"),
        ("torn.pth", "out", VIT, r"cannot read .*torn\.pth"),
        ("page.pth", "out", VIT, r"page\.pth is not a checkpoint: neither PyTorch's file nor"),
        ("empty.pth", "out", VIT, r"empty\.pth is not a checkpoint: it is empty"),
        ("odd.pth", "out", VIT, r"cannot read .*odd\.pth|odd\.pth is not a checkpoint"),
        ("plain.pth", "out", VIT, r"plain\.pth is refused: .*could run code \(.*print\)"),
        ("newer.pth", "out", VIT, r"newer\.pth is refused: .*could run code \(.*print\)"),
        ("code.pth", "out", VIT, r"code\.pth is refused: .*could run code \(.*print.*\)"),
        (
            "keys.pth",
            "out",
            VIT,
            r"missing: block3\.1\.attn\.router\.stage\.weight; unexpected: extra\.bias",
        ),
        ("moh.pth", "out", other, r"of another shape: block3\.0\.attn\.router\.routed\.weight"),
        ("there", "out", [], r"there is no checkpoint: neither a run folder nor"),
    ):
        with pytest.raises(RunError, match=message) as caught:
            convert(tmp_path / source, tmp_path / out, *settings)
        assert "\n" not in str(caught.value)
    assert "code was run" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "there").iterdir())


def test_a_folder_of_other_heads_is_refused(tmp_path):
    """Though every shape fits: top-k is in none."""
    case = case_of("vit", stored=False)
    convert(write_authors("vit", case, tmp_path), tmp_path / "ours", *VIT)
    fewer = [s.replace("heads.top_k=[0,0,2,3]", "heads.top_k=[0,0,2,2]") for s in VIT]
    config = convert_checkpoint.experiment(fewer[1], fewer[2:])
    model = build_model(config.model, config.heads)
    for named in (tmp_path / "ours", tmp_path / "ours" / "model.safetensors"):
        with pytest.raises(
            RunError, match=r"layer 4 has 3 shared, top 3; the model: 3 shared, top 2"
        ):
            locate(named).load_into(model, "timm", ema=True)


def test_the_authors_llama_is_not_scored_as_mha(tmp_path):
    """Its router has no weights: as plain attention it would load and be wrong."""
    from moh.backbones.published.folders import describe_folder

    case = case_of("llama", stored=False)
    folder = write_authors("llama", case, tmp_path)
    model = moh.revert(describe_folder(folder).build())
    with pytest.raises(RunError, match=r"other heads: 2 layers, 12/16 .*; the model: plain MHA"):
        locate(folder).load_into(model, "llama", ema=True)
    plain = {key: value for key, value in LLAMA.items() if key != "auto_map"}
    (folder / "config.json").write_text(json.dumps({**plain, "rope_theta": 10000.0}))
    with pytest.raises(RunError, match="rope_parameters"):
        locate(folder).load_into(model, "llama", ema=True)


@pytest.mark.parametrize("family", ["vit", "dit", "llm"])
def test_a_run_is_exported_in_every_form(family, tmp_path):
    more = ["trainer.samples=32", "optim.warmup_samples=0", "mode=train"]
    more += ["trainer.ema_decay=0.5"] if family == "dit" else []
    config = tiny(family, tmp_path, *more)
    run(config)
    trained = folder_of(config)
    convert(trained, tmp_path / "ours")
    forms = [trained, tmp_path / "ours"]
    if family == "llm":
        assert (tmp_path / "ours" / "tokenizer.json").is_file()
        with pytest.raises(RunError, match="published form has no place for this model"):
            convert(forms[1], tmp_path / "published", "--to", "published")
    else:
        convert(forms[1], tmp_path / "published", "--to", "published")
        forms.append(tmp_path / "published")
    typed = validate(config)

    def weights(form: Path, ema: bool = True) -> State:
        model = build_model(typed.model, typed.heads, seed=1)
        samples = locate(form).load_into(model, typed.model.family, ema)
        assert samples == (32 if form == trained else None)
        return model.state_dict()

    first = weights(forms[0])
    for form in forms[1:]:
        other = weights(form)
        assert all(torch.equal(other[name], value) for name, value in first.items())
    if family == "dit":
        last = weights(trained, ema=False)
        name = "final_layer.linear.weight"
        assert not torch.equal(last[name], first[name])
        convert(trained, tmp_path / "last", "--no-ema")
        assert torch.equal(read_state(tmp_path / "last")[name], last[name])


def test_a_run_scores_alike_in_every_form(tmp_path):
    more = ["trainer.samples=32", "optim.warmup_samples=0"]
    config = tiny("vit", tmp_path, *more)
    run(config)
    trained = folder_of(config)
    convert(trained, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "published", "--to", "published")
    scores = json.loads((trained / "metrics.json").read_text())
    record = (trained / "run.json").read_text()
    for form in (trained, tmp_path / "ours", tmp_path / "published"):
        again = tiny("vit", tmp_path, *more, "mode=eval", f"checkpoint={form}")
        run(again)
        assert run_id(again).startswith(f"{config.name}-eval/")
        assert json.loads((folder_of(again) / "metrics.json").read_text()) == scores
        assert json.loads((folder_of(again) / "run.json").read_text())["status"] == "evaluated"
    assert (trained / "run.json").read_text() == record


def test_the_command_tells_a_mistake_in_one_line(tmp_path, monkeypatch, capsys):
    for arguments, status, message in (
        ([f"{tmp_path}/no.pth", "out"], 1, f"checkpoint {tmp_path}/no.pth does not exist"),
        (["a.pth", "out", "heads.top_k=[2]"], 2, "heads.top_k=[2] needs --experiment"),
    ):
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments])
        assert convert_checkpoint.main() == status
        assert capsys.readouterr().err == f"convert_checkpoint: {message}\n"
