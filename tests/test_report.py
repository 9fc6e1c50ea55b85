"""What the report, the figures and the command promise: from records alone, without a network."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.text import Text
from synthetic_records import (
    CLASSES,
    DEMO_TABLES,
    head_load,
    metric,
    top1,
    write_demo,
    write_run,
)

from moh.reporting.cli import main
from moh.reporting.progress_figure import progress_figure
from moh.reporting.records import load_records
from moh.reporting.report import build_report
from moh.reporting.results import collect
from moh.reporting.spec import load_table
from moh.reporting.sweep_figure import sweep_figure
from moh.reporting.tables import build_table


def test_an_unknown_table_names_the_nearest_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo_vitt", "--results-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "demo_vit" in error
    assert not list(tmp_path.iterdir())


def test_a_results_folder_that_is_none_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo_vit", "--results-dir", str(tmp_path / "resluts")]) == 2
    assert capsys.readouterr().err.endswith("resluts is not a folder\n")
    assert not list(tmp_path.iterdir())


def test_no_number_is_cut_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    write_demo(tmp_path, seeds=2)
    assert main([*DEMO_TABLES, "--results-dir", str(tmp_path), "--no-write"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert not (tmp_path / "tables").exists()
    for name in DEMO_TABLES:
        for row in build_table(load_table(name), load_records(tmp_path)).rows:
            assert all(cell.plain in printed for cell in row.cells)


class _References(HTMLParser):
    """Everything a page would load or lead to, and the ids in it."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.targets += [named[key] or "" for key in ("src", "href", "srcset") if key in named]
        self.ids += [named["id"] or ""] if "id" in named else []
        assert tag != "script"


def references(page: str) -> _References:
    parser = _References()
    parser.feed(page)
    return parser


@pytest.fixture(scope="module")
def demo_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_demo(folder, seeds=2)
    return folder


def test_the_report_needs_no_network_and_its_links_lead_somewhere(demo_results: Path) -> None:
    page = build_report(demo_results, demo_results / "report.html", DEMO_TABLES).read_text()
    found = references(page)
    links = [target for target in found.targets if target.startswith("#")]
    assert all(target.startswith(("#", "data:")) for target in found.targets)
    assert {target[1:] for target in links} <= set(found.ids)
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page
    assert sum(target.startswith("data:image/svg") for target in found.targets) == 16
    assert sum(target.startswith("data:image/png") for target in found.targets) == 3
    assert "Demo protocol, not the paper&#39;s." in page


def test_the_report_is_a_function_of_the_records(demo_results: Path) -> None:
    pages = [
        build_report(demo_results, demo_results / f"{name}.html", DEMO_TABLES[1:2]).read_bytes()
        for name in ("first", "second")
    ]
    assert pages[0] == pages[1]


def test_the_report_says_how_it_was_run(demo_results: Path) -> None:
    write_run(demo_results / "other", "demo/vit/mha", 0, top1(90.0), dirty=True)
    page = build_report(
        demo_results / "other", demo_results / "other" / "report.html", ["demo_vit"]
    ).read_text()
    for fact in (
        "python -m moh experiment=demo/vit/mha seed=0",
        "Synthetic CPU, 2 cores, 2 threads",
        "torch&nbsp;2.14.1",
        "0123456789abcdef0123456789abcdef01234567 with uncommitted changes",
        "runs/demo/vit/mha/seed0-00000000/wandb",
        "51,200",
    ):
        assert fact in page


def test_without_records_everything_reads_not_run(tmp_path: Path) -> None:
    page = build_report(tmp_path / "none", tmp_path / "report.html", DEMO_TABLES).read_text()
    rows = sum(len(load_table(name).spec.rows) for name in DEMO_TABLES)
    cards, explanation = 9, 1
    assert page.count(">not run<") == rows + cards + explanation
    assert "<img" not in page


def test_figures_mark_incomplete_runs_and_the_protocol(tmp_path: Path) -> None:
    write_run(tmp_path, "demo/vit/mha", 0, top1(90.0))
    write_run(tmp_path, "demo/vit/moh_75", 0, top1(89.0), protocol="smoke")
    write_run(tmp_path, "demo/vit/moh_50", 0, top1(70.0), status="partial", share=0.3)
    definition = load_table("demo_head_ratio")
    figure = sweep_figure(definition, collect(definition, load_records(tmp_path)))
    assert figure is not None
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert {"smoke", "partial (30 %)", "demo protocol, not the paper's"} <= texts


def test_torn_and_absent_files_cost_only_themselves(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo/vit/moh_75", 0, top1(90.0))
    (folder / "curves.jsonl").write_text('{"samples": 1, "task_loss": 2.0}\n{"samples": 2, "ta')
    (folder / "head_load.json").write_text("{")
    torn = write_run(tmp_path, "demo/vit/mha", 0, top1(90.0))
    (torn / "run.json").write_text('{"name": "demo')
    write_run(tmp_path, "demo/vit/moh_50", 0, status="partial", share=0.3)
    records = load_records(tmp_path)
    assert len(records.problems) == 1
    assert "demo/vit/mha" in records.problems[0]
    (moh_75,) = records.of("demo/vit/moh_75")
    assert len(moh_75.curves) == 1
    assert moh_75.head_load is None
    page = build_report(tmp_path, tmp_path / "report.html", ["demo_vit"]).read_text()
    assert "partial (30 %)" in page
    assert "unreadable record left out" in page


def test_hostile_text_in_a_record_stays_text(tmp_path: Path) -> None:
    load = head_load(0.75, 0)
    load["groups"] = {"<script>$\\x$</script>": load["groups"][CLASSES[0]]}
    write_run(
        tmp_path,
        "demo/vit/moh_75",
        0,
        top1(90.0, marks=["<script>alert(1)</script>"]),
        {"head_load.json": load},
        command="<script>",
    )
    page = build_report(tmp_path, tmp_path / "report.html", ["demo_vit"]).read_text()
    references(page)
    assert "<script" not in page


def test_layers_that_route_nothing_have_no_head_load(tmp_path: Path) -> None:
    load = head_load(0.75, 0)
    load["num_routed"][0] = load["top_k"][0] = 0
    load["overall"][0] = []
    for layers in load["groups"].values():
        layers[0] = []
    write_run(tmp_path, "demo/vit/moh_75", 0, files={"head_load.json": load})
    (record,) = load_records(tmp_path).runs
    assert record.head_load is not None
    assert len(record.head_load.layers) == 3
    assert sum(record.head_load.overall[0]) == pytest.approx(4, abs=0.5)
    assert record.head_load.uniform(0) == 4 / 6


def test_readme_figures_are_small_and_come_only_from_records(
    demo_results: Path, tmp_path: Path
) -> None:
    arguments = [*DEMO_TABLES, "--no-write", "--figures", "--results-dir"]
    assert main([*arguments, str(tmp_path)]) == 0
    assert not list(tmp_path.glob("**/*.png"))
    assert main([*arguments, str(demo_results)]) == 0
    for name in ("demo_sweep.png", "demo_samples.png"):
        assert 5_000 < (demo_results / "figures" / name).stat().st_size < 150_000


def test_the_written_table_is_markdown_with_its_protocol(demo_results: Path) -> None:
    assert main(["demo_llm", "--results-dir", str(demo_results)]) == 0
    text = (demo_results / "tables" / "demo_llm.md").read_text()
    assert "**Demo protocol, not the paper's.**" in text
    assert "| Unigram tokens |" in text
    assert "Limit 100 items." in text
    assert "1,234,567" in text
    assert "LogiQA" not in text  # optional, and no run has it


def test_scores_along_training_are_a_panel_a_metric_and_a_line_a_model(tmp_path: Path) -> None:
    definition = load_table("demo_smollm2")
    assert progress_figure(definition, collect(definition, load_records(tmp_path))) is None
    for index, row in enumerate(definition.spec.rows):
        accuracy = metric(40.0 + index, "%", stderr=4.9)
        scores = {"bits_per_byte": metric(0.9 - 0.01 * index, "bits/byte", higher=False)}
        status = "evaluated" if row.experiment.endswith("_at_0") else "finished"
        scores |= {"piqa/acc_norm": accuracy}
        write_run(tmp_path, row.experiment, metrics=scores, status=status)
    figure = progress_figure(definition, collect(definition, load_records(tmp_path)))
    assert figure is not None
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left").split(" (")[0] for axes in panels] == [
        "Held-out text",
        "PIQA",
    ]
    lines = {line.get_label(): line.get_xydata().tolist() for line in panels[0].get_lines()}
    assert [x for x, _ in lines["MHA"]] == [0, 40.96, 81.92]
    assert [y for _, y in lines["MoH-75"]] == pytest.approx([0.89, 0.87, 0.85])
    assert main(["demo_smollm2", "--no-write", "--figures", "--results-dir", str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "demo_smollm2.png").stat().st_size > 5_000


def test_the_papers_curve_is_drawn_beside_ours(tmp_path: Path) -> None:
    definition = load_table("llama3_curve")
    scores = {"mmlu/acc": metric(60.0, "%", stderr=0.4)}
    write_run(tmp_path, "llm/llama3_curve/at_10b", metrics=scores, protocol="paper")
    figure = progress_figure(definition, collect(definition, load_records(tmp_path)))
    assert figure is not None
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert lines["paper"] == [[0, 63.0], [2, 64.8], [29, 64.9]]
    assert [10.0, 60.0] in lines["MoH-LLaMA3-8B"]
