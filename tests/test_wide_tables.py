"""Tables of many metrics: nothing cut, nothing unmarked, published weights kept apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from composed import definition, paper_tables
from rich.cells import cell_len
from rich.console import Console
from synthetic_records import head_load, metric, write_run

from moh.reporting.cells import ABSENT, Cell, Heading, Row, Table
from moh.reporting.overview import standings
from moh.reporting.records import load_records
from moh.reporting.render import RENDERERS, to_latex, to_markdown
from moh.reporting.results import collect
from moh.reporting.tables import CALIBRATION, build_table
from moh.reporting.terminal import to_terminal

SIX = ("sciq/acc_norm", "piqa/acc_norm", "winogrande/acc", "openbookqa/acc_norm", "logiqa/acc_norm")


def write_row(results: Path, name: str, seed: int, values: dict[str, Any], **run: Any) -> None:
    """A finished run of the paper's protocol; values are percentages or whole metrics."""
    metrics = {
        key: value if isinstance(value, dict) else metric(value, "%", stderr=1.0)
        for key, value in values.items()
    }
    write_run(results, name, seed, metrics, **{"protocol": "paper", **run})


def llm(results: Path, name: str, seed: int, level: float, **run: Any) -> None:
    values = dict.fromkeys(SIX, level) | {"truthfulqa/mean": level - 10}
    write_row(results, f"llm/{name}", seed, values, **run)


def table(name: str, results: Path) -> Table:
    return build_table(definition(name), load_records(results))


def lines(table: Table, row_id: str) -> dict[str, dict[str, str]]:
    """What the lines of a row hold -> heading -> text."""
    return {
        row.cells[1].plain: {
            heading.text: cell.plain
            for heading, cell in zip(table.headings, row.cells, strict=True)
        }
        for row in table.rows
        if row.id == row_id
    }


def printed(table: Table, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(to_terminal(table, width), crop=False)
    return capture.get()


def test_paper_ours_and_gaps_stand_below_each_other(tmp_path: Path) -> None:
    for seed, noise in enumerate((0.0, 1.0)):
        llm(tmp_path, "mha_s_100b", seed, 60.0 + noise)
        llm(tmp_path, "moh_s_75_100b", seed, 63.0 + 2 * noise)
    found = lines(table("llm_scratch", tmp_path), "moh_s_75_100b")
    assert list(found) == [
        "paper",
        "paper's gap",
        "ours (2)",
        "± se",
        "delta",
        "our gap (2)",
        "± sd",
    ]
    sciq = [found[line]["SciQ"] for line in found]
    assert sciq == ["64.7", "+1.7", "64.0", "1.0", "\u22120.7", "+3.5 \u25b2", "0.7"]
    assert found["paper"]["State"] == "off"


def test_averages_are_of_the_columns_beside_them(tmp_path: Path) -> None:
    llm(tmp_path, "mha_s_100b", 0, 60.0)
    found = lines(table("llm_scratch", tmp_path), "mha_s_100b")["ours (1)"]
    assert found["Average"] == "58.3"  # (5 * 60 + 50) / 6
    assert found["Average of 5"] == "60.00"
    write_row(tmp_path, "llm/mha_s_100b", 0, dict.fromkeys(SIX, 60.0))  # no TruthfulQA
    found = lines(table("llm_scratch", tmp_path), "mha_s_100b")["ours (1)"]
    assert (found["Average"], found["Average of 5"]) == (ABSENT, "60.00")


def test_a_row_is_judged_by_its_average(tmp_path: Path) -> None:
    level = 43.9 + 10 / 6  # the paper's average of six
    llm(tmp_path, "mha_s_100b", 0, level + 0.9)
    assert lines(table("llm_scratch", tmp_path), "mha_s_100b")["paper"]["State"] == "matched"
    llm(tmp_path, "mha_s_100b", 0, level + 1.1)
    assert lines(table("llm_scratch", tmp_path), "mha_s_100b")["paper"]["State"] == "off"


@pytest.mark.parametrize(
    ("run", "mark"),
    [
        ({"status": "partial", "share": 0.4}, "partial"),
        ({"protocol": "smoke"}, "smoke"),
        ({"overrides": ["experiment=llm/moh_s_75_100b", "optim.lr=1"]}, "changed"),
    ],
)
def test_an_incomplete_line_says_so_wherever_it_is_printed(
    tmp_path: Path, run: dict[str, Any], mark: str
) -> None:
    llm(tmp_path, "mha_s_100b", 0, 60.0)
    llm(tmp_path, "moh_s_75_100b", 0, 64.44, **run)
    found = table("llm_scratch", tmp_path)
    assert set(lines(found, "moh_s_75_100b")) >= {"paper", "paper's gap", f"ours (1), {mark}"}
    assert not any("our gap" in line for line in lines(found, "moh_s_75_100b"))
    for width in (80, 200):
        shown = [line for line in printed(found, width).splitlines() if "64.4" in line]
        assert shown
        assert all(mark in line for line in shown)
    for line in to_markdown(found).splitlines():
        assert "64.4" not in line or mark in line


@pytest.mark.parametrize("name", paper_tables())
@pytest.mark.parametrize("width", [80, 120])
def test_no_cell_of_a_table_is_lost_or_cut_on_a_terminal(name: str, width: int) -> None:
    found = table(name, Path("no such folder"))
    text = printed(found, width)
    assert "…" not in text
    # Prose is wrapped at its words; of the table itself no line is too long.
    assert max(map(cell_len, text.splitlines())) <= width
    body = " ".join(text.split())
    for row in found.rows:
        for cell in row.cells:
            assert " ".join(cell.plain.split()) in body
    for heading in found.headings:
        for word in (heading.group + " " + heading.text).split():
            assert word in body


def test_a_folded_table_repeats_its_labels_and_tells_the_state_first() -> None:
    found = table("llama3", Path("no such folder"))
    blocks = re.findall(r"^Model .*$", printed(found, 80), re.MULTILINE)
    assert len(blocks) >= 4
    assert "State" in blocks[0]
    assert "State" not in "".join(blocks[1:])


def test_published_weights_stand_apart(tmp_path: Path) -> None:
    run = {"overrides": ["experiment=vit/published_moh_s_75", "checkpoint=file.pth"]}
    write_row(tmp_path, "vit/published_moh_s_75", 0, {"top1": 84.7}, **run)
    write_row(tmp_path, "vit/published_transnext_s", 0, {"top1": 84.6}, **run)
    write_row(tmp_path, "vit/moh_s_75", 0, {"top1": 84.6})
    found = table("vit_imagenet", tmp_path)
    assert found.rows[0].cells[0].text == CALIBRATION
    states = {row.id: row.cells[-1].plain for row in found.rows if row.kind != "section"}
    assert states["published_moh_s_75"] == "matched"
    # Neither is the baseline of a row of ours, nor do they have a gap of their own.
    gaps = [i for i, heading in enumerate(found.headings) if heading.text.endswith("gap")]
    for row in found.rows:
        if row.kind == "section":
            continue
        assert row.cells[gaps[1]].text == ABSENT
        if row.id.startswith("published"):
            assert row.cells[gaps[0]].text == ABSENT
    (standing,) = standings([definition("vit_imagenet")], load_records(tmp_path))
    assert (standing.rows, standing.run, standing.calibrated) == (6, 1, (2, 6))


def test_what_a_row_cannot_do_without_is_no_change(tmp_path: Path) -> None:
    needed = ["experiment=llm/moh_llama3_8b_75", "model.pretrained=/weights", "data.tokenizer=/t"]
    write_row(tmp_path, "llm/moh_llama3_8b_75", 0, {"mmlu/acc": 65.0}, overrides=needed)
    write_row(
        tmp_path,
        "llm/mha_s_100b",
        0,
        {"sciq/acc_norm": 60.0},
        overrides=["experiment=llm/mha_s_100b", "model.pretrained=/weights"],
    )
    records = load_records(tmp_path)
    assert collect(definition("llama3"), records)["moh_llama3_8b"].state.word == "done"
    assert collect(definition("llm_scratch"), records)["mha_s_100b"].state.word == "changed"


def test_head_load_is_of_the_last_routed_layer(tmp_path: Path) -> None:
    load = head_load(0.75, 0)
    load["overall"][-1] = [0.2, 0.9, 0.5, 0.8, 0.7, 0.9]
    write_run(tmp_path, "vit/moh_b_75", 0, {}, {"head_load.json": load}, protocol="paper")
    found = table("head_load", tmp_path)
    row = next(row for row in found.rows if row.id == "moh_b_75")
    ours = [
        cell.text
        for heading, cell in zip(found.headings, row.cells, strict=True)
        if heading.text.startswith(("ours", "mean"))
    ]
    assert ours == ["0.200", "0.667", "0.900"]


def test_values_read_by_eye_are_marked() -> None:
    found = table("llama3_curve", Path("no such folder"))
    values = [cell.text for row in found.rows for cell in row.cells[2:-1] if cell.text != ABSENT]
    assert len(values) == 7
    assert all(value.startswith("\u2248 ") for value in values)


def test_values_keep_the_digits_that_the_paper_prints() -> None:
    found = table("timing", Path("no such folder"))
    values = [row.cells[2].text for row in found.rows]
    assert values == ["0.360", "0.352", "0.321", "0.225"]


def test_a_benchmark_fills_the_timing_table(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "card"
    folder.mkdir(parents=True)
    shape = {"section": "table7", "dtype": "bf16", "batch": 1, "tokens": 256, "ratio": 0.5}
    times = {"mha_ms": 0.4, "auto_ms": 0.25, "auto_over_mha": 0.625}
    measured = [{**shape, **times, "load": load} for load in ("even", "skewed")]
    measured += [{**shape, **times, "load": "even", "section": "long", "tokens": 8192}]
    where = {"gpu": "Card", "cpu": "CPU", "threads": 2}
    text = json.dumps({"environment": where, "measurements": measured})
    (folder / "benchmark.json").write_text(text)
    found = table("timing", tmp_path)
    assert lines(found, "mha")["ours (1)"]["256 tokens (ms) \u2193"] == "0.400"
    ours = lines(found, "moh_50")["ours (1)"]
    assert ours["256 tokens, speed-up \u2191"] == "1.60"
    assert ours["512 tokens (ms) \u2193"] == ABSENT
    assert "Card, bf16, batch 1." in found.notes.values()
    (folder / "benchmark.json").write_text("{")
    assert len(load_records(tmp_path).problems) == 1


@pytest.mark.parametrize("name", paper_tables())
def test_latex_is_well_formed(name: str, tmp_path: Path) -> None:
    llm(tmp_path, "mha_s_100b", 0, 60.0)
    llm(tmp_path, "moh_s_75_100b", 0, 64.0)
    found = table(name, tmp_path)
    text = to_latex(found)
    bare = re.sub(r"\\.", "", re.sub(r"(?m)^%.*$", "", text).replace(r"\\", ""))
    depth = 0
    for character in bare:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    # Only what pdflatex sets without a package.
    assert {character for character in text if ord(character) > 127} <= set("éüö")
    begins, ends = (re.findall(rf"\\{word}{{(.*?)}}", text) for word in ("begin", "end"))
    assert begins == ends[::-1]
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    for line in body.replace(r"\&", "").splitlines():
        if not line.endswith(r"\\"):
            assert re.fullmatch(r"|(\\(midrule|addlinespace|cmidrule\(lr\)\{\d+-\d+\}))+", line)
            continue
        spans = [int(n) for n in re.findall(r"\\multicolumn{(\d+)}", line)]
        assert line.count("&") + 1 - len(spans) + sum(spans) == len(found.headings), line


def test_every_rendering_shows_sections_and_marks() -> None:
    made = Table(
        name="x",
        title="X",
        caption="",
        demo=False,
        headings=(Heading("Model", numeric=False), Heading("A")),
        rows=(
            Row("section 50 %_", "section", (Cell("50 %_"), Cell(""))),
            Row("a", "model", (Cell("a"), Cell("1", word="\u25b2", tone="better"))),
        ),
    )
    assert r"\multicolumn{2}{l}{\textit{50 \%\_}}" in RENDERERS["latex"](made)
    assert r"1 $\bigtriangleup$" in RENDERERS["latex"](made)
    assert r"| **50 %\_** |  |" in RENDERERS["markdown"](made)
    assert '<th colspan="2" scope="rowgroup">50 %_</th>' in RENDERERS["html"](made)
    assert "50 %_" in printed(made, 80)
