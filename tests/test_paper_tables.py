"""The paper's tables as data: rows that run, values with their source, nothing stale."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from composed import EXPERIMENTS, composed, definition, facts_of, paper_tables

from moh.cli import CONF, ROOT
from moh.reporting.overview import standings, with_overview
from moh.reporting.records import load_records
from moh.reporting.render import to_markdown
from moh.reporting.spec import EXPERIMENTS_DIR, table_names
from moh.reporting.stored import load_models
from moh.reporting.sweep_rows import with_recorded_rows
from moh.reporting.tables import build_table

TABLES = paper_tables()
MODELS = load_models(EXPERIMENTS_DIR / "models.csv")
ROWS = [
    (name, row)
    for name in TABLES
    for row in definition(name).spec.rows
    if row.experiment in EXPERIMENTS
]


def test_every_table_and_figure_of_the_paper_is_here():
    found = {definition(name).spec.paper.split(" (")[0] for name in TABLES}
    assert {f"Table {n}" for n in "1234567GH"} | {"Figure 2", "Figure 8"} <= found


def test_every_row_has_an_experiment_and_every_experiment_of_the_paper_a_row():
    named = {row.experiment for name in TABLES for row in definition(name).spec.rows}
    # Of benchmarks the record has a name, and no experiment.
    named = {name for name in named if name and not name.startswith("benchmark/")}
    assert named <= set(EXPERIMENTS)
    of_a_row = {
        name
        for name in EXPERIMENTS
        if re.search(
            r"^# (Table|Figure) \w+,", (CONF / "experiment" / f"{name}.yaml").read_text(), re.M
        )
    }
    assert len(of_a_row) > 50
    assert of_a_row <= named


def test_models_are_what_is_stored_and_what_the_paper_counts():
    assert set(MODELS) == {row.experiment for _, row in ROWS}
    for name, facts in MODELS.items():
        found = facts_of(name)
        assert found == facts, f"models.csv: {name} is {found}"


# Parameters as the authors' code counts them, and active over all heads of its plans.
OFFICIAL = {
    "dit/mha_s2": (32_963_360, "72/72"),
    "dit/moh_s2_90": (32_997_152, "64/72"),
    "dit/moh_s2_75": (32_998_688, "54/72"),
    "dit/mha_b2": (130_512_416, "144/144"),
    "dit/moh_b2_90": (130_638_368, "129/144"),
    "dit/moh_b2_75": (130_638_368, "108/144"),
    "dit/mha_l2": (458_102_816, "384/384"),
    "dit/moh_l2_90": (458_512_416, "344/384"),
    "dit/moh_l2_75": (458_528_800, "288/384"),
    "dit/mha_xl2": (675_129_632, "448/448"),
    "dit/moh_xl2_90": (675_666_464, "403/448"),
    "dit/moh_xl2_75_2m": (675_689_504, "336/448"),
    "vit/mha_s": (49_741_564, "429/429"),
    "vit/moh_s_80": (49_910_548, "343/429"),
    "vit/moh_s_75": (49_910_548, "323/429"),
    "vit/mha_b": (89_721_496, "588/588"),
    "vit/moh_b_75": (90_020_632, "441/588"),
    "vit/moh_b_50": (90_023_512, "294/588"),
}


def test_released_models_have_the_sizes_of_the_released_code():
    for name, (parameters, ratio) in OFFICIAL.items():
        facts = MODELS[name]
        assert (facts.parameters, f"{facts.active}/{facts.heads}") == (parameters, ratio), name


def test_printed_sizes_are_those_of_the_models():
    checked = 0
    for name, row in ROWS:
        table, facts = definition(name), MODELS[row.experiment]
        printed = {
            key: value.value for (row_id, key), value in table.paper.items() if row_id == row.id
        }
        if (millions := printed.get("parameters")) is not None:
            # Printed without decimals, rounded here and cut off there (130.51 M reads 130).
            assert abs(facts.parameters / 1e6 - millions) < 0.6, row.id
            checked += 1
        if (ratio := printed.get("activated_ratio")) is not None:
            # The paper rounds generously: MoH-DiT-S/2 "90 %" has 64 of 72 heads.
            assert abs(100 * facts.activated_ratio - ratio) < 1.2, row.id
        if (share := printed.get("shared_share")) is not None:
            assert abs(100 * facts.shared_share - share) < 0.06, row.id
    assert checked >= 30


def test_averages_follow_from_the_printed_benchmarks():
    checked = 0
    for name in TABLES:
        table = definition(name)
        for column in table.spec.columns:
            for row in table.spec.rows:
                value = table.paper.get((row.id, column.key))
                if not column.mean_of or value is None:
                    continue
                mean = statistics.fmean(table.paper_value(row, key) for key in column.mean_of)
                # Half of the last digit; Table G prints 64.8 for 64.76 and 64.7 for 64.74.
                assert abs(mean - value.value) <= 0.5 * 10**-value.decimals + 1e-9, row.id
                checked += 1
    assert checked == 2 * (9 + 4 + 3)


def test_every_value_names_its_source():
    for name in TABLES:
        table = definition(name)
        for (row_id, key), value in table.paper.items():
            assert "arXiv 2410.11842" in value.source, (name, row_id, key)
            assert value.approximate == ("by eye" in value.note), (name, row_id, key)


HEADLINES = ("top1", "fid", "average_6", "average_14", "average_14_g")


def headline(name: str, row_id: str) -> str | None:
    """The paper's main value of a row as it is printed."""
    table = definition(name)
    for key in HEADLINES:
        value = table.paper.get((row_id, key))
        if value is not None and value.value is not None:
            return f"{value.value:.{value.decimals}f}"
    return None


def test_every_experiment_begins_with_its_row_value_and_command():
    for name, row in ROWS:
        text = (CONF / "experiment" / f"{row.experiment}.yaml").read_text()
        comment = text[: text.index("defaults:")]
        assert f"python -m moh experiment={row.experiment}" in comment, row.experiment
        shown = {column.key for column in definition(name).spec.columns}
        if not shown & set(HEADLINES) or (name == "llama3_stage1" and row.calibration):
            continue
        if (value := headline(name, row.id)) is not None:
            numbers = [float(number) for number in re.findall(r"\d+\.\d+", comment)]
            assert float(value) in numbers, (row.experiment, value)
        elif not row.calibration:
            assert "no paper value" in comment, row.experiment


def test_a_row_without_a_value_of_the_paper_is_a_baseline_that_it_lacks():
    for name, row in ROWS:
        table = definition(name)
        metrics = {column.key for column in table.spec.columns if column.metric}
        if not any((row.id, key) in table.paper for key in metrics):
            lacking = composed(row.experiment).heads.name == "mha" or row.id == "at_10b"
            assert lacking, (name, row.id)


def test_rows_that_evaluate_take_what_another_row_trains():
    found = 0
    for _, row in ROWS:
        config = composed(row.experiment)
        if config.weights_of is None:
            continue
        found += 1
        trained = composed(config.weights_of)
        assert trained.mode == "both"
        assert config.heads == trained.heads
        assert config.model == trained.model
        if config.weights_at is not None:
            assert config.weights_at in trained.trainer.keep_at
    assert found == 5


def test_no_plan_of_an_ablation_moves_more_than_its_table_says():
    for row in definition("shared_share").spec.rows:
        if row.baseline:
            continue
        heads = composed(row.experiment).heads
        per_layer = [
            shared + top_k
            for layers, shared, top_k in zip(
                heads.layers, heads.num_shared, heads.top_k, strict=True
            )
            for _ in range(layers)
        ]
        assert per_layer == [3] * 5 + [6] * 5 + [9] * 22 + [16] * 5, row.id


def test_committed_tables_are_up_to_date():
    results = ROOT / "results"
    records = load_records(results)
    tables = [with_recorded_rows(definition(name), records) for name in table_names()]
    written = {path.stem: path.read_text() for path in (results / "tables").glob("*.md")}
    stale = [
        table.name
        for table in tables
        if written.get(table.name) != to_markdown(build_table(table, records))
    ]
    page = (results / "README.md").read_text(encoding="utf-8")
    if with_overview(page, standings(tables, records)) != page:
        stale.append("README.md")
    assert not stale, f"stale in results/: {', '.join(stale)}; run make tables"
    extra = set(written) - {table.name for table in tables}
    assert not extra, f"results/tables holds tables of no definition: {extra}"


def test_nothing_of_the_paper_is_called_run_before_it_was(tmp_path: Path):
    for standing in standings([definition(name) for name in TABLES], load_records(tmp_path)):
        assert standing.run == standing.incomplete == standing.calibrated[0] == 0
        assert standing.rows == standing.not_run + standing.blocked
