"""Documents of text files in the forms in which corpora come."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from moh.errors import RunError

HUB = "hub:"
KINDS = {
    ".jsonl": "lines",
    ".json": "lines",
    ".ndjson": "lines",
    ".parquet": "parquet",
    ".txt": "text",
}
PACKED = ("", ".gz", ".zst", ".bz2", ".xz")

Kind = Literal["line", "text", "plain"]


@dataclass(frozen=True)
class Record:
    """One entry of a source, before it is known whether it holds a document.

    Attributes:
        kind: ``line`` (a line of JSON, bytes), ``text`` (a document: text, its UTF-8 bytes, or
            None where the source has none) or ``plain`` (the UTF-8 bytes of a document of a plain
            text file, whose white space at both ends is the file's and not the document's).
        data: its content.
    """

    kind: Kind
    data: bytes | str | None


class SkippedError(Exception):
    """A record that is no document; its message is the reason."""


class EmptyError(SkippedError):
    """A record with nothing but white space."""


def expand_sources(sources: list[str]) -> list[str]:
    """The files of files, folders and patterns, in order of name; ``hub:`` names stay.

    Raises:
        RunError: nothing there, a form that is not known, a file named twice.
    """
    found: list[str] = []
    for source in sources:
        if source.startswith(HUB):
            found.append(source)
            continue
        if os.path.isdir(source):
            files = sorted(str(p) for p in Path(source).rglob("*") if p.is_file() and _kind(p))
        else:
            files = sorted(p for p in glob.glob(source, recursive=True) if os.path.isfile(p))
            files = [source] if os.path.isfile(source) else files
            for file in files:
                if _kind(Path(file)) is None:
                    raise RunError(f"--source {file}: not one of {', '.join(KINDS)}, packed or not")
        if not files:
            raise RunError(f"--source {source}: no text file there ({', '.join(KINDS)}, packed)")
        found += files
    for file, times in Counter(found).items():
        if times > 1:
            raise RunError(f"--source {file} is named twice")
    return found


def _kind(path: Path) -> str | None:
    """``lines``, ``parquet`` or ``text``; None for a name of no known form."""
    suffixes = path.suffixes
    if len(suffixes) > 1 and suffixes[-1] in PACKED:
        return KINDS.get(suffixes[-2])
    return KINDS.get(suffixes[-1]) if suffixes else None


class Reading:
    """The records of a file or of a ``hub:`` data set, in order.

    Args:
        source: one of :func:`expand_sources`.
        key: of the text in a line of JSON or a table.
        blank_lines: whether a plain text file is a document for each of its paragraphs, parted by
            blank lines, and not one document.
    """

    def __init__(self, source: str, key: str, blank_lines: bool = False) -> None:
        self.source, self.key, self.blank_lines = source, key, blank_lines
        self._file: IO[bytes] | None = None

    def position(self) -> int:
        """Bytes of the file that have been read, as it is packed; 0 for a ``hub:`` data set."""
        return self._file.tell() if self._file is not None and not self._file.closed else 0

    def __iter__(self) -> Iterator[Record]:
        """The records.

        Raises:
            RunError: it cannot be read, or is cut short; one line that names it.
        """
        number = 0
        try:
            for record in self._records():
                yield record
                number += 1
        except RunError:
            raise
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise RunError(
                f"cannot read {self.source} after {number} records: {first_line}"
            ) from None

    def _records(self) -> Iterator[Record]:
        if self.source.startswith(HUB):
            yield from _hub(self.source, self.key)
            return
        path = Path(self.source)
        kind = _kind(path)
        with open(path, "rb") as self._file:
            if kind == "parquet":
                yield from _parquet(self._file, path, self.key)
                return
            stream = _unpacked(self._file, path.suffix)
            if kind == "lines":
                yield from _lines(stream, path)
            elif self.blank_lines:
                yield from _paragraphs(stream)
            else:
                yield Record("plain", stream.read())


def _lines(stream: IO[bytes] | gzip.GzipFile, path: Path) -> Iterator[Record]:
    first = True
    for line in stream:
        if not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            raise RunError(f"{path} is one JSON array: one object a line is needed")
        first = False
        yield Record("line", line)


def _paragraphs(stream: IO[bytes] | gzip.GzipFile) -> Iterator[Record]:
    lines: list[bytes] = []
    for line in stream:
        if line.decode(errors="replace").strip():
            lines.append(line)
        elif lines:
            yield Record("plain", b"".join(lines))
            lines = []
    if lines:
        yield Record("plain", b"".join(lines))


class _ArrowStream(io.RawIOBase):
    """pyarrow's decompressor as a Python stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._stream.readinto(buffer))


def _unpacked(file: IO[bytes], suffix: str) -> IO[bytes] | gzip.GzipFile:
    match suffix:
        case ".gz":
            return gzip.open(file, "rb")
        case ".bz2":
            return bz2.open(file, "rb")
        case ".xz":
            return lzma.open(file, "rb")
        case ".zst":
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
            return io.BufferedReader(_ArrowStream(stream), 1 << 20)
    return file


def _parquet(opened: IO[bytes], path: Path, key: str) -> Iterator[Record]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(opened) as file:
        names = file.schema_arrow.names
        if key not in names:
            raise RunError(f"{path} has no column {key!r}; --text-key is one of {', '.join(names)}")
        for batch in file.iter_batches(1024, columns=[key]):
            for value in batch.column(0):
                text = value.as_py()
                yield Record("text", text if isinstance(text, str | bytes) else None)


def _hub(source: str, key: str) -> Iterator[Record]:
    """``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT``; the split is train."""
    from datasets import load_dataset

    name, config, split = [*source.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        # The library raises a type of its own for each way in which a name can be wrong.
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise RunError(f"cannot open data set {name}: {first_line}") from None
    for row in rows:
        if key not in row:
            raise RunError(f"{source} has no column {key!r}; --text-key is one of {', '.join(row)}")
        text = row[key]
        yield Record("text", text if isinstance(text, str) else None)


def document(record: Record, key: str) -> str:
    """The text of a record.

    Raises:
        SkippedError: it holds none, with the reason.
    """
    text: Any = record.data
    if record.kind == "line":
        text = _field(record.data, key)
    if isinstance(text, bytes):
        text = _decode(text)
    if not isinstance(text, str):
        raise SkippedError(f"no text under {key!r}")
    if not text.strip():
        raise EmptyError("empty")
    if record.kind == "plain":
        text = text.strip()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SkippedError("not Unicode (half of a surrogate pair)") from None
    return text


def _field(line: Any, key: str) -> Any:
    try:
        row = json.loads(_decode(line))
    except (ValueError, RecursionError):
        raise SkippedError("not JSON") from None
    if not isinstance(row, dict):
        raise SkippedError("not a JSON object")
    return row.get(key)


def _decode(raw: bytes) -> str:
    try:
        return raw.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError:
        raise SkippedError("not UTF-8") from None
