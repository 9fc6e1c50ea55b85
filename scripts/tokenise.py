"""Tokenise a text source into memory-mapped shards for training language models.

    python scripts/tokenise.py OUT --tokenizer FOLDER --source '/data/c4/*.json.gz'
    python scripts/tokenise.py OUT --tokenizer FOLDER --source /data/dolma --part 2/8
    python scripts/tokenise.py OUT --tokenizer FOLDER --source hub:allenai/c4:en
    python scripts/tokenise.py OUT --verify
    python -m moh experiment=llm/moh_b_75_100b data.root=FOLDER_OF_OUTS

Sources are JSON lines (.jsonl, .json, .ndjson), plain text (.txt) and parquet files, each packed
with gzip, zstd, bzip2 or xz or not, folders and patterns of them, or hub:NAME[:CONFIG[:SPLIT]] for
whatever `datasets` loads. For a mixture each source gets an OUT of its own, side by side in one
folder; the weights are data.sources in conf/data/pretraining_2048.yaml. What was interrupted goes
on where it stopped. Parts may run at once, on several machines: part K of N takes every N-th file
(a hub: data set is one).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from arguments import fraction, positive, share

from moh.data.documents import HUB, Reading, Record, expand_sources
from moh.data.shard_writer import Position, ShardWriter, part_name, save_tokenizer
from moh.data.shards import INDEX, LAYOUT, PARTS, read_index, read_shard, shard_names, verify_shard
from moh.data.tokenising import (
    RULES,
    DocumentTokenizer,
    Encoded,
    encode_in_worker,
    start_worker,
)
from moh.errors import RunError
from moh.runner import locked, write_json
from moh.training.progress import RunProgress, console

BATCH_BYTES = 1 << 21  # text that a process is handed at once
BATCH_RECORDS = 4096
GIVE_UP = 1000  # records without a document from the first on: the options are wrong
CUT_SHORT = "the rest of a damaged file"


@dataclass(frozen=True)
class Batch:
    """Records that are tokenised together.

    Attributes:
        skipped: what was found wrong while they were read.
        following: where reading goes on after them; None at the end.
        read: bytes of the part's files that have been read so far.
    """

    records: list[Record]
    skipped: Counter[str]
    following: Position | None
    read: int


class Part:
    """The files of one part, read in order."""

    def __init__(self, options: argparse.Namespace, files: list[str]) -> None:
        self.files = files[options.part[0] - 1 :: options.part[1]]
        self.sizes = [0 if file.startswith(HUB) else os.path.getsize(file) for file in self.files]
        self._key, self._blank_lines = options.text_key, options.blank_lines
        self._skip_damaged = options.skip_damaged
        # No more than a small shard is meant to hold.
        self._batch_bytes = min(BATCH_BYTES, options.shard_tokens)

    def batches(self, start: Position) -> Iterator[Batch]:
        """Batches from a position on; where they are cut depends on the position alone."""
        held: Batch | None = None
        for batch in self._batches(start):
            if held is not None:
                yield held
            held = batch
        last = held or Batch([], Counter(), None, sum(self.sizes))
        yield Batch(last.records, last.skipped, None, sum(self.sizes))

    def _batches(self, start: Position) -> Iterator[Batch]:
        batch: list[Record] = []
        skipped: Counter[str] = Counter()
        size = 0
        for number, file in enumerate(self.files[start.file :], start.file):
            done = start.record if number == start.file else 0
            reading = Reading(file, self._key, self._blank_lines)
            records = islice(iter(reading), done, None)
            while (record := self._next(records, skipped)) is not None:
                batch.append(record)
                size += len(record.data or b"")
                done += 1
                if size >= self._batch_bytes or len(batch) == BATCH_RECORDS:
                    read = sum(self.sizes[:number]) + reading.position()
                    yield Batch(batch, skipped, Position(number, done), read)
                    batch, skipped, size = [], Counter(), 0
        if batch or skipped:
            yield Batch(batch, skipped, None, sum(self.sizes))

    def _next(self, records: Iterator[Record], skipped: Counter[str]) -> Record | None:
        try:
            return next(records, None)
        except RunError as error:
            if not self._skip_damaged:
                hint = "replace the file, or --skip-damaged keeps what comes before"
                raise RunError(f"{error}; {hint}") from None
            console.print(str(error), style="yellow", soft_wrap=True)
            skipped[CUT_SHORT] += 1
            return None


def plan_of(options: argparse.Namespace, files: list[str], tokenizer: DocumentTokenizer) -> str:
    """Hash of everything that decides what a shard holds."""
    what = [
        [LAYOUT, RULES],
        # Not where they lie: another machine may see them elsewhere.
        [file if file.startswith(HUB) else Path(file).name for file in files],
        tokenizer.sha256,
        options.text_key,
        options.blank_lines,
        options.validation_share,
        options.shard_tokens,
        options.max_tokens,
        options.part[1],
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def tokenise(options: argparse.Namespace) -> int:
    """Make this part's shards, then the index if every part is done."""
    files = expand_sources(options.source)
    tokenizer = DocumentTokenizer(options.tokenizer, options.begin_token)
    hold_out = round(1 / options.validation_share) if options.validation_share else 0
    plan = plan_of(options, files, tokenizer)
    lock = options.out / ".parts" / part_name(options.part)
    lock.mkdir(parents=True, exist_ok=True)
    with locked(lock):
        writer = ShardWriter(options.out, options.part, plan, tokenizer, hold_out)
        save_tokenizer(options.out, tokenizer)
        part = Part(options, files)
        if not part.files:
            raise RunError(f"--part {part_name(options.part)}: there are only {len(files)} files")
        if writer.position is not None:
            run(options, part, writer)
    if writer.skipped:
        reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(writer.skipped.items()))
        console.print(f"skipped records: {reasons}", style="yellow", soft_wrap=True)
    return finish(options, files, tokenizer, plan)


def run(options: argparse.Namespace, part: Part, writer: ShardWriter) -> None:
    """Tokenise from the writer's position to the end of the part, or to ``--max-tokens``."""
    number, parts = options.part
    most = options.max_tokens and -(-options.max_tokens // parts)
    label = f"tokens {number}/{parts}" if parts > 1 else "tokens"
    assert writer.position is not None
    begun, before = time.monotonic(), writer.tokens
    with (
        RunProgress(label) as progress,
        ProcessPoolExecutor(
            options.workers,
            initializer=start_worker,
            initargs=(str(options.tokenizer), options.begin_token),
        ) as pool,
    ):
        if writer.shards:
            progress.say(f"goes on after {writer.shards} shards, {writer.tokens:,} tokens")
        batches = part.batches(writer.position)
        try:
            for batch, encoded in in_order(pool, batches, options.text_key, 4 * options.workers):
                writer.add(encoded, batch.skipped)
                require_documents(writer, part, batch, options.text_key)
                made = writer.tokens + writer.held
                following = batch.following if most is None or made < most else None
                if writer.held >= options.shard_tokens or following is None:
                    writer.write(following)
                note = f"{made:,} tokens  {(made - before) / (time.monotonic() - begun):,.0f}/s"
                if most is None:
                    done, total, note = batch.read >> 20, sum(part.sizes) >> 20, f"MiB, {note}"
                else:
                    done, total = min(made, most), most
                progress("tokenising", done, max(1, total), note)
                if following is None:
                    break
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def in_order(
    pool: ProcessPoolExecutor, batches: Iterator[Batch], key: str, most: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Batches in order with their tokens; at most ``most`` are under way."""
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(encode_in_worker, batch.records, key)))
        if len(waiting) == most:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def require_documents(writer: ShardWriter, part: Part, batch: Batch, key: str) -> None:
    """Stop early where nothing that is read holds a document."""
    without = sum(writer.unwritten_skips.values())
    if not writer.documents and (without >= GIVE_UP or (without and batch.following is None)):
        reasons = ", ".join(sorted(writer.unwritten_skips))
        raise RunError(
            f"no document in the first {without:,} records of {part.files[0]} ({reasons}): "
            f"--text-key names where the text is, now {key!r}"
        )


def finish(
    options: argparse.Namespace, files: list[str], tokenizer: DocumentTokenizer, plan: str
) -> int:
    """Write the index once every part is whole, and say what there is."""
    out, parts = options.out, options.part[1]
    shards = [read_shard(out, name) for name in shard_names(out)]
    shards = [shard for shard in shards if shard["plan"] == plan]
    done = {s["name"].rpartition("-")[0] for s in shards if s["following"] is None}
    wanted = [part_name((k, parts)) for k in range(1, parts + 1) if files[k - 1 :: parts]]
    if missing := [name for name in wanted if name not in done]:
        console.print(
            f"{out}: {len(missing)} of {parts} parts are not done yet ({', '.join(missing[:5])}); "
            f"the last one writes {INDEX}",
            soft_wrap=True,
        )
        return 0
    totals = {
        half: {
            key: sum(shard[half][key] for shard in shards)
            for key in ("tokens", "documents", "bytes")
        }
        for half in PARTS
    }
    kept = ("name", "sha256", *PARTS)
    index: dict[str, Any] = {
        "layout": LAYOUT,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "boundary": tokenizer.boundary,
        "dtype": np.dtype(tokenizer.dtype).name,
        "text_key": options.text_key,
        "sources": files,
        **totals,
        "skipped": dict(sum((Counter(shard["skipped"]) for shard in shards), Counter[str]())),
        "shards": [{key: shard[key] for key in kept} for shard in shards],
    }
    content = json.dumps([index["tokenizer_sha256"], index["shards"]])
    index["fingerprint"] = hashlib.sha256(content.encode()).hexdigest()
    write_json(out / INDEX, index)
    say_totals(out, index)
    return 0


def say_totals(out: Path, index: dict[str, Any]) -> None:
    train, held = index["train"], index["validation"]
    console.print(
        f"{out}: {len(index['shards'])} shards, {train['tokens']:,} training tokens of "
        f"{train['documents']:,} documents, {held['documents']:,} documents held out, "
        f"{sum(index['skipped'].values()):,} records skipped",
        soft_wrap=True,
    )
    if not held["documents"]:
        console.print(
            "nothing is held out to score a model on: choose a larger --validation-share for a "
            "source as small as this",
            style="yellow",
            soft_wrap=True,
        )


def verify(out: Path) -> int:
    """Read every shard and compare it with its checksums."""
    index = read_index(out)
    bad = 0
    with RunProgress("tokens") as progress:
        for number, entry in enumerate(index["shards"], 1):
            try:
                verify_shard(out, entry, index["vocab_size"], index["boundary"])
            except RunError as error:
                bad += 1
                console.print(str(error), style="red", soft_wrap=True)
            progress("verifying", number, len(index["shards"]))
    say_totals(out, index)
    console.print(f"{bad} shards are not as they should be" if bad else "every shard is right")
    return int(bad > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT")
    add("--source", action="append", default=[], help="file, folder, pattern or hub:NAME; repeat")
    add("--tokenizer", type=Path, help="folder of a transformers tokenizer")
    add("--text-key", default="text", help="of a document in a line or table (text)")
    add("--blank-lines", action="store_true", help="they part the documents of a .txt file")
    add("--begin-token", action="store_true", help="put it before each document")
    add("--validation-share", type=fraction, default=0.0005, help="of the documents (0.0005)")
    add("--max-tokens", type=positive, help="stop after so many (of all parts), such as 61e9")
    add("--shard-tokens", type=positive, default=1 << 27, help="of a shard, about (2^27)")
    add("--part", type=share, default=(1, 1), metavar="K/N", help="share of the files to take")
    add("--workers", type=positive, default=os.cpu_count() or 1, help="processes (one a CPU)")
    add("--skip-damaged", action="store_true", help="take what can be read of a damaged file")
    add("--verify", action="store_true", help="check shards: OUT --verify")
    options = parser.parse_args()
    if not options.verify and not (options.source and options.tokenizer):
        parser.error("--source and --tokenizer are needed, or --verify")
    return options


def main() -> int:
    options = parse()
    try:
        return verify(options.out) if options.verify else tokenise(options)
    except (RunError, ValueError) as error:
        print(f"tokenise: {error}", file=sys.stderr)
    except BrokenProcessPool:
        print("tokenise: a process died (no memory?); fewer --workers may help", file=sys.stderr)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"tokenise: {error.strerror or error}{where}", file=sys.stderr)
    except KeyboardInterrupt:
        print("tokenise: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
