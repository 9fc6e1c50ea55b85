"""What tables promise: no unmarked number, honest gaps, every rendering faithful."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from synthetic_records import DEMO_TABLES, metric, top1, write_demo, write_run

from moh.reporting.cells import ABSENT, MINUS, Table
from moh.reporting.records import load_records
from moh.reporting.render import RENDERERS, escape_latex, escape_markdown
from moh.reporting.spec import load_table, table_names
from moh.reporting.tables import build_table

VIT = {"top1": {"header": "Top-1", "unit": "%", "decimals": 2, "direction": "higher", "gap": True}}


@pytest.fixture
def define(tmp_path: Path) -> Any:
    """Writes a table of MHA and MoH-75 and returns its name and folder of tables."""

    def write(
        columns: dict[str, dict[str, Any]] = VIT,
        paper: list[tuple[str, str, Any, str, str]] | None = None,
        rows: list[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> tuple[str, Path]:
        folder = tmp_path / "experiments" / "made_up"
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "title": "Made up",
            "family": "ViT",
            "protocol": "demo",
            "rows": rows
            or [
                {"id": "mha", "label": "MHA", "experiment": "demo/vit/mha", "baseline": True},
                {"id": "moh_75", "label": "MoH-75", "experiment": "demo/vit/moh_75"},
            ],
            "columns": [{"metric": name, **column} for name, column in columns.items()],
            **fields,
        }
        (folder / "table.yaml").write_text(yaml.safe_dump(spec))
        if paper is not None:
            with (folder / "paper.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerows([("row_id", "metric", "value", "source", "note"), *paper])
        return "made_up", folder.parent

    return write


def filled(definition: tuple[str, Path], results_dir: Path) -> Table:
    return build_table(load_table(*definition), load_records(results_dir))


PLAIN = str.maketrans({MINUS: "-", ABSENT: "absent"})


def line(table: Table, row_id: str) -> dict[str, str]:
    """Text of one row by heading, in plain characters."""
    row = next(row for row in table.rows if row.id == row_id)
    return {
        heading.line: cell.plain.translate(PLAIN)
        for heading, cell in zip(table.headings, row.cells, strict=True)
    }


SCORE, GAP = "Top-1 (%) ↑ mean ± sd (n)", "Top-1 (%) ↑ gap to MHA"


def test_a_standard_deviation_needs_two_seeds(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0))
    table = filled(define(), tmp_path)
    assert line(table, "mha")[SCORE] == "90.00 (1)"
    write_run(tmp_path, "demo/vit/mha", 1, top1(92.0))
    table = filled(define(), tmp_path)
    assert line(table, "mha")[SCORE] == "91.00 ± 1.41 (2)"


@pytest.mark.parametrize(
    ("run", "mark"),
    [
        ({"protocol": "smoke"}, "smoke"),
        ({"protocol": "smoke", "status": "partial", "share": 0.5}, "smoke (50 %)"),
        ({"status": "partial", "share": 0.4}, "partial (40 %)"),
        ({"overrides": ["experiment=demo/vit/moh_75", "optim.lr=1"]}, "changed"),
        ({"overrides": ["experiment=demo/vit/moh_75", "heads.top_k=[1]"]}, "changed"),
        ({"protocol": "paper"}, "changed"),
    ],
)
def test_an_incomplete_value_is_marked_and_enters_no_gap(
    define: Any, tmp_path: Path, run: dict[str, Any], mark: str
) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0))
    write_run(tmp_path, "demo/vit/moh_75", 0, top1(87.65), **run)
    table = filled(define(), tmp_path)
    assert line(table, "moh_75")[SCORE] == f"87.65 (1) {mark}"
    assert line(table, "moh_75")[GAP] == "absent"
    for render in RENDERERS.values():
        text = render(table).replace("\\", "").replace("</span>", "")
        for tail in text.split("87.65")[1:]:
            assert mark in tail[:80], render


def test_an_incomplete_baseline_gives_no_gap(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(50.0), status="partial", share=0.1)
    write_run(tmp_path, "demo/vit/moh_75", 0, top1(90.0))
    assert line(filled(define(), tmp_path), "moh_75")[GAP] == "absent"


def test_neutral_overrides_change_nothing(define: Any, tmp_path: Path) -> None:
    overrides = ["table=made_up", "seed=0", "logger.wandb=offline", "trainer.threads=2"]
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0), overrides=overrides)
    assert line(filled(define(), tmp_path), "mha")["State"] == "demo"


@pytest.mark.parametrize(
    ("direction", "change", "verdict"),
    [("higher", 2.0, "better"), ("higher", -2.0, "worse"), ("lower", -2.0, "better"),
     ("lower", 2.0, "worse"), ("lower", 0.0, "equal"), ("neither", 2.0, "higher"),
     ("neither", -2.0, "lower")],
)  # fmt: skip
def test_better_and_worse_follow_the_direction_of_the_metric(
    define: Any, tmp_path: Path, direction: str, change: float, verdict: str
) -> None:
    column = {"header": "Score", "decimals": 1, "direction": direction, "gap": True}
    for seed, noise in enumerate((0.0, 0.5, -0.5)):
        base = metric(50.0 + noise, higher=direction == "higher")
        moh = metric(50.0 + noise + change, higher=direction == "higher")
        write_run(tmp_path, "demo/vit/mha", seed, {"score": base})
        write_run(tmp_path, "demo/vit/moh_75", seed, {"score": moh})
    cells = list(line(filled(define({"score": column}), tmp_path), "moh_75").values())
    sign = "+" if change > 0 else "-" if change < 0 else ""
    assert cells[2] == f"{sign}{abs(change):.1f} ± 0.0 (3) {verdict}"


def test_the_gap_has_the_spread_of_paired_differences(define: Any, tmp_path: Path) -> None:
    for seed, (base, moh) in enumerate([(90.0, 89.0), (80.0, 79.4), (85.0, 84.4)]):
        write_run(tmp_path, "demo/vit/mha", seed, top1(base))
        write_run(tmp_path, "demo/vit/moh_75", seed, top1(moh))
    write_run(tmp_path, "demo/vit/mha", 9, top1(10.0))  # no partner: in the mean, not in the gap
    assert line(filled(define(), tmp_path), "moh_75")[GAP] == "-0.73 ± 0.23 (3) worse"


def test_a_gap_no_larger_than_its_spread_is_no_difference(define: Any, tmp_path: Path) -> None:
    for seed, change in enumerate((1.0, -1.0, 0.6)):
        write_run(tmp_path, "demo/vit/mha", seed, top1(90.0))
        write_run(tmp_path, "demo/vit/moh_75", seed, top1(90.0 + change))
    assert line(filled(define(), tmp_path), "moh_75")[GAP] == "+0.20 ± 1.06 (3) within spread"


def test_one_seed_says_so_and_item_errors_stand_in_for_the_spread(
    define: Any, tmp_path: Path
) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0))
    write_run(tmp_path, "demo/vit/moh_75", 0, top1(89.0))
    assert line(filled(define(), tmp_path), "moh_75")[GAP] == "-1.00 (1) worse, one seed"
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0, stderr=3.0))
    write_run(tmp_path, "demo/vit/moh_75", 0, top1(89.0, stderr=4.0))
    gap = line(filled(define(), tmp_path), "moh_75")[GAP]
    assert gap == "-1.00 ± 5.00 se (1) within item error"


def test_a_finished_seed_is_preferred_and_the_rest_is_told(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0))
    write_run(tmp_path, "demo/vit/mha", 1, top1(10.0), status="partial", share=0.2)
    write_run(tmp_path, "demo/vit/mha", 0, top1(20.0), config_hash="b" * 12, protocol="smoke")
    table = filled(define(seeds=2), tmp_path)
    assert line(table, "mha")[SCORE] == "90.00 (1)"
    assert line(table, "mha")["State"] == "demo (1 of 2 seeds)"
    assert len(table.remarks) == 2


PAPER = [
    ("mha", "top1", 84.7, "Table 1, row 1", ""),
    ("moh_75", "top1", 84.6, "Table 1, row 2", "best epoch"),
]


@pytest.mark.parametrize(("tolerance", "state"), [(0.25, "matched"), (0.15, "off")])
def test_matched_is_the_stored_tolerance(
    define: Any, tmp_path: Path, tolerance: float, state: str
) -> None:
    columns = {"top1": {**VIT["top1"], "tolerance": tolerance}}
    write_run(tmp_path, "demo/vit/mha", 0, top1(84.9), protocol="paper")
    write_run(tmp_path, "demo/vit/moh_75", 0, top1(84.7), protocol="paper")
    table = filled(define(columns, PAPER, protocol="paper"), tmp_path)
    moh = list(line(table, "moh_75").values())[1:]
    assert line(table, "mha")["State"] == state
    assert moh == ["84.6", "84.70 (1)", "+0.10", "-0.1", "-0.20 (1) worse, one seed", "matched"]
    assert "Best epoch." in table.notes.values()
    assert not table.protocol_line


def test_without_a_stored_tolerance_nothing_is_matched(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(84.7), protocol="paper")
    table = filled(define(paper=PAPER, protocol="paper"), tmp_path)
    assert line(table, "mha")["State"] == "done"


def test_a_smoke_run_is_not_held_against_the_paper(define: Any, tmp_path: Path) -> None:
    columns = {"top1": {**VIT["top1"], "tolerance": 1.0}}
    write_run(tmp_path, "demo/vit/mha", 0, top1(84.7), protocol="smoke")
    mha = list(line(filled(define(columns, PAPER, protocol="paper"), tmp_path), "mha").values())
    assert mha[1:] == ["84.7", "84.70 (1) smoke", "absent", "absent", "absent", "smoke"]


def test_a_blocked_row_gives_its_reason(define: Any, tmp_path: Path) -> None:
    row = {"id": "a", "label": "A", "experiment": "x", "blocked": "weights are not public"}
    table = filled(define(rows=[row]), tmp_path)
    assert line(table, "a")["State"] == "blocked"
    assert table.notes == {"a": "Weights are not public."}


def test_a_contradicting_record_is_refused(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, {"top1": metric(90.0, "%", higher=False)})
    with pytest.raises(ValueError, match="higher is better"):
        filled(define(), tmp_path)
    write_run(tmp_path, "demo/vit/mha", 0, {"top1": metric(90.0, "bits/byte")})
    with pytest.raises(ValueError, match="bits/byte"):
        filled(define(), tmp_path)


def test_a_share_is_shown_in_percent(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, {"top1": metric(0.9)})
    assert line(filled(define(), tmp_path), "mha")[SCORE] == "90.00 (1)"


def test_every_rendering_escapes_what_it_is_given(define: Any, tmp_path: Path) -> None:
    label = "<b>&|_50% $x$\\"
    row = {"id": "a", "label": label, "experiment": "x"}
    table = filled(define(rows=[row]), tmp_path)
    html, markdown, latex = (RENDERERS[name](table) for name in ("html", "markdown", "latex"))
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;|_50% $x$\\" in html
    assert escape_markdown(label) == r"\<b\>\&\|\_50% \$x\$" + "\\\\"
    assert f"| {escape_markdown(label)} |" in markdown
    assert escape_latex(label) == r"$<$b$>$\&$|$\_50\% \$x\$\textbackslash{}"
    assert f"{escape_latex(label)} & " in latex


def test_every_row_of_latex_and_markdown_has_every_column(tmp_path: Path) -> None:
    write_demo(tmp_path, seeds=1)
    records = load_records(tmp_path)
    for name in DEMO_TABLES:
        table = build_table(load_table(name), records)
        width = len(table.headings)
        rows = [text for text in RENDERERS["markdown"](table).splitlines() if text[:1] == "|"]
        assert {text.count(" | ") for text in rows} == {width - 1}
        body = RENDERERS["latex"](table).split(r"\midrule")[1].split(r"\bottomrule")[0]
        lines = [text.replace(r"\&", "") for text in body.strip().splitlines()]
        assert {text.count(" & ") for text in lines} == {width - 1}


@pytest.mark.parametrize("name", table_names())
def test_shipped_tables_load_with_unique_rows_and_a_baseline(name: str) -> None:
    definition = load_table(name)
    ids = [row.id for row in definition.spec.rows]
    assert len(ids) == len(set(ids))
    for row in definition.spec.rows:
        if definition.baseline_of(row) is not None:
            assert definition.baseline_of(row).baseline
        else:
            lone = all(not column.gap for column in definition.spec.columns)
            assert row.baseline or row.calibration or lone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [{"id": "a", "label": "A", "experiment": "x"}] * 2}, "a appears more than once"),
        ({"titel": "x"}, "titel"),
        ({"figures": ["pie"]}, "pie"),
        ({"columns": {"top1": {"header": "T", "gap": True}}}, "no direction"),
        ({"columns": {"top1": {"header": "T", "direction": "up"}}}, "'up'"),
        ({"paper": [("b", "top1", 1, "", "")]}, "b, top1"),
    ],
)
def test_a_wrong_table_definition_is_one_clear_line(
    define: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_table(*define(**change))
    assert "\n" not in str(error.value)
    assert "made_up" in str(error.value)


def test_a_run_that_measured_nothing_of_a_table_is_not_done(define: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, {"another": metric(1.0)})
    assert line(filled(define(), tmp_path), "mha")["State"] == "partial (not measured)"
