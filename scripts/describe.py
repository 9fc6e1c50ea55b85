"""Sizes, head budgets and cost of models, without building them in memory.

    python scripts/describe.py [EXPERIMENT ...] [--json]

For each: parameters, activated ratio, shared share, routed layers, and multiply-accumulates an
image or token for MHA, for MoH with all heads computed and for MoH with the selected heads alone.
Without names: every model of the paper and of the demo, each once. A name given twice counts once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from moh.backbones.build import is_mha
from moh.cli import compose_config, experiments
from moh.config import HeadsConfig, ModelConfig, TextConfig
from moh.evaluation.cost import Description, describe_model
from moh.model_parts import GROUPS, model_parts
from moh.validation import validate

Sized = tuple[ModelConfig, HeadsConfig, Description]


def distinct() -> Iterator[tuple[str, Sized]]:
    """Experiments with a model of their own: longer trainings of one model are left out."""
    seen = set()
    for name, config in model_parts(experiments()).items():
        if OmegaConf.is_missing(config.model, "pretrained"):
            continue  # whatever lies in a folder
        key = str((config.model, config.heads))
        if key not in seen:
            seen.add(key)
            parts: list[Any] = [OmegaConf.to_object(config[group]) for group in GROUPS]
            yield name, sized(*parts)


def named(names: Sequence[str]) -> Iterator[tuple[str, Sized]]:
    """Experiments by name, each once."""
    if wrong := [name for name in names if "=" in name]:
        raise ValueError(f"{wrong[0]!r} is a setting, not the name of an experiment")
    for name in dict.fromkeys(names):
        config = validate(compose_config([f"experiment={name}"]), paths=False)
        yield name, sized(config.model, config.heads, config.data)


def sized(model: ModelConfig, heads: HeadsConfig, data: Any) -> Sized:
    """A model and its description."""
    seq_len = data.seq_len if isinstance(data, TextConfig) else None
    return model, heads, describe_model(model, heads, seq_len)


def human(value: float) -> str:
    """A count of multiply-accumulates with its prefix."""
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.4g} {unit}".rstrip()
        value /= 1000
    return f"{value:.4g} T"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT")
    parser.add_argument("--json", action="store_true", help="one JSON object, names as keys")
    options = parser.parse_args()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("experiment", no_wrap=True)
    for header in (
        "parameters",
        "active",
        "shared/active",
        "routed",
        "MHA",
        "MoH dense",
        "MoH sparse",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("MACs per", no_wrap=True)
    found = {}
    try:
        chosen = named(options.experiments) if options.experiments else distinct()
        for name, (model, heads, d) in chosen:
            if sys.stderr.isatty():
                print(f"\rcounted {name:<40}", end="\r", file=sys.stderr, flush=True)
            found[name] = {"model": model.name, "heads": heads.name, **asdict(d)}
            mha = is_mha(heads)
            table.add_row(
                name,
                f"{d.parameters:,}",
                f"{100 * d.activated_ratio:.1f} %",
                "–" if d.shared_share is None else f"{100 * d.shared_share:.1f} %",
                "–" if mha else f"{d.routed_layers}/{d.layers}",
                human(d.mha_macs),
                "–" if mha else human(d.dense_macs),
                "–" if mha else human(d.sparse_macs),
                d.unit,
            )
    except ValueError as error:
        print(f"describe: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        Console(width=max(120, Console().width)).print(table)
        print(
            "\nMACs are multiply-accumulates of one forward pass. Sparse: attention, query and\n"
            "output projection of the selected heads alone; keys and values of all. Causal\n"
            "attention counts half."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
