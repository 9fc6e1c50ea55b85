"""Score a set of images against another one.

    python scripts/score_images.py GENERATED REFERENCE [--features inception] [--json]

Each is a folder of images (png, jpg, webp, tif, ...), an .npz whose arr_0 is uint8 (N, H, W, 3), or
a run folder that kept its samples; the reference may be one of ADM's reference batches, whose
statistics are then used. Images are decoded as training decodes them: alpha is dropped, grey of 16
bits scaled to 8. Inception gives FID, sFID, inception score, precision and recall; another network
gives a Fréchet distance, precision and recall under its own name. Exit status 1 if a set or the
weights cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from moh.errors import RunError
from moh.evaluation.extraction import extract
from moh.evaluation.features import EXTRACTORS, load_features
from moh.evaluation.image_sets import ImageSource, open_images
from moh.evaluation.reference import Reference
from moh.evaluation.sample_set import open_samples
from moh.evaluation.scores import Score, scores
from moh.training.progress import RunProgress

QUOTABLE = 50_000  # images below which a Fréchet distance is marked

console = Console(highlight=False)


def open_set(path: Path) -> ImageSource:
    """A folder of images, an ``.npz``, or the samples of a run folder."""
    return open_samples(path) if (path / "config.yaml").is_file() else open_images(path)


def open_reference(path: Path, features: str) -> Reference:
    """A set as :func:`open_set` takes it, or a reference batch of ADM's suite."""
    if (path / "config.yaml").is_file():
        return Reference.of(open_samples(path))
    return Reference.open(path, EXTRACTORS[features])


def describe(images: ImageSource) -> dict[str, object]:
    """Name, number and size of a set."""
    height, width = images.read(0, 1).shape[2:]
    return {"name": images.label, "images": len(images), "size": f"{width}x{height}"}


def show(found: dict[str, Score], sides: dict[str, str]) -> None:
    """Print the scores, what they are of, and how they were made."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for score in found.values():
        digits = 4 if score.label in ("Precision", "Recall") else 3
        better = "↑" if score.higher_is_better else "↓"
        table.add_row(score.label, f"{score.value:.{digits}f}", f"{better}  {score.detail}")
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, text in sides.items():
        facts.add_row(name, text)
    console.print(table)
    console.print()
    console.print(facts)


def measure(arguments: argparse.Namespace) -> None:
    """Score and print.

    Raises:
        RunError: a set that cannot be read; ValueError, FileNotFoundError: no such weights.
    """
    if absent := [str(p) for p in (arguments.generated, arguments.reference) if not p.exists()]:
        raise RunError(f"{' and '.join(absent)} do{'es' * (len(absent) == 1)} not exist")
    reference = open_reference(arguments.reference, arguments.features)
    generated = open_set(arguments.generated)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    extractor = load_features(arguments.features, arguments.features_path, device)
    with RunProgress("score", enabled=not arguments.json) as progress:
        sample = extract(generated, extractor, arguments.batch, progress, with_probs=True)
        known = reference.features(extractor, arguments.batch, arguments.cache, progress)
        found = scores(extractor, known, sample)
    side = describe(generated)
    if arguments.json:
        record = {
            "scores": {name: score.value for name, score in found.items()},
            "generated": side,
            "reference": reference.label,
            "features": {"pipeline": extractor.pipeline, "sha256": extractor.weights_sha256},
        }
        print(json.dumps(record, indent=1, ensure_ascii=False))
        return
    few = f"; fewer than {QUOTABLE:,}" if len(generated) < QUOTABLE else ""
    sides = {
        "generated": f"{side['name']}: {len(generated):,} images, {side['size']}{few}",
        "reference": reference.label,
        "features": extractor.pipeline,
    }
    show(found, sides)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("generated", type=Path, help="folder of images, .npz or run folder")
    parser.add_argument("reference", type=Path, help="the same, or an ADM reference batch")
    parser.add_argument("--features", choices=list(EXTRACTORS), default="inception")
    parser.add_argument("--features-path", type=Path, help="file with the network's weights")
    parser.add_argument("--batch", type=int, default=64, help="images at a time (64)")
    parser.add_argument("--device", help="cpu or cuda; default: a GPU if there is one")
    parser.add_argument("--cache", type=Path, help="folder that keeps the reference's features")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.batch < 1:
        parser.error(f"--batch {arguments.batch} must be at least 1")
    try:
        measure(arguments)
    except (RunError, ValueError, OSError) as error:
        message = str(error).replace("eval.features_path", "--features-path")
        print(f"score_images: {message.replace('eval.features', '--features')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
