"""One look for all figures: colours, type, and how a figure becomes part of a page."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with every common colour vision, and in print.
INK = "#1f2933"
MUTED = "#5f6b7a"
GRID = "#e3e7ec"
_BY_RATIO = {"50": "#d55e00", "75": "#0072b2", "90": "#009e73", "80": "#aa4499"}
OTHER = "#8a94a3"
_RC: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,  # names come from data: a dollar sign is a dollar sign
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2.0,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "moh",
    "image.interpolation": "nearest",
}


def colour(row_id: str) -> str:
    """Colour of a row in every figure: MHA dark, MoH by the ratio that ends its id."""
    if "mha" in row_id:
        return INK
    ending = re.search(r"(\d+)$", row_id)
    return _BY_RATIO.get(ending.group(1), OTHER) if ending else OTHER


@contextmanager
def look() -> Iterator[None]:
    """Draw and save inside this context; matplotlib's own settings come back after it."""
    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure (inches) with one axes, apart from pyplot's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def mark_protocol(figure: Figure, protocol: str) -> None:
    """Say in the figure itself that its protocol is not the paper's: figures get copied."""
    if protocol != "paper":
        text = f"{protocol} protocol, not the paper's"
        figure.supxlabel(text, fontsize=8.5, color=MUTED, x=0.99, ha="right")


def svg_uri(figure: Figure) -> str:
    """The figure as a data URI that needs no file beside the page."""
    buffer = io.BytesIO()
    with look():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _uri(buffer.getvalue(), "svg+xml")


def png_uri(path: Path) -> str:
    """An image file as a data URI."""
    return _uri(path.read_bytes(), "png")


def save_png(figure: Figure, path: Path, max_bytes: int = 150_000) -> None:
    """Write a PNG no larger than ``max_bytes``, at the finest resolution that allows it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for dpi in (200, 160, 130, 100, 80, 60):
        buffer = io.BytesIO()
        with look():
            figure.savefig(
                buffer, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None}
            )
        if buffer.tell() <= max_bytes:
            break
    path.write_bytes(buffer.getvalue())


def spread_apart(positions: list[float], distance: float) -> list[float]:
    """Move label positions until neighbours are ``distance`` apart, keeping their order."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    placed: list[float] = []
    for index in order:
        floor = placed[-1] + distance if placed else positions[index]
        placed.append(max(positions[index], floor))
    shift = sum(placed) / len(placed) - sum(positions) / len(positions) if placed else 0.0
    moved = dict(zip(order, placed, strict=True))
    return [moved[index] - shift for index in range(len(positions))]


def _uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
