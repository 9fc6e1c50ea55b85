"""Sizes, head budgets and cost of models, without building them in memory.

    python scripts/describe.py [EXPERIMENT ...] [--json]

For each: parameters, activated ratio, shared share, routed layers, and multiply-accumulates an
image or token for MHA, for MoH with all heads computed and for MoH with the selected heads alone.
Without names: every model of the paper and of the demo, each once.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from moh.backbones.build import is_mha
from moh.cli import compose_config, experiments
from moh.config import Config, TextConfig
from moh.evaluation.cost import Description, describe_model
from moh.validation import validate


def distinct() -> list[str]:
    """Experiments with a model of their own: longer trainings of one model are left out."""
    seen, names = set(), []
    for name in experiments():
        config = compose_config([f"experiment={name}"])
        if OmegaConf.is_missing(config.model, "pretrained"):
            continue  # whatever lies in a folder
        key = json.dumps([str(config.model), str(config.heads)])
        if key not in seen:
            seen.add(key)
            names.append(name)
    return names


def describe(name: str) -> tuple[Config, Description]:
    """The configuration of an experiment and the description of its model."""
    config = validate(compose_config([f"experiment={name}"]), paths=False)
    seq_len = config.data.seq_len if isinstance(config.data, TextConfig) else None
    return config, describe_model(config.model, config.heads, seq_len)


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
        if wrong := [name for name in options.experiments if "=" in name]:
            raise ValueError(f"{wrong[0]!r} is a setting, not the name of an experiment")
        for name in options.experiments or distinct():
            if sys.stderr.isatty():
                print(f"\rcounting {name:<40}", end="\r", file=sys.stderr, flush=True)
            config, d = describe(name)
            found[name] = {"model": config.model.name, "heads": config.heads.name, **asdict(d)}
            mha = is_mha(config.heads)
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
