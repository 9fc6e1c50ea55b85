"""Encode ImageNet with a VAE once, for training a latent diffusion model on it.

    python scripts/cache_latents.py IMAGENET OUT --vae FOLDER_OR_NAME
    python scripts/cache_latents.py IMAGENET OUT --vae ... --device cuda:1 --part 2/8
    python scripts/cache_latents.py OUT --verify
    python -m moh experiment=dit/moh_b2_75 data.root=OUT

Of each image under IMAGENET/train: the mean and the standard deviation of the posterior, for the
image as it is and mirrored, cropped as ADM does. A cache that was interrupted goes on where it
stopped. Parts may run at once, on several GPUs or machines; each makes its own share of the shards.
At 256 pixels ImageNet-1k takes 84 GB (--dtype float16: half of that).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from arguments import positive, share
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor
from torch.utils.data import Dataset

from moh.data.encoding import Encoder, list_hash, read_crop
from moh.data.latents import (
    INDEX,
    METADATA,
    LatentIndex,
    Shard,
    payload_sha256,
    shard_path,
    skipped_images,
)
from moh.data.readers import FolderReader
from moh.data.reading import Key, load, next_batch
from moh.errors import RunError
from moh.runner import locked, write_json
from moh.training.progress import RunProgress, console

SHOWN = 20  # skipped images that are named in the terminal


class Crops(Dataset):
    """Crops by place in the folder's list; zeros where an image cannot be read."""

    def __init__(self, folder: FolderReader, size: int) -> None:
        self.folder, self.size = folder, size

    def __len__(self) -> int:
        return len(self.folder.samples)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, str]:
        path, label = self.folder.samples[key[0]]
        try:
            return read_crop(path, self.size), label, ""
        except RunError as error:
            why = str(error).removeprefix(f"cannot read image {path}: ")
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), label, why


def encode(
    options: argparse.Namespace,
    folder: FolderReader,
    index: LatentIndex,
    encoder: Encoder,
    numbers: list[int],
) -> Iterator[tuple[int, list[int], np.ndarray, np.ndarray, dict[str, str]]]:
    """Batches of a run of shards, never across two.

    Yields:
        Number of the shard; places of the batch's images; moments (n, 2, 2, C, H, W) and labels
        (n,) of those that could be read; the others by path.
    """
    places = [
        [(place,) for place in part[start : start + options.batch]]
        for part in map(index.shard_range, numbers)
        for start in range(0, len(part), options.batch)
    ]
    loader = load(Crops(folder, index.pixels), places, options.workers)
    for keys in places:
        pixels, labels, reasons = next_batch(loader)
        kept = torch.tensor([not why for why in reasons])
        skipped = {
            Path(folder.samples[place][0]).relative_to(folder.root).as_posix(): why
            for (place,), why in zip(keys, reasons, strict=True)
            if why
        }
        pixels = pixels[kept].to(options.device, non_blocking=True)
        if len(pixels):
            both = [encoder.moments(side) for side in (pixels, pixels.flip(-1))]
            moments = torch.stack(both, dim=1).cpu().numpy()
        else:
            moments = np.empty((0, 2, 2, *index.latent), dtype=np.float32)
        taken = [place for (place,) in keys]
        yield taken[0] // index.shard_images, taken, moments, labels[kept].numpy(), skipped


def write_shard(
    out: Path,
    index: LatentIndex,
    number: int,
    moments: np.ndarray,
    labels: np.ndarray,
    skipped: dict[str, str],
) -> None:
    """Write a shard aside and rename it, so that none is ever half-written."""
    path = shard_path(out, number)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    about = {
        "index": index.fingerprint,
        "shard": number,
        "skipped": skipped,
        "sha256": payload_sha256(moments, labels),
    }
    try:
        save_file({"moments": moments, "labels": labels}, aside, {METADATA: json.dumps(about)})
        os.replace(aside, path)
    except SafetensorError as error:
        raise RunError(f"cannot write {path}: {error}") from None
    finally:
        aside.unlink(missing_ok=True)


def make_index(options: argparse.Namespace, folder: FolderReader, encoder: Encoder) -> LatentIndex:
    """The index of the cache that the options ask for."""
    if options.size % encoder.factor:
        raise ValueError(f"--size {options.size} is not a multiple of the VAE's {encoder.factor}")
    side = options.size // encoder.factor
    return LatentIndex(
        classes=list(folder.class_names),
        images=len(folder.samples),
        images_sha256=list_hash(folder),
        pixels=options.size,
        latent=[encoder.channels, side, side],
        vae=encoder.source,
        vae_sha256=encoder.sha256,
        scale=encoder.scale,
        shift=encoder.shift,
        precision=options.precision,
        dtype=options.dtype,
        shard_images=options.shard_images,
    )


def settle_index(out: Path, index: LatentIndex) -> None:
    """Write the index, or check that the one there is the same.

    Raises:
        RunError: the folder holds another cache; the first difference is named.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not (out / INDEX).is_file():
        if any(out.glob("train-*.safetensors")):
            raise RunError(f"{out} holds shards and no {INDEX}: choose another folder")
        # Parts that start at once each write it aside under a name of their own.
        with tempfile.TemporaryDirectory(dir=out, prefix=".index-") as aside:
            write_json(Path(aside) / INDEX, asdict(index))
            os.replace(Path(aside) / INDEX, out / INDEX)
        return
    there = asdict(LatentIndex.read(out))
    for key, value in asdict(index).items():
        if key != "vae" and there[key] != value:
            raise RunError(
                f"{out} holds a cache with another {key} ({short(there[key])}, not "
                f"{short(value)}): choose another folder"
            )


def short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:16]}…"


def whole(out: Path, index: LatentIndex, number: int) -> bool:
    """True if a shard is there and of this cache; a damaged one is made again."""
    if not shard_path(out, number).is_file():
        return False
    try:
        Shard(out, index, number)
    except RunError as error:
        if "damaged" not in str(error):
            raise
        console.print(f"made again: {error}", style="yellow", soft_wrap=True)
        return False
    return True


def cache(options: argparse.Namespace) -> int:
    """Make this part's share of the shards."""
    part, parts = options.part
    folder = FolderReader(options.images / "train")
    encoder = Encoder(options.vae)
    index = make_index(options, folder, encoder)
    lock = options.out / ".parts" / f"{part}of{parts}"
    lock.mkdir(parents=True, exist_ok=True)
    with locked(lock):
        settle_index(options.out, index)
        make_shards(options, folder, encoder, index)
    return report(options.out, index)


def make_shards(
    options: argparse.Namespace, folder: FolderReader, encoder: Encoder, index: LatentIndex
) -> None:
    """Encode and write what this part's share lacks."""
    part, parts = options.part
    own = range(part - 1, index.num_shards, parts)
    for number in own:
        # Left by a run that was killed.
        for path in options.out.glob(f".{shard_path(options.out, number).name}.*.tmp"):
            path.unlink()
    missing = [number for number in own if not whole(options.out, index, number)]
    total = sum(len(index.shard_range(number)) for number in missing)
    # Convolutions as DiT's own training has them on a GPU; CPUs know no other precision.
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    started, done = time.monotonic(), 0
    rows: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    skipped: dict[str, str] = {}
    with RunProgress(f"latents {part}/{parts}" if parts > 1 else "latents") as progress:
        if len(missing) < len(own):
            progress.say(f"{len(own) - len(missing)} of {len(own)} shards are there already")
        for number, taken, moments, classes, bad in encode(
            options, folder, index, encoder, missing
        ):
            rows.append(moments.astype(index.dtype))
            labels.append(classes)
            skipped |= bad
            done += len(taken)
            speed = done / (time.monotonic() - started)
            progress("encoding", done, total, f"{speed:.0f} images/s")
            if taken[-1] == index.shard_range(number)[-1]:
                moments, classes = np.concatenate(rows), np.concatenate(labels)
                write_shard(options.out, index, number, moments, classes, skipped)
                rows, labels, skipped = [], [], {}


def report(out: Path, index: LatentIndex) -> int:
    """Say what the cache holds, what it lacks and what was skipped."""
    there = [n for n in range(index.num_shards) if shard_path(out, n).is_file()]
    shards = [Shard(out, index, number) for number in there]
    skipped = skipped_images(shards)
    for path, why in list(skipped.items())[:SHOWN]:
        console.print(f"skipped train/{path}: {why}", style="yellow", soft_wrap=True)
    if len(skipped) > SHOWN:
        console.print(f"… and {len(skipped) - SHOWN} more, in the shards' metadata")
    images = sum(map(len, shards))
    console.print(
        f"{out}: {len(there)} of {index.num_shards} shards, {images:,} of {index.images:,} images, "
        f"{len(skipped)} skipped",
        soft_wrap=True,
    )
    if len(there) < index.num_shards:
        console.print("the cache is whole when the other parts have run too")
    return 0


def verify(out: Path) -> int:
    """Read every shard and compare it with its own checksum."""
    index = LatentIndex.read(out)
    bad = 0
    with RunProgress("latents") as progress:
        for number in range(index.num_shards):
            try:
                shard = Shard(out, index, number)
                moments = shard.all_moments()
                if payload_sha256(moments, shard.labels) != shard.sha256:
                    raise RunError(f"{shard.path} is damaged (its checksum is another)")
                if not np.isfinite(moments).all():
                    raise RunError(f"{shard.path} holds values that are not finite")
            except RunError as error:
                bad += 1
                console.print(str(error), style="red", soft_wrap=True)
            progress("verifying", number + 1, index.num_shards)
    report(out, index)
    console.print(f"{bad} shards are not as they should be" if bad else "every shard is right")
    return int(bad > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="IMAGENET OUT")
    parser.add_argument("--vae", help="folder of a diffusers AutoencoderKL, or its name on the hub")
    parser.add_argument("--size", type=positive, default=256, help="pixels on a side (256)")
    parser.add_argument("--part", type=share, default=(1, 1), metavar="K/N", help="share to make")
    parser.add_argument("--batch", type=positive, default=64, help="images encoded together (64)")
    parser.add_argument("--workers", type=int, default=8, help="decoding processes (8)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu"
    )
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--precision", choices=("tf32", "fp32"), default="tf32", help="on a GPU")
    parser.add_argument("--shard-images", type=positive, default=2048, help="a file (2048)")
    parser.add_argument("--verify", action="store_true", help="check a cache: OUT --verify")
    options = parser.parse_args()
    wanted = 1 if options.verify else 2
    if len(options.folders) != wanted:
        parser.error("give OUT with --verify" if options.verify else "give IMAGENET and OUT")
    if not options.verify and not options.vae:
        parser.error("--vae is needed: the folder of a diffusers AutoencoderKL, or its hub name")
    options.images, options.out = options.folders[0], options.folders[-1]
    return options


def main() -> int:
    options = parse()
    try:
        return verify(options.out) if options.verify else cache(options)
    except (RunError, ValueError) as error:
        print(f"cache_latents: {error}", file=sys.stderr)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"cache_latents: {error.strerror or error}{where}", file=sys.stderr)
    except KeyboardInterrupt:
        print("cache_latents: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
