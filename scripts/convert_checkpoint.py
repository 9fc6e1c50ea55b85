"""Convert a checkpoint between its authors' form and this project's, or export a run.

    python scripts/convert_checkpoint.py SOURCE OUT [--to ours|published]
    python scripts/convert_checkpoint.py SOURCE OUT --experiment vit/moh_b_75 [key=value ...]

SOURCE is the authors' file (MoH-ViT .pth, TransNeXt .pth, MoH-DiT or DiT .pt, any timm model's
file) or folder (MoH-LLaMA3), a folder that this script wrote, or a run folder of this project.
OUT is, for --to ours, a folder that timm, diffusers or transformers loads; for --to published a
file, of a LLaMA a folder. Averaged weights are taken where there are any. Tensors keep their values
and types. Which model a file is of is found among the experiments by its shapes; --experiment
names another, with settings as on the command line of python -m moh.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from moh.backbones.build import build_model, without_pretrained
from moh.backbones.convert import head_plan
from moh.backbones.published.folders import check_same, describe_folder
from moh.backbones.published.infer import family_of, heads_of
from moh.backbones.published.load import FAMILIES, key_faults, load_published, read_state
from moh.backbones.published.write import write_ours, write_published
from moh.backbones.transnext import SIZES
from moh.cli import compose_config, experiments
from moh.config import Config, HeadsConfig, ModelConfig, TimmConfig
from moh.errors import RunError
from moh.runner import load_config, write_json
from moh.training import checkpoint
from moh.validation import validate
from moh.weights import CLASSES, Weights, locate

FOLDERS = {"timm": "vit", "dit": "dit", "llama": "llm"}  # of conf/experiment/

BESIDE_LLAMA = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


@dataclass
class Converted:
    """A model with the weights of the source.

    Attributes:
        of: what it is, in words.
        experiment: whose model it is, None where only a folder says what it is.
        run: configuration of the run that it was trained in, None for other sources.
    """

    model: nn.Module
    family: str
    of: str
    experiment: str | None = None
    run: Config | None = None


def experiment(name: str, overrides: Sequence[str]) -> Config:
    """The configuration of an experiment with settings changed."""
    return validate(compose_config([f"experiment={name}", *overrides]), paths=False)


def build_empty(model: ModelConfig, heads: HeadsConfig) -> nn.Module:
    """A model where nothing is allocated; the source's tensors take their places."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return build_model(without_pretrained(model), heads)


def known_models(family: str) -> Iterator[tuple[str, ModelConfig, HeadsConfig]]:
    """Every different model of the experiments of a family, with the name of the first."""
    seen, named = set(), set()
    for name in experiments():
        # Experiments that score published weights have the models of others.
        if not name.startswith(f"{FOLDERS[family]}/") or "/published_" in name:
            continue
        config: Any = compose_config([f"experiment={name}"])
        key = str((config.model, config.heads))
        if key not in seen and not config.evaluates:
            seen.add(key)
            yield (
                f"experiment {name}",
                OmegaConf.to_object(config.model),
                OmegaConf.to_object(config.heads),
            )
            named.add(config.model.name)
    for name in (f"transnext_{size}" for size in SIZES if family == "timm"):
        if name not in named:
            yield name, TimmConfig(name=name), HeadsConfig()


def fitting_model(source: Path, state: Mapping[str, Tensor]) -> tuple[str, str, nn.Module]:
    """Family, name and empty model of the one experiment whose shapes a file's weights have."""
    family = family_of(state)
    renamed = import_module(f"moh.backbones.published.{FAMILIES[family]}").from_published(state)
    found = []
    for name, model, heads in known_models(family):
        built = build_empty(model, heads)
        if not key_faults(built.state_dict(), renamed):
            found.append((name, built))
    if len(found) == 1:
        return family, *found[0]
    heads = "; ".join(heads_of(state)) or "none"
    if found:
        raise RunError(
            f"{source} fits {', '.join(name for name, _ in found)}: say which with --experiment"
        )
    raise RunError(
        f"{source} has the shapes of no experiment (routers: {heads}); name its model with "
        "--experiment NAME [key=value ...]"
    )


def open_source(weights: Weights, ema: bool, named: str | None, overrides: list[str]) -> Converted:
    """The model that the source is of, with its weights."""
    if weights.kind == "run":
        if named:
            raise RunError("--experiment is not for a run folder: its config.yaml says what it is")
        return open_run(weights, ema)
    if named:
        config = experiment(named, overrides)
        family, of = config.model.family, named
        model = build_empty(config.model, config.heads)
        if weights.kind == "folder":
            check_same(model, weights.path)
    elif weights.kind == "folder":
        described = describe_folder(weights.path)
        family, of = described.family, "its config.json"
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = described.build()
    else:
        family, of, model = fitting_model(weights.path, read_state(weights.path, ema))
        named = of.removeprefix("experiment ") if of.startswith("experiment ") else None
    load_published(model, weights.path, family, ema, assign=True)
    return Converted(model, family, of, named)


def open_run(weights: Weights, ema: bool) -> Converted:
    """The model of a run of this project, with the weights of its newest checkpoint."""
    folder = weights.path.parent.parent
    config = load_config(folder)
    model = build_model(without_pretrained(config.model), config.heads)
    samples = checkpoint.load_weights(weights.path, model, ema)
    of = f"run {folder}, sample {samples:,}"
    if config.trainer.ema_decay is not None:
        of += ", averaged weights" if ema else ", weights of the last update"
    return Converted(model, config.model.family, of, config.name, config)


def write_tokenizer(source: Path, run: Config | None, target: Path) -> str:
    """Put the tokenizer beside a language model; says what is missing, if something is."""
    if run is not None:
        from moh.data.text import TextSet

        cache = Path(run.runs_dir) / "cache"
        try:
            TextSet.load(run.data, run.model.vocab_size, cache).tokenizer.save_pretrained(target)
        except (RunError, ValueError) as error:
            return f"no tokenizer written: {error}"
        return ""
    for pattern in BESIDE_LLAMA:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)
    return ""


def usage(converted: Converted, target: Path, to: str) -> str:
    """How to load what was written."""
    if to == "published":
        if converted.family == "llama" and (target / "config.json").is_file():
            return "its modeling_llama.py (the authors') belongs beside config.json"
        named = converted.experiment or "NAME"
        return f"python -m moh experiment={named} mode=eval checkpoint={target}"
    return {
        "timm": f'import moh.backbones.timm_moh; timm.create_model("local-dir:{target}", '
        "pretrained=True)",
        "dit": f'moh.backbones.dit.DiT.from_pretrained("{target}")',
        "llama": "import moh.backbones.llama; "
        f'transformers.AutoModelForCausalLM.from_pretrained("{target}")',
    }[converted.family]


def convert(options: argparse.Namespace) -> None:
    """Convert as the command line says, and say what was done."""
    target: Path = options.target
    if target.exists():
        raise RunError(f"{target} exists; choose another name or remove it")
    weights = locate(options.source)
    converted = open_source(weights, not options.no_ema, options.experiment, options.overrides)
    model = converted.model
    plan = head_plan(model)
    parameters = sum(p.numel() for p in model.parameters())
    write = write_published if options.to == "published" else write_ours
    write(model, converted.family, target)
    if weights.classes and target.is_dir():
        write_json(target / CLASSES, {"classes": weights.classes})
    print(f"{options.source}: {converted.of}")
    print(f"  {plan or 'plain MHA'}; {parameters:,} parameters")
    if converted.family == "llama" and target.is_dir():
        folder = weights.path if weights.kind == "folder" else weights.path.parent
        if note := write_tokenizer(folder, converted.run, target):
            print(f"  {note}")
    print(f"{target}: {usage(converted, target, options.to)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--to", choices=("ours", "published"), default="ours", help="form to write (ours)"
    )
    parser.add_argument("--experiment", metavar="NAME", help="whose model the source is of")
    parser.add_argument("--no-ema", action="store_true", help="weights that are not averaged")
    return parser


def main() -> int:
    options = parser().parse_intermixed_args()
    try:
        if options.overrides and not options.experiment:
            raise ValueError(f"{options.overrides[0]} needs --experiment")
        convert(options)
    except (RunError, ValueError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
