"""Time MHA against MoH: dense, sparse, auto, and the straightforward way.

    python scripts/benchmark.py attention --tokens 1024 --heads 16 --ratio 0.5
    python scripts/benchmark.py layer --tokens 256 --heads 16 --backward
    python scripts/benchmark.py model --experiment dit/moh_s2_75 --batch 4
    python scripts/benchmark.py train --experiment vit/moh_s_75 --batch 4 --json
    python scripts/benchmark.py generate --context 8192 --heads 16
    python scripts/benchmark.py suite       # everything, to results/benchmarks/ (make benchmark)
    python scripts/benchmark.py overheads   # our training loop beside a bare one, MoH beside MHA
    python scripts/benchmark.py calibrate   # from where on auto takes sparse, for this machine

All contenders are timed in one process, in turns: what disturbs the machine disturbs them all.
Times are medians, ratios medians of each round's ratio. `limit` is the least ratio possible: the
multiply-accumulates of the active heads over those of all. Of `generate`, ms are of a token.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from benchmarks import calibrate, suite
from benchmarks.generate import CACHES, GenerateShape
from benchmarks.measure import environment, measure
from benchmarks.models import ModelShape
from benchmarks.report import SECTIONS
from benchmarks.shape import DTYPES, AttentionShape
from rich.console import Console
from rich.table import Table

from moh.memory import keep_freed_memory

NAMES = {
    "mha": "MHA",
    "reserved": "MHA, cache with room",
    "dense": "MoH dense",
    "sparse": "MoH sparse",
    "auto": "MoH auto",
    "reference": "MoH plain",
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = found.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name in ("attention", "layer"):
        command = commands.add_parser(name, help=f"{name} of one shape")
        command.add_argument("--tokens", type=int, default=1024, help="keys (default 1024)")
        _heads(command, {"attention": 1, "layer": 8}[name])
        command.add_argument("--causal", action="store_true")
        command.add_argument("--backward", action="store_true", help="forward and backward")
        if name == "attention":
            command.add_argument("--queries", type=int, help="1: a step with cached keys")
            command.add_argument("--kv-heads", type=int, help="key heads (default: all)")
            command.add_argument("--load", choices=("even", "skewed"), default="even")
        _common(command)
    for name, text in (("model", "inference of a model"), ("train", "training step of a model")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--experiment", required=True, help="e.g. vit/moh_s_75")
        batch = {"model": 8, "train": 4}[name]
        command.add_argument("--batch", type=int, default=batch, help=f"samples ({batch})")
        command.add_argument("--tokens", type=int, help="of a sequence, for language models")
        _common(command)
    command = commands.add_parser("generate", help="model.generate of a LLaMA, by token")
    command.add_argument("--context", type=int, default=8192, help="cached tokens (8192)")
    command.add_argument("--new-tokens", type=int, default=8, help="made by a call (8)")
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--kv-heads", type=int, help="key heads (default: all)")
    command.add_argument("--cache", choices=CACHES, default="growing")
    command.add_argument("--first-token", action="store_true", help="time a prompt of --context")
    _heads(command, 1)
    _common(command)
    for name, text in (
        ("suite", "the paper's Table 7, long sequences, layers, models, generation"),
        ("overheads", "a training step: our loop, a bare loop, MoH, the data"),
        ("calibrate", "write the thresholds of execution=auto for this machine"),
    ):
        command = commands.add_parser(name, help=text)
        _device(command)
        if name == "suite":
            command.add_argument(
                "--sections",
                nargs="+",
                choices=list(SECTIONS),
                metavar="SECTION",
                help=f"measure these anew, keep the others: {', '.join(SECTIONS)}",
            )
    return found


def _heads(command: argparse.ArgumentParser, batch: int) -> None:
    command.add_argument("--heads", type=int, default=16)
    command.add_argument("--head-dim", type=int, default=64, help="width of a head")
    command.add_argument("--batch", type=int, default=batch, help=f"samples ({batch})")
    command.add_argument("--ratio", type=float, default=0.5, help="activated ratio")
    command.add_argument(
        "--shared-share", type=float, default=0.5, help="shared heads over active heads"
    )


def _device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")


def _common(command: argparse.ArgumentParser) -> None:
    _device(command)
    command.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    command.add_argument("--seconds", type=float, default=20.0, help="stop after about this long")
    command.add_argument("--rounds", type=int, default=30, help="at most this many rounds")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def shape_of(options: argparse.Namespace) -> AttentionShape | ModelShape | GenerateShape:
    if options.what == "generate":
        return GenerateShape(
            context=options.context,
            batch=options.batch,
            layers=options.layers,
            heads=options.heads,
            key_heads=options.heads if options.kv_heads is None else options.kv_heads,
            head_dim=options.head_dim,
            ratio=options.ratio,
            shared_share=options.shared_share,
            new_tokens=1 if options.first_token else options.new_tokens,
            cache=options.cache,
            first=options.first_token,
            dtype=options.dtype,
            device=options.device,
        )
    if options.what in ("model", "train"):
        return ModelShape(
            options.experiment,
            options.batch,
            options.tokens,
            options.what == "train",
            options.dtype,
            options.device,
        )
    return AttentionShape(
        tokens=options.tokens,
        queries=getattr(options, "queries", None) or options.tokens,
        heads=options.heads,
        head_dim=options.head_dim,
        batch=options.batch,
        key_heads=getattr(options, "kv_heads", None) or options.heads,
        ratio=options.ratio,
        shared_share=options.shared_share,
        causal=options.causal,
        backward=options.backward,
        dtype=options.dtype,
        device=options.device,
        load=getattr(options, "load", "even"),
    )


def show(record: dict[str, Any]) -> None:
    """Print a measurement for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for header in ("ms", "quartiles", "over MHA", "quartiles"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, label in NAMES.items():
        if f"{name}_ms" not in record:
            continue
        taken = record[f"{name}_ms"]
        if taken is None:
            table.add_row(label, "too large")
            continue
        low, high = record["quartiles_ms"][name]
        ratio, spread = record.get(f"{name}_over_mha"), ""
        if ratio is not None:
            spread = "{:.3f} – {:.3f}".format(*record["quartiles_over_mha"][name])
        elif name in ("reference", "reserved"):
            ratio = taken / record["mha_ms"]
        table.add_row(
            label,
            f"{taken:.2f}",
            f"{low:.2f} – {high:.2f}",
            "1" if ratio is None else f"{ratio:.3f}",
            spread,
        )
    console = Console()
    console.print(table)
    took = f", auto took {record['auto']}" if "auto" in record else ""
    console.print(f"limit {record['limit']:.3f}; {record['rounds']} rounds{took}")
    if record["what"] == "generate" and not record["first"]:
        rates = (1e3 * record["batch"] / record[f"{name}_ms"] for name in ("mha", "auto"))
        console.print("tokens a second: MHA {:.1f}, MoH auto {:.1f}".format(*rates))


def main() -> int:
    options = parser().parse_args()
    keep_freed_memory()  # as a run does
    try:
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"threads {options.threads} must be at least 1")
            torch.set_num_threads(options.threads)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda: no GPU is visible here; allowed: cpu")
        if options.what == "suite":
            suite.run(options.device, options.sections or list(SECTIONS))
        elif options.what == "overheads":
            suite.run_overheads(options.device)
        elif options.what == "calibrate":
            calibrate.run(options.device)
        else:
            if options.seconds <= 0 or options.rounds < 1 or options.batch < 1:
                raise ValueError("seconds must be above 0, rounds and batch at least 1")
            record = measure(options.what, shape_of(options), options.seconds, options.rounds)
            if options.json:
                print(json.dumps(record | {"environment": environment()}, indent=1))
            else:
                show(record)
    except (ValueError, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
