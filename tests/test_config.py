"""Configuration: one difference between a model and its baseline, and mistakes told in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from composed import EXPERIMENTS, composed, definition, facts_of
from omegaconf import OmegaConf

from moh.cli import CONF, ROOT, compose_config, compose_jobs, tables
from moh.reporting.spec import table_names
from moh.runner import run_id
from moh.validation import validate


def baseline_of(name: str) -> str | None:
    """The experiment that a MoH experiment is made from; None for a baseline, and for one that
    trains nothing."""
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    parent = re.search(r"^  - (?!override|_self_)(\S+)$", text, re.MULTILINE)
    if parent is None or "override /heads:" not in text or "mode: eval" in text:
        return None
    return parent.group(1)


PUBLISHED = [name for name in EXPERIMENTS if "/published_" in name]
PAIRS = [(name, parent) for name in EXPERIMENTS if (parent := baseline_of(name))]


def test_every_experiment_with_other_heads_is_in_a_pair():
    pairs = {name for name, _ in PAIRS}
    for name in EXPERIMENTS:
        config = composed(name)
        mha = config.heads.ratio is config.heads.num_shared is config.heads.top_k is None
        assert mha or config.mode == "eval" or name in pairs, name


def test_every_family_has_pairs():
    assert {name.split("/")[0] for name, _ in PAIRS} == {"vit", "dit", "llm", "demo"}
    assert len(PAIRS) >= 25


@pytest.mark.parametrize(("name", "parent"), PAIRS)
def test_a_pair_differs_in_nothing_but_the_heads(name, parent):
    moh, mha = (OmegaConf.to_container(composed(n), resolve=True) for n in (name, parent))
    assert moh.pop("name") == name
    assert mha.pop("name") == parent
    heads_moh, heads_mha = moh.pop("heads"), mha.pop("heads")
    assert moh == mha
    assert heads_mha["name"] == "mha"
    assert heads_mha["ratio"] is heads_mha["num_shared"] is heads_mha["top_k"] is None
    assert heads_moh["ratio"] or heads_moh["num_shared"]


@pytest.mark.parametrize(("name", "parent"), PAIRS[:6])
def test_heads_mha_turns_a_model_into_its_baseline(name, parent):
    switched = compose_config([f"experiment={name}", "heads=mha"])
    if name.startswith("demo/vit/ratio"):
        pytest.skip("the ratio is part of the experiment")
    assert switched.heads == composed(parent).heads


# Published weights and the row of the table whose recipe they are said to follow.
TWINS = {
    "vit/published_moh_b_75": "vit/moh_b_75",
    "vit/published_moh_b_50": "vit/moh_b_50",
    "vit/published_moh_s_80": "vit/moh_s_80",
    "vit/published_moh_s_75": "vit/moh_s_75",
    "vit/published_transnext_s": "vit/mha_s",
    "vit/published_transnext_b": "vit/mha_b",
    "dit/published_moh_xl2_90": "dit/moh_xl2_90",
    "dit/published_moh_xl2_90_cfg125": "dit/moh_xl2_90",
    "dit/published_dit_xl2": "dit/mha_xl2",
    "dit/published_dit_xl2_cfg125": "dit/mha_xl2",
    "llm/published_moh_llama3_8b": "llm/moh_llama3_8b_75",
    "llm/published_llama3_8b": "llm/mha_llama3_8b",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_are_scored_as_a_trained_row_is(name):
    """So that a calibration row shares model, heads, data and evaluation with its row."""
    ours, row = (
        OmegaConf.to_container(compose_config([f"experiment={n}"]), resolve=True)
        for n in (name, TWINS[name])
    )
    assert (ours.pop("mode"), ours.pop("name")) == ("eval", name)
    assert ours.pop("evaluates")
    for key in ("mode", "name", "evaluates"):
        row.pop(key, None)
    if name.endswith("cfg125"):
        assert (ours["eval"].pop("guidance"), row["eval"].pop("guidance")) == (1.25, 1.0)
    if name == "llm/published_llama3_8b":  # Meta's own vocabulary
        assert (ours["model"].pop("vocab_size"), row["model"].pop("vocab_size")) == (128256, 160896)
    assert ours == row
    with pytest.raises(ValueError, match=r"checkpoint is not set: .*checkpoint=PATH$"):
        validate(compose_config([f"experiment={name}"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_valid_and_named_after_its_file(name, monkeypatch):
    # The model is built too, but each baseline once for all experiments.
    monkeypatch.setattr("moh.validation.check_plan", lambda _: facts_of(name))
    config = validate(composed(name), paths=False)
    assert config.name == name


def test_demo_numbers_cannot_be_taken_for_the_papers():
    for name in EXPERIMENTS:
        config = composed(name)
        assert (config.protocol == "demo") == name.startswith("demo/")


SWEEPS = {"head_ratio", "demo_controls"}  # their rows are made: test_sweeps


@pytest.mark.parametrize("name", sorted({*tables()} - SWEEPS))
def test_the_command_of_a_table_runs_its_rows_and_seeds(name):
    table = definition(name)
    assert not table.spec.command
    params = OmegaConf.load(CONF / "table" / f"{name}.yaml").hydra.sweeper.params
    run = re.split(r",\s*", params.experiment.strip())
    order = {name: place for place, name in enumerate(run)}
    # As in the table, but for evaluations of kept checkpoints: these wait for their training.
    assert sorted(run) == sorted(table.experiments)
    for experiment in run:
        source = composed(experiment).weights_of
        assert source not in order or order[source] < order[experiment]
    trained = [name for name in table.experiments if composed(name).weights_of is None]
    assert [name for name in run if composed(name).weights_of is None] == trained
    assert str(params.seed) == ",".join(map(str, range(table.spec.seeds)))


def test_a_table_without_a_command_of_its_own_is_run_by_the_entry_point():
    for name in table_names():
        if not definition(name).spec.command:
            assert name in tables()


def test_a_table_is_its_rows_times_its_seeds():
    jobs = compose_jobs(["table=components_vit"])
    rows = definition("components_vit").experiments
    assert [(job.name, job.seed) for job in jobs] == [(row, s) for row in rows for s in range(3)]


def test_the_run_folder_is_a_function_of_config_and_seed():
    first = run_id(compose_config(["experiment=demo/vit/mha"]))
    assert first == run_id(compose_config(["experiment=demo/vit/mha"]))
    assert first.startswith("demo/vit/mha/seed0-")
    for change in (
        "optim.lr=0.1",
        "seed=1",
        "heads=moh_50",
        "model.drop_path_rate=0.3",
        "trainer.global_batch=64",
        "trainer.samples=1280",
        "trainer.precision=bf16",
        "trainer.ema_decay=0.9",
        "task.mix_batch=4",
        "eval.precision=bf16",
    ):
        assert run_id(compose_config(["experiment=demo/vit/mha", change])) != first, change
    for same in (
        "logger.wandb=disabled",
        "mode=eval",
        "results_dir=elsewhere",
        "heads.execution=dense",
        "data.root=elsewhere.npz",
        "data.workers=2",
        "eval.batch=250",
        "eval.save_samples=true",
        "launcher.processes=2",
        "trainer.activation_checkpointing=true",
        "trainer.checkpoint_every=1280",
        "trainer.compile=true",
        "trainer.device=cpu",
        "trainer.device_batch=64",
        "trainer.keep_at=[1280]",
        "trainer.log_every=1",
        "trainer.parallel=fsdp",
        "trainer.threads=2",
    ):
        assert run_id(compose_config(["experiment=demo/vit/mha", same])) == first, same
    few, many = (compose_config(["experiment=vit/mha_s", f"data.workers={n}"]) for n in (2, 16))
    assert run_id(few) == run_id(many)


MISTAKES = [
    (["experiment=demo/vit/moh_57"], "unknown experiment 'demo/vit/moh_57'; nearest: demo/vit/moh"),
    (["experiment=moh_s_75"], "nearest: .*vit/moh_s_75"),
    (["table=demo_vti"], "unknown table 'demo_vti'; nearest: demo_vit"),
    (["experiment=demo/vit/mha", "heads=moh75"], "unknown heads 'moh75'; nearest: moh_75"),
    (
        ["experiment=demo/vit/mha", "heads.raito=1"],
        "unknown key heads.raito=1; nearest: heads.ratio",
    ),
    (["experiment=demo/vit/mha", "+foo=1"], "unknown key foo"),
    (["experiment=demo/vit/mha", "+heads.rato=1"], "unknown key heads.rato; nearest: heads.ratio"),
    (
        ["experiment=demo/vit/mha", "+trainer.samples=128"],
        r"trainer.samples has .*leave out the \+",
    ),
    (["experiment=demo/vit/mha", "+heads=moh_75"], r"heads has a value already; leave out the \+"),
    (["experiment=demo/vit/mha", "heads=moh_ratio"], r"heads.ratio is not set.* \(0, 1\]"),
    (
        ["experiment=demo/vit/moh_75", "heads.top_k=[2,2,2]"],
        "heads.top_k and heads.ratio exclude .*=0.75; take it out with heads.ratio=null",
    ),
    (["experiment=demo/vit/mha", "optim.lr=fast"], "optim.lr=fast: must be a number"),
    (["experiment=demo/vit/mha", "mode=trian"], "mode 'trian' is not one of train, eval, both"),
    (["experiment=demo/vit/mha", "trainer.device_batch=100"], "128 is not a multiple of .* 100"),
    (["experiment=demo/vit/mha", "trainer.samples=1000"], "1000 is not a multiple .*nearest: 1024"),
    (
        ["experiment=demo/vit/mha", "heads.num_shared=[1,2,2]", "heads.top_k=[2,2,9]"],
        "^heads.top_k 9 > 6 routed heads in layer 2",
    ),
    (["experiment=demo/vit/moh_75", "heads.ratio=1.5"], r"heads.ratio 1.5 is not in \(0, 1\]"),
    (["experiment=demo/vit/moh_75", "heads.router=linear"], "linear.*two_stage, query_norm"),
    (["experiment=demo/vit/mha", "data=state_of_the_union"], "cannot train on data"),
    (["experiment=demo/vit/mha", "model.in_chans=3"], "data are 1x28x28, the model takes 3x28x28"),
    (["experiment=demo/vit/mha", "data.root=/no/such"], "data.root=/no/such does not exist"),
    (["experiment=demo/vit/mha", "model.name=transnext_smal"], "not a timm model; nearest"),
    (["experiment=demo/vit/mha", "+model.args.depth=3"], "model.args.depth is not an argument"),
    (["experiment=demo/vit/mha", "seed"], "'seed' is not of the form key=value"),
    (["seed=1"], "say what to run"),
    (["experiment=demo/vit/mha", "seed=-1"], "seed -1 must be at least 0"),
    (["experiment=demo/vit/mha", "seed=abc"], "seed=abc: must be a whole number"),
    (["experiment=demo/vit/mha", "heads.top_k=9"], r"heads.top_k=9: must be a list"),
    (["experiment=demo/vit/mha", "checkpoint="], "checkpoint is empty"),
    (["experiment=demo/vit/mha", "checkpoint=a.pth"], "checkpoint=a.pth needs mode=eval"),
    (
        ["experiment=demo/vit/mha", "mode=eval", "checkpoint=pretrained"],
        "checkpoint=pretrained needs model.pretrained",
    ),
    (["experiment=vit/timm", "mode=both"], "mode both: vit/timm scores given weights"),
    (["experiment=vit/timm", "model.name=deit_smal"], "'deit_smal' is not a timm model; nearest"),
    (
        ["experiment=vit/timm", "model.name=vit_tiny_patch16_224.augreg_in21k"],
        "model.num_classes 1000: the weights of .* know 21843 classes",
    ),
    (["experiment=vit/mha_s", "data.form=tar"], "data.form tar is for mode=eval"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_it(arguments, message):
    def check() -> None:
        for job in compose_jobs(arguments):
            validate(job)

    with pytest.raises(ValueError, match=message) as caught:
        check()
    assert "\n" not in str(caught.value)


def test_a_mistake_ends_with_status_2_and_leaves_nothing(tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "moh",
            "experiment=demo/vit/mha",
            "optim.lrr=1",
            f"runs_dir={tmp_path}/runs",
            f"results_dir={tmp_path}/results",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "moh: unknown key optim.lrr=1; nearest: optim.lr"
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
