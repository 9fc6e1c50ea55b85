"""Compare this project with stored reference numbers.

    python scripts/check_parity.py FILE.safetensors ...

Each file is one case: what to build, weights under their published names, inputs, and what the
reference implementation returned for them (float32, CPU). The case is rebuilt, the weights go
through the same conversion that published checkpoints go through, and the largest relative error
of every expected tensor is printed. Exit status 1 if any is past its tolerance, 2 if a file
cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from safetensors import SafetensorError, safe_open

# Largest absolute difference over the largest absolute reference value of the tensor.
OUTPUT, GRADIENT, METRIC = 2e-5, 2e-4, 1e-4

FAMILIES = ("vit", "dit", "llama", "metrics")

console = Console(highlight=False)


def tolerance(family: str, name: str) -> float:
    """The tolerance of one expected tensor."""
    if family == "metrics":
        return METRIC
    return GRADIENT if "grad" in name else OUTPUT


def relative_error(expected: torch.Tensor, ours: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute reference value."""
    if expected.shape != ours.shape:
        raise ValueError(f"shape {tuple(ours.shape)}, the reference has {tuple(expected.shape)}")
    expected, ours = expected.double(), ours.detach().double()
    scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = ((expected - ours).abs().max() / scale).item()
    return error if error == error else float("inf")


def read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The case and the tensors of a file."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if "case" not in metadata:
            raise ValueError("no metadata key 'case'")
        return json.loads(metadata["case"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def check(path: Path) -> Iterator[tuple[str, float, float]]:
    """Name, error and tolerance of every expected tensor of a file."""
    case, tensors = read(path)
    family = case.get("family")
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")
    for name, expected, ours in import_module(f"parity.{family}").check(case, tensors):
        yield name, relative_error(expected, ours), tolerance(family, name)


def expected_names(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Tensors of a file that are results, not inputs."""
    inputs = (
        "weights/",
        "input/",
        "features/",
        "probabilities",
        "cfg/input",
        "padded/attention",
        "padded/position",
        "diffusion/noise",
        "train/labels",
    )
    return {
        name
        for name in tensors
        if not name.startswith(inputs) and not name.endswith(("_index", "_timestep_map"))
    }


def wide(console: Console) -> ConsoleOptions:
    """Options under which nothing has to be cut."""
    return console.options.update(max_width=10_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args().files
    torch.set_grad_enabled(True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("file", "tensor", "rel. error", "tolerance", ""):
        table.add_column(header, no_wrap=True)
    worst, unread, passed = 0, 0, 0
    for path in files:
        try:
            rows = list(check(path))
            missed = expected_names(read(path)[1]) - {name for name, _, _ in rows}
        except SafetensorError as error:
            what = "is a folder" if path.is_dir() else "not a whole safetensors file"
            reason = f"{what} ({error})"
            table.add_row(path.name, "", "", "", f"[red]cannot be checked: {reason}[/]")
            unread += 1
            continue
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            table.add_row(path.name, "", "", "", f"[red]cannot be checked: {reason}[/]")
            unread += 1
            continue
        failed = [name for name, error, limit in rows if error > limit]
        for index, (name, error, limit) in enumerate(rows):
            mark = "[red]FAIL[/]" if name in failed else "[green]ok[/]"
            table.add_row(
                path.name if index == 0 else "", name, f"{error:.1e}", f"{limit:.0e}", mark
            )
        for name in sorted(missed):
            table.add_row("", name, "", "", "[red]not compared[/]")
        worst += len(failed) + len(missed)
        passed += not failed and not missed
    # Names are never cut, however narrow the terminal or pipe.
    console.width = max(console.width, Measurement.get(console, wide(console), table).maximum)
    console.print(table)
    read_files = len(files) - unread
    console.print(f"{passed} of {read_files} files agree with the reference", end="")
    console.print(f"; {unread} could not be checked" if unread else "")
    return 2 if unread else int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
