"""Sweeps over the activated ratio: experiments without a file, one name and one hash a point."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text
from omegaconf import OmegaConf
from synthetic_records import top1, write_run

from moh.backbones.build import build_model
from moh.backbones.convert import head_plan
from moh.cli import CONF, ROOT, compose_config, compose_jobs
from moh.reporting.cli import main as render
from moh.reporting.records import load_records
from moh.reporting.report import build_report
from moh.reporting.results import collect
from moh.reporting.spec import load_table
from moh.reporting.sweep_figure import sweep_figure
from moh.reporting.sweep_rows import with_recorded_rows
from moh.reporting.tables import build_table
from moh.runner import config_hash, run_id
from moh.sweep_command import expand_table
from moh.sweeps import CONTROLS, Point, experiment_of, point_of, points
from moh.validation import validate

FILES = sorted((CONF / "experiment").rglob("*.yaml"))
FAMILIES = ("vit", "dit", "llm")
SWEEP = ["table=head_ratio", "protocol=demo"]


@pytest.mark.parametrize(
    ("name", "base", "point"),
    [
        ("demo/vit/ratio_60", "demo/vit/mha", Point(0.6)),
        ("demo/vit/ratio_62.5_random", "demo/vit/mha", Point(0.625, control="random")),
        ("dit/ratio_55_fixed_s2", "dit/mha_s2", Point(0.55, control="fixed")),
        ("llm/ratio_70_paper_s_100b", "llm/mha_s_100b", Point(0.7, control="paper")),
        ("vit/100ep/ratio_75_shared_40_s", "vit/100ep/mha_s", Point(0.75, shared=0.4)),
        ("demo/vit/moh_50", "demo/vit/mha", Point(0.5)),
    ],
)
def test_a_name_says_what_differs_from_the_baseline_and_nothing_else_does(name, base, point):
    assert point_of(name) == (base, point)
    assert experiment_of(base, point) == name
    moh, mha = (
        OmegaConf.to_container(compose_config([f"experiment={n}"]), resolve=True)
        for n in (name, base)
    )
    heads, plain = moh.pop("heads"), mha.pop("heads")
    assert (moh.pop("name"), mha.pop("name")) == (name, base)
    assert moh == mha
    changed = {key: value for key, value in heads.items() if value != plain[key]}
    expected = {"ratio": point.ratio, **CONTROLS.get(point.control, {})}
    if point.shared is not None:
        expected["shared_share"] = point.shared
    assert {key: value for key, value in changed.items() if key != "name"} == {
        key: value for key, value in expected.items() if value != plain[key]
    }


@pytest.mark.parametrize("name", ["vit/moh_s_75", "demo/vit/ratio_50", "demo/vit/mha", "ratio_"])
def test_other_names_are_no_points_of_a_sweep(name):
    assert point_of(name) is None  # demo/vit/ratio_50 goes by demo/vit/moh_50


def test_a_file_with_a_plan_of_its_own_is_no_point_of_a_sweep():
    """demo/smollm2/moh_75 has the continue-tuning router and its heads."""
    assert point_of("demo/smollm2/moh_75") is None
    assert experiment_of("demo/smollm2/mha", Point(0.75)) == "demo/smollm2/ratio_75"
    assert experiment_of("demo/vit/mha", Point(0.75)) == "demo/vit/moh_75"


def test_a_file_that_stands_for_a_point_has_its_ratio():
    names = [str(p.relative_to(CONF / "experiment").with_suffix("")) for p in FILES]
    points_of_files = {name: found for name in names if (found := point_of(name)) is not None}
    assert set(points_of_files) == {f"demo/{f}/moh_{p}" for f in FAMILIES for p in (50, 75)}
    for name, (_, point) in points_of_files.items():
        text = (CONF / "experiment" / f"{name}.yaml").read_text()
        (heads,) = re.findall(r"override /heads: (\S+)", text)
        assert OmegaConf.load(CONF / "heads" / f"{heads}.yaml").ratio == point.ratio


def test_a_point_is_the_run_that_its_overrides_would_be():
    point = compose_config(["experiment=demo/vit/ratio_60_random"])
    overrides = ["heads=moh_ratio", "heads.ratio=0.6", "heads.selection=random"]
    written_out = compose_config(["experiment=demo/vit/mha", *overrides])
    assert config_hash(point) == config_hash(written_out)


def jobs(*arguments: str) -> list[str]:
    """The rows and seeds that a command stands for."""
    return [a for a in expand_table([*SWEEP, *arguments]) if a.startswith(("experiment", "seed"))]


def test_a_sweep_is_mha_each_ratio_and_its_controls_for_every_seed():
    found = jobs("family=dit", "ratios=0.5,0.6", "controls=random,paper", "control_ratios=0.5,0.6")
    names = (
        "mha",
        *("moh_50", "ratio_50_random", "ratio_50_paper"),
        *("ratio_60", "ratio_60_random", "ratio_60_paper"),
    )
    assert found == [f"experiment={','.join(f'demo/dit/{name}' for name in names)}", "seed=0,1,2"]
    composed = compose_jobs([*SWEEP, "ratios=0.6", "controls=none", "seeds=0,1"])
    assert [(job.name, job.seed) for job in composed] == [
        (f"demo/vit/{name}", seed) for name in ("mha", "ratio_60") for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ["ratios=[0.6]", "control_ratios=[0.5]", "controls=fixed"],
            "moh_50 ratio_50_fixed ratio_60",
        ),
        (["ratios=range(0.5,0.75,0.1)", "controls=none"], "moh_50 ratio_60 ratio_70"),
        (
            ["ratios=0.5,0.6", "controls=random"],
            "moh_50 ratio_50_random ratio_60 ratio_60_random",
        ),
        (["ratios=1.0", "control_ratios=1.0"], "ratio_100 ratio_100_paper"),
        (["ratios=0.6", "controls=none", "base=demo/vit/mha", "family=dit"], "ratio_60"),
    ],
)
def test_the_words_of_a_sweep_take_what_hydra_users_write(arguments, names):
    rows = ",".join(f"demo/vit/{name}" for name in ("mha", *names.split()))
    assert jobs(*arguments, "seed=3") == [f"experiment={rows}", "seed=3"]


def test_other_settings_reach_every_row_and_may_be_swept_too():
    arguments = [*SWEEP, "ratios=0.6", "controls=none", "seed=0", "optim.lr=0.1,0.2"]
    found = [(job.name, job.optim.lr) for job in compose_jobs(arguments)]
    assert sorted(found) == [
        (f"demo/vit/{name}", lr) for name in ("mha", "ratio_60") for lr in (0.1, 0.2)
    ]
    smoke = expand_table(["table=head_ratio", "controls=none", "ratios=0.6", "protocol=smoke"])
    assert smoke[:2] == ["protocol=smoke", "experiment=vit/100ep/mha_s,vit/100ep/ratio_60_s"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", ["paper", "demo"])
def test_the_rows_of_every_family_are_valid_and_runs_of_their_own(family, protocol):
    arguments = [f"family={family}", f"protocol={protocol}", "ratios=0.7", "control_ratios=[]"]
    composed = compose_jobs(["table=head_ratio", "seed=0", "controls=none", *arguments])
    assert len({run_id(job).rpartition("-")[2] for job in composed}) == len(composed) == 2
    if protocol == "demo":
        validate(composed[1], paths=False)


def test_rows_and_commands_of_the_sweeps_agree():
    bases = OmegaConf.load(CONF / "table" / "head_ratio.yaml").hydra.sweeper.params.bases
    tables = {
        table: load_table(table).spec.rows
        for table in (f"{demo}head_ratio_{f}" for demo in ("", "demo_") for f in ("dit", "llm"))
    }
    tables["head_ratio_vit"] = load_table("head_ratio_vit").spec.rows
    for table, rows in tables.items():
        protocol = "demo" if table.startswith("demo") else "paper"
        family = table.rpartition("_")[2]
        assert rows[0].experiment == bases[protocol][family]
        *_, found, seeds = expand_table(
            ["table=head_ratio", f"family={family}", f"protocol={protocol}"]
        )
        assert found == f"experiment={','.join(row.experiment for row in rows)}"
        assert seeds == "seed=0,1,2"


def test_a_control_has_the_budget_of_its_moh():
    plans = set()
    for name in ("moh_75", "ratio_75_random", "ratio_75_fixed", "ratio_75_paper"):
        config = validate(compose_config([f"experiment=demo/vit/{name}"]))
        plans.add(head_plan(build_model(config.model, config.heads)))
    (plan,) = plans
    assert plan.activated_ratio == 0.75


MISTAKES = [
    (["family=foo"], "family foo is not one of vit, dit, llm"),
    (["family=vit,dit"], "family takes one value, not vit, dit"),
    (["ratios=1.5"], r"ratios 1.5 is not in \(0, 1\]"),
    (["ratios=0.5,half"], "ratios 'half' is no number"),
    (["ratios=[]"], "ratios is empty"),
    (
        ["family=dit", "ratios=0.05", "controls=none", "seed=0"],
        "heads.ratio 0.05 leaves no active head .* works is 0.13",
    ),
    (["controls=chance"], "controls chance is not one of random, fixed, paper, none"),
    (["control_ratios=2"], r"control_ratios 2 is not in \(0, 1\]"),
    (["base=demo/vit/mah"], "base demo/vit/mah is no experiment; nearest: demo/vit/mha"),
    (["base=demo/vit/moh_75"], "base 'demo/vit/moh_75' is no baseline"),
    (["heads.ratio=0.5"], "heads.ratio is set by each row"),
    (["experiment=demo/vit/mha"], "experiment is set by each row"),
    (["seeds=a"], "seed=a: must be a whole number"),
    (["rations=0.5"], "unknown key rations=0.5"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_in_a_sweep_is_one_line(arguments, message):
    def check() -> None:
        for job in compose_jobs([*SWEEP, *arguments]):
            validate(job)

    with pytest.raises(ValueError, match=message) as caught:
        check()
    assert "\n" not in str(caught.value)


def test_the_command_line_tells_it_with_status_2_and_shows_the_first_row(tmp_path):
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moh", "table=head_ratio", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )

    wrong = command("family=foo")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.strip() == "moh: family foo is not one of vit, dit, llm"
    shown = command("protocol=demo", "--cfg", "job", "--package", "name")
    assert (shown.returncode, shown.stdout.split()[-1]) == (0, "demo/vit/mha")


def score(name: str, folder: Path, seed: int, value: float, ratio: float, **more) -> None:
    write_run(folder, f"demo/vit/{name}", seed, top1(value), activated_ratio=ratio, **more)


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """Three ratios, one that the table does not name, and two controls; two seeds each."""
    levels = {
        "mha": (1.0, 86.0),
        "moh_50": (0.5, 85.0),
        "ratio_60": (0.6, 85.5),
        "moh_75": (0.75, 85.8),
        "ratio_50_random": (0.5, 82.0),
        "ratio_50_fixed": (0.5, 84.0),
    }
    for name, (ratio, level) in levels.items():
        for seed in (0, 1):
            score(name, tmp_path, seed, level + 0.4 * seed, ratio)
    return tmp_path


def test_rows_come_from_the_table_and_from_the_records(swept: Path):
    records = load_records(swept)
    definition = with_recorded_rows(load_table("demo_controls"), records)
    labels = [row.label for row in definition.spec.rows]
    assert labels == [
        "MHA",
        "MoH-25",
        *("MoH-50", "MoH-50, random heads", "MoH-50, fixed heads", "MoH-50, paper's gates"),
        "MoH-60",  # recorded, not listed
        "MoH-75",
    ]
    assert with_recorded_rows(definition, records) == definition
    table = build_table(load_table("demo_controls"), records)
    cells = {row.cells[0].text: row.cells[2].plain for row in table.rows}
    assert cells["MoH-60"] == "85.70 ± 0.28 (2)"
    assert cells["MoH-50, random heads"] == "82.20 ± 0.28 (2)"
    assert table.remarks[:2] == (
        "MoH-50, random heads against MoH-50: \u22123.00 \u00b1 0.00 (2) worse.",
        "MoH-50, fixed heads against MoH-50: \u22121.00 \u00b1 0.00 (2) worse.",
    )
    states = {row.cells[0].text: row.cells[-1].plain for row in table.rows}
    assert states["MoH-25"] == states["MoH-50, paper's gates"] == "not run"


def test_the_curve_shows_every_row_where_it_is_with_its_spread(swept: Path):
    records = load_records(swept)
    definition = with_recorded_rows(load_table("demo_controls"), records)
    figure = sweep_figure(definition, collect(definition, records))
    assert figure is not None
    (axes,) = figure.axes
    bars = [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
    drawn = {}
    for bar in bars:
        line, _, spread = bar.lines
        (x,), (y,) = line.get_data()
        ((_, low), (_, high)), *_ = spread[0].get_segments()
        drawn[round(float(y), 3)] = (float(x), (high - low) / 2)
    assert sorted(drawn) == [82.2, 84.2, 85.2, 85.7, 86.0]
    sd = 0.4 / 2**0.5
    for value, ratio in ((82.2, 50), (84.2, 50), (85.2, 50), (85.7, 60), (86.0, 75)):
        x, half = drawn[value]
        assert abs(x - ratio) < 1.0
        assert half == pytest.approx(sd)
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert {"MoH", "random heads", "fixed heads", "demo protocol, not the paper's"} <= texts
    assert "paper's gates" not in texts  # not run
    assert any(text.startswith("MHA\n86.20") for text in texts)


def test_a_smoke_run_stands_off_the_curve(tmp_path: Path):
    score("mha", tmp_path, 0, 86.0, 1.0)
    score("moh_50", tmp_path, 0, 70.0, 0.5, protocol="smoke")
    definition = load_table("demo_controls")
    figure = sweep_figure(definition, collect(definition, load_records(tmp_path)))
    assert figure is not None
    assert "smoke" in {text.get_text() for text in figure.findobj(Text)}


def test_the_report_and_the_figures_have_the_sweep(swept: Path, tmp_path: Path):
    page = build_report(swept, tmp_path / "report.html", ["demo_controls"]).read_text()
    assert "MoH-50, random heads" in page
    assert "Curve: score by activated ratio" in page
    assert render(["demo_controls", "--no-write", "--figures", "--results-dir", str(swept)]) == 0
    assert (swept / "figures" / "demo_controls.png").stat().st_size > 5_000


def test_runs_of_a_sweep_are_no_changed_protocol(tmp_path: Path):
    overrides = ["table=head_ratio", "family=vit", "protocol=demo", "ratios=0.6", "seeds=0,1"]
    score("ratio_60", tmp_path, 0, 85.0, 0.6, overrides=overrides)
    definition = with_recorded_rows(load_table("demo_controls"), load_records(tmp_path))
    result = collect(definition, load_records(tmp_path))["ratio_60"]
    assert result.state.word == "demo"


def test_controls_that_select_nothing_are_left_out():
    ids = [point.id for point in points([1.0], ["random", "fixed", "paper"])]
    assert ids == ["ratio_100", "ratio_100_paper"]
