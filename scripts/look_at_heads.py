"""How the heads of a checkpoint share the work, and how alike they are.

    python scripts/look_at_heads.py RUN_FOLDER
    python scripts/look_at_heads.py EXPERIMENT [key=value ...] [--checkpoint PATH]

Runs the model over some evaluation samples, without scoring it, and writes to --out:
head_load.json and head_similarity.json (as a run's record has them) and a figure of each: load of
the routed heads by layer, by class, by noise level (DiT); similarity of attention patterns and of
head outputs, head against head. Works for MHA too, which has no head load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moh.backbones.build import build_model, without_pretrained
from moh.cli import compose_config
from moh.config import PRETRAINED, Config
from moh.errors import RunError
from moh.evaluation.similarity import KINDS, HeadSimilarity
from moh.reporting.head_figures import load_by_axis, load_by_group, load_by_layer
from moh.reporting.records import HeadLoad as LoadRecord
from moh.reporting.records import HeadSimilarity as SimilarityRecord
from moh.reporting.similarity_figures import pair_mean, similarity_matrices
from moh.reporting.style import save_png
from moh.runner import load_config, run_id, write_json
from moh.tasks.base import Look
from moh.training.gradients import DTYPES
from moh.training.progress import RunProgress
from moh.validation import validate
from moh.weights import settle_classes
from moh.worker import build_task, load_weights, set_up

SHOWN = {"pattern": "patterns", "output": "outputs", "gated_output": "gated outputs"}
GROUPS = 40  # classes that a figure shows; more are left to the file


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.samples is not None and options.samples < 1:
        print(f"look_at_heads: --samples {options.samples} must be at least 1", file=sys.stderr)
        return 2
    try:
        config, folder = _configuration(options)
    except (RunError, ValueError) as error:
        print(f"look_at_heads: {error}", file=sys.stderr)
        return 2
    try:
        look, similarity = _look(config, folder, options.samples)
        write(config, look, similarity, options.out or _default_out(config, folder))
    except (RunError, ValueError) as error:
        print(f"look_at_heads: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"look_at_heads: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", metavar="EXPERIMENT|RUN_FOLDER")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the experiment")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="weights: anything that checkpoint= takes; default: the run's own newest",
    )
    parser.add_argument("--samples", type=int, help="evaluation samples; default: the task's own")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: heads/ of the run, or of runs/"
    )
    return parser


def _configuration(options: argparse.Namespace) -> tuple[Config, Path]:
    """The typed configuration of an evaluation and the run folder that belongs to it.

    Raises:
        ValueError, RunError: neither an experiment nor a run folder, or a wrong override.
    """
    given = [] if options.checkpoint is None else [f"checkpoint={options.checkpoint}"]
    folder = Path(options.what)
    if (folder / "config.yaml").is_file():
        if options.overrides:
            raise ValueError(f"{folder} has its configuration: leave out {options.overrides[0]}")
        config = load_config(folder)
        config.mode, config.checkpoint = "eval", options.checkpoint
        return config, folder
    if folder.is_dir():
        raise RunError(f"{folder} has no config.yaml: not a run folder")
    composed = compose_config(
        [f"experiment={options.what}", *options.overrides, "mode=eval", *given]
    )
    config = validate(composed)
    composed.checkpoint = None
    return config, Path(config.runs_dir) / run_id(composed)


def _default_out(config: Config, folder: Path) -> Path:
    """In the run's folder for its own weights, beside all runs for given ones."""
    if config.checkpoint is None:
        return folder / "heads"
    return Path(config.runs_dir) / "heads" / config.name / Path(config.checkpoint).stem


def _look(config: Config, folder: Path, samples: int | None) -> tuple[Look, dict[str, Any]]:
    """Head load and similarity of the weights that a configuration names."""
    device = set_up(config)
    given = config.checkpoint is not None
    if not given and not (folder / "checkpoints").is_dir():
        raise RunError(f"{folder} has no checkpoint: train first, or name one (--checkpoint PATH)")
    task = build_task(config)
    own = given and config.checkpoint != PRETRAINED
    built = without_pretrained(config.model) if own else config.model
    model = build_model(built, config.heads, config.seed, DTYPES[config.eval.precision])
    load_weights(config, folder, model)
    settle_classes(config, folder, task)
    model = model.to(device).eval()
    similarity = HeadSimilarity()
    with RunProgress(config.name, config.logger.progress) as progress, similarity.watch(model):
        look = task.look(model, samples or task.look_samples, progress)
    if look is None:
        raise RunError(f"{config.name}: no text to run it on; set data.root")
    found = similarity.to_json(look.samples)
    if found is None:
        raise RunError(f"{config.name}: no attention layer was seen")
    return look, found


def write(config: Config, look: Look, similarity: dict[str, Any], out: Path) -> None:
    """Write files and figures to ``out`` and show the scores."""
    load = look.head_load
    out.mkdir(parents=True, exist_ok=True)
    title, protocol = config.name, config.protocol
    write_json(out / "head_similarity.json", similarity)
    record = SimilarityRecord.from_dict(similarity)
    save_png(similarity_matrices(record, title, protocol), out / "head_similarity.png")
    counted = None if load is None else LoadRecord.from_dict(load)
    if load is not None and counted is not None:
        write_json(out / "head_load.json", load)
        save_png(load_by_layer(counted, f"{title}: by layer"), out / "head_load_by_layer.png")
        if 1 < len(counted.groups) <= GROUPS:
            by_group = load_by_group(counted, f"{title}: by class")
            assert by_group is not None
            save_png(by_group, out / "head_load_by_class.png")
        by_axis = load_by_axis(counted, f"{title}: by {counted.axis}")
        if by_axis is not None:
            save_png(by_axis, out / f"head_load_by_{counted.axis.replace(' ', '_')}.png")
    _show(record, look.samples)
    print(f"{out}/")


def _show(record: SimilarityRecord, what: str) -> None:
    print(f"Similarity of two heads, {what}:")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", no_wrap=True)
    for kind in KINDS:
        table.add_column(SHOWN[kind], justify="right")
    totals: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index, name in enumerate(record.layers):
        cells = []
        for kind in KINDS:
            mean = pair_mean(record.matrices[kind][index])
            cells.append("\N{EN DASH}" if mean is None else f"{mean:.4f}")
            totals[kind] += [] if mean is None else [mean]
        table.add_row(name, *cells)
    means = [f"{sum(t) / len(t):.4f}" if t else "\N{EN DASH}" for t in totals.values()]
    table.add_row("mean", *means, style="bold")
    Console(width=max(100, Console().width)).print(table)


if __name__ == "__main__":
    sys.exit(main())
