"""Page and figure of one machine's measurements, made from its records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report_cells import Record, generation_table, spread_cell, time_cell
from moh.reporting.spec import load_table
from moh.reporting.style import INK, MUTED, colour, look, save_png
from moh.runner import write_text

Speedups = dict[tuple[int, int], float]  # (tokens, activated ratio in percent) -> over MHA

SECTIONS = {
    "table7": (
        "The shapes of the paper's Table 7",
        "Attention alone, 32 heads of width 64. The paper's times are of another machine, with "
        "all products of both methods replaced by sparse ones; only its speed-ups compare.",
    ),
    "long": ("Longer sequences", "Attention alone, inference."),
    "backward": ("Forward and backward", "Attention alone."),
    "cached": (
        "One query with cached keys",
        "Attention alone, a step of generation; keys and values lie head by head, as a cache keeps "
        "them.",
    ),
    "layer": (
        "A layer",
        "timm's attention layer with its projections and, for MoH, its router and balance loss. "
        "Of one image the router costs what a dozen small operations cost, whatever they "
        "compute; a batch pays that once.",
    ),
    "model": (
        "Models",
        "Inference, or a training step (forward, backward, AdamW). Plain: all heads, explicit "
        "softmax, gates by einsum; for TransNeXt also unfolded windows, for DiT's blocks one "
        "operation after the other.",
    ),
    "generate": (
        "Generation",
        "A LLaMA of random weights with heads of width 64 and a vocabulary of 1,000, greedy, by "
        "`model.generate`; ms a token of all sequences. Behind a context of that many tokens, "
        "whose keys and values are random; or the prompt and its first token. *MHA, room*: the "
        "library's model with the cache that MoH models use, which has room for new rows instead "
        "of being made anew for each token. What auto gains on that comes from heads.",
    ),
}


def render(folder: Path) -> Path:
    """Write ``README.md`` and ``speedup.png`` from the records beside them; the page's path."""
    lines: list[str] = []
    for name, part in (("benchmark", _speed), ("overheads", _overheads)):
        path = folder / f"{name}.json"
        if path.is_file():
            found = json.loads(path.read_text())
            lines = lines or list(_head(found["environment"]))
            lines += part(found["environment"], found["measurements"])
            if name == "benchmark" and any(map(_drawn, found["measurements"])):
                save_png(figure(found["measurements"]), folder / "speedup.png")
    page = folder / "README.md"
    write_text(page, "\n".join(lines) + "\n")
    return page


def _head(where: Record) -> Iterator[str]:
    machine = where["gpu"] or f"{where['cpu']}, {where['threads']} threads"
    yield f"# Speed on {machine}"


def _measured_by(where: Record, command: str) -> str:
    return (
        f"PyTorch {where['torch']}, Python {where['python']}, {where['threads']} threads, commit "
        f"{str(where['commit'])[:7]}{' with changes' if where['dirty'] else ''}. "
        f"Written by `{command}`."
    )


def _overheads(where: Record, records: Sequence[Record]) -> Iterator[str]:
    yield from ("", "## The training loop", "")
    yield (
        "A training step of the demo's models at their settings, in turns in one process. *Bare* "
        "is what anybody would write for the same MHA model and data: batch, loss, backward, "
        "clipping, AdamW, averaged weights. The loop adds seeds, the finite check, curves and "
        "progress. Ratios are medians of each round's, ± half the distance of the quartiles."
    )
    yield from ("", _measured_by(where, "scripts/benchmark.py overheads"), "")
    yield "| experiment | bare ms | loop ms | loop over bare | MoH over MHA | data in a step |"
    yield "|---|---:|---:|---:|---:|---:|"
    for record in records:
        low, high = record["quartiles_data_share"]
        cells = (
            record["experiment"],
            time_cell(record["bare_ms"]),
            time_cell(record["mha_ms"]),
            _within(record, "loop_over_bare"),
            _within(record, "moh_over_mha"),
            f"{100 * record['data_share']:.2f} ± {50 * (high - low):.2f} %",
        )
        yield "| " + " | ".join(cells) + " |"


def _within(record: Record, name: str) -> str:
    low, high = record[f"quartiles_{name}"]
    return f"{record[name]:.3f} ± {(high - low) / 2:.3f}"


def _speed(where: Record, records: Sequence[Record]) -> Iterator[str]:
    commits = {str(record.get("commit", where["commit"]))[:7] for record in records}
    yield from ("", _measured_by(where, "make benchmark"), "")
    if earlier := sorted(commits - {str(where["commit"])[:7]}):
        yield f"Sections not measured anew: at commit {', '.join(earlier)}."
        yield ""
    yield (
        "All ways to compute a shape were timed in one process, in turns. Times are medians in "
        "ms; ratios are medians of each round's ratio to MHA, below 1 is faster. *Limit* is the "
        "least ratio possible: multiply-accumulates of the active heads over those of all. "
        "*Auto* is what `execution=auto` took. Skewed: routed head i is selected as 1/i."
    )
    absent = [name for name in SECTIONS if name not in {record["section"] for record in records}]
    if absent:
        yield from ("", f"Not measured on this machine: {', '.join(absent)}.")
    if any(map(_drawn, records)):
        yield from ("", "![Speed-up over MHA against sequence length](speedup.png)")
    paper = paper_speedups()
    for section, (title, text) in SECTIONS.items():
        rows = [record for record in records if record["section"] == section]
        if not rows:
            continue
        yield from ("", f"## {title}", "", text, "")
        yield from (
            generation_table(rows) if section == "generate" else _table(section, rows, paper)
        )


def _table(section: str, rows: Sequence[Record], paper: Speedups) -> Iterator[str]:
    kind = "model" if section == "model" else "attention"
    names = ["experiment", "batch"] if kind == "model" else ["keys", "heads", "active", ""]
    if section == "layer":
        names.insert(0, "batch")
    names += ["MHA ms", "plain ms", "dense", "sparse", "limit", "auto", "auto over MHA"]
    if kind == "model":
        names.append("auto over plain")
    if section == "table7":
        names += ["speed-up", "paper's"]
    left = 1 if kind == "model" else 0
    yield "| " + " | ".join(names) + " |"
    yield "|" + "|".join("---" if i < left else "---:" for i in range(len(names))) + "|"
    for record in rows:
        yield "| " + " | ".join(_cells(section, record, paper)) + " |"


def _cells(section: str, record: Record, paper: Speedups) -> Iterator[str]:
    if section == "model":
        yield record["experiment"] + (", training step" if record["train"] else ", inference")
        yield str(record["batch"])
    else:
        if section == "layer":
            yield str(record["batch"])
        yield f"{record['tokens']:,}"
        yield str(record["heads"])
        yield f"{100 * record['activated_ratio']:.0f} %"
        yield ", ".join(
            word
            for word, said in (
                ("causal", record["causal"]),
                ("training", record["backward"]),
                ("skewed", record["load"] == "skewed"),
            )
            if said
        )
    yield time_cell(record["mha_ms"])
    yield "too large" if record["reference_ms"] is None else time_cell(record["reference_ms"])
    yield f"{record['dense_over_mha']:.2f}"
    yield spread_cell(record, "sparse")
    yield f"{record['limit']:.2f}"
    yield record.get("auto", "by layer")
    yield spread_cell(record, "auto")
    if section == "model":
        yield f"{record['auto_over_reference']:.2f}"
    if section == "table7":
        yield f"{1 / record['auto_over_mha']:.2f}×"
        yield paper_speedup(paper, record)


def paper_speedups() -> Speedups:
    """The paper's MHA times over its MoH times."""
    paper = load_table("timing").paper
    times = {
        (int(tokens), row): value.value
        for (row, metric), value in paper.items()
        if metric.endswith("_ms") and value.value is not None
        for tokens in [metric.split("_")[1]]
    }
    return {
        (tokens, int(row.removeprefix("moh_"))): times[tokens, "mha"] / milliseconds
        for (tokens, row), milliseconds in times.items()
        if row != "mha"
    }


def paper_speedup(paper: Speedups, record: Record) -> str:
    """The paper's speed-up at the shape of a record."""
    found = paper.get((record["tokens"], round(100 * record["ratio"])))
    return "–" if found is None else f"{found:.2f}×"


def figure(records: Sequence[Record]) -> Figure:
    """Speed-up of attention over MHA against keys: bidirectional left, causal right."""
    paper = paper_speedups()
    with look():
        found = Figure(figsize=(9.0, 3.6), layout="constrained")
        panels = found.subplots(1, 2, sharey=True)
        for axes, causal in zip(panels, (False, True), strict=True):
            _panel(axes, records, causal)
            axes.set_title("Causal" if causal else "Bidirectional")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("tokens")
            axes.axhline(1, color=INK, linewidth=1.2)
        for (tokens, ratio), speedup in paper.items():
            if ratio in (75, 50):
                panels[0].plot(
                    tokens,
                    speedup,
                    marker="x",
                    color=colour(f"_{ratio}"),
                    markersize=7,
                    markeredgewidth=1.8,
                    linestyle="none",
                )
        panels[0].plot([], [], "x", color=MUTED, label="paper's Table 7")
        panels[0].plot([], [], ":", color=MUTED, label="limit")
        panels[0].set_ylabel("speed-up over MHA")
        panels[0].legend(frameon=False, loc="lower right", fontsize=9, ncols=2)
        sizes = sorted({record["tokens"] for record in records if _drawn(record)})
        for axes in panels:
            axes.set_xticks(sizes, [_short(size) for size in sizes])
            axes.minorticks_off()
    return found


def _drawn(record: Record) -> bool:
    return (
        record["section"] in ("table7", "long")
        and record["load"] == "even"
        and round(100 * record["ratio"]) in (75, 50)
    )


def _panel(axes: Axes, records: Sequence[Record], causal: bool) -> None:
    for ratio in (75, 50):
        points = sorted(
            (record["tokens"], record["sparse_over_mha"], record["quartiles_over_mha"]["sparse"])
            for record in records
            if _drawn(record)
            and record["causal"] == causal
            and round(100 * record["ratio"]) == ratio
        )
        if not points:
            continue
        sizes = [size for size, *_ in points]
        middle = [1 / value for _, value, _ in points]
        bars = [
            [value - 1 / high for value, (_, _, (_, high)) in zip(middle, points, strict=True)],
            [1 / low - value for value, (_, _, (low, _)) in zip(middle, points, strict=True)],
        ]
        tint = colour(f"_{ratio}")
        axes.errorbar(
            sizes,
            middle,
            yerr=bars,
            color=tint,
            marker="o",
            markersize=5,
            capsize=2.5,
            label=f"MoH-{ratio} sparse",
        )
        axes.axhline(100 / ratio, color=tint, linestyle=":", linewidth=1.4)


def _short(size: int) -> str:
    return f"{size // 1024}K" if size >= 1024 else str(size)
