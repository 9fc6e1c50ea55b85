"""The words of a command line: each is used or refused, in one line, before any work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import yaml
from hydra._internal.utils import get_args_parser
from tiny_runs import tiny_command
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from moh import cli
from moh.cli import ROOT, compose_jobs
from moh.runner import run_id

MHA = "experiment=demo/vit/mha"
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """``python -m moh`` in this process: exit status, stdout, stderr. It may not start a run."""

    def never(*arguments: Any) -> int:
        raise AssertionError("a run was started")

    monkeypatch.setattr(cli, "_run_here", never)

    def start(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moh", *arguments])
        status, root = 0, logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:  # Hydra's for --cfg and --info
            root.handlers[:] = handlers
            root.setLevel(level)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return start


WRONG = [
    ([MHA, "--dry-run"], "--dry-run: no such option; write dry_run=true"),
    ([MHA, "--dry_run"], "--dry_run: no such option; write dry_run=true"),
    ([MHA, "-seed=3"], "-seed=3: no such option; write seed=3"),
    ([MHA, "--seed", "3"], "--seed: no such option; write seed=3"),
    ([MHA, "--seed"], "--seed: no such option; write seed=VALUE"),
    ([MHA, "--trainer.compile"], "--trainer.compile: no such option; write trainer.compile=true"),
    ([MHA, "--data.root", "seed=1"], "--data.root: no such option; write data.root=VALUE"),
    (["--experiment", "demo/vit/mha"], "--experiment: no such option; write experiment=demo/vit/"),
    (["table=head_ratio", "--ratios", "0.5"], "--ratios: no such option; write ratios=0.5"),
    ([MHA, "--lists"], "--lists: no such option; nearest: --list"),
    ([MHA, "--multi"], "--multi: no such option; nearest: --multirun"),
    ([MHA, "--runs-dirs", "x"], "--runs-dirs: no such option; nearest: runs_dir=..."),
    ([MHA, "--gpus", "8"], "--gpus: no such option; `python -m moh --help` lists them"),
    ([MHA, "-x"], "-x: no such option; `python -m moh --help` lists them"),
    ([MHA, "--"], "--: no such option"),
    ([MHA, "-"], "-: no such option"),
    ([MHA, "--sed=3"], "unknown key sed=3; nearest: seed"),
    ([MHA, "--dry-run=true"], "unknown key dry-run=true; nearest: dry_run"),
    ([MHA, "--optim.lrr=1"], "unknown key optim.lrr=1; nearest: optim.lr"),
    (["table=demo_vit", "--only", "--list"], "--only: its value is missing"),
    (["table=demo_vit", "--only"], "--only: its value is missing"),
    (["table=demo_vit", "--only="], "--only: its value is missing"),
    (["--only", "table=demo_vit"], "--only table=demo_vit: give the number of a run of --list"),
    (["table=demo_vit", "--only=two"], "--only two: give the number of a run of --list"),
    (["table=demo_vit", "--only", "6"], "--only 6: give a number from 0 to 5"),
    (["table=demo_vit", "--only=1", "--only", "2"], "--only is given twice"),
    (["-m", "--multirun", MHA], "--multirun is given twice"),
    ([MHA, "--list=3"], "--list=3: --list takes no value"),
    ([MHA, "--cfg"], "--cfg: its value is missing"),
    ([MHA, "--cfg", "jobs"], "--cfg jobs: not one of job, hydra, all"),
    ([MHA, "--info=plugin"], "--info plugin: not one of all, config, "),
    ([MHA, "--cfg", "job", "--list"], "--list and --cfg exclude each other"),
    ([MHA, "--resolve"], "--resolve needs --cfg"),
    ([MHA, "-p", "heads"], "--package needs --cfg"),
    ([MHA, "seed"], "'seed' is not of the form key=value"),
    ([MHA, "3"], "'3' is not of the form key=value"),
    ([MHA, ""], "'' is not of the form key=value"),
    ([MHA, "=3"], "'=3' is not of the form key=value"),
    ([MHA, "heads.top_k[0]=3"], "'heads.top_k[0]=3' is not of the form key=value"),
    ([MHA, "experiment=demo/vit/moh_75"], "one key, two values"),
    ([MHA, "seed=1", "--seed=2"], "seed=1 and seed=2: one key, two values"),
    ([MHA, "hydra.run.dir=/tmp/x"], "hydra.run.dir=/tmp/x: has no effect here"),
    ([MHA, "hydra/sweeper=optuna"], "hydra/sweeper=optuna: has no effect here"),
    ([MHA, "hydra.job.chdir=true"], "hydra.job.chdir=true: has no effect here"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_word_that_nothing_uses_is_refused_in_one_line(main: Main, arguments, message):
    status, out, err = main(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"moh: {message}") or message in err
    assert err.count("\n") == 1


SHOWN = [MHA, "--cfg", "job"]
# Hydra's options that are honoured: a command with each, and what it prints.
HONOURED = {
    "--help": (["--help"], "exit status"),
    "-h": ([MHA, "-h"], "exit status"),
    "--version": (["--version"], "moh "),
    "--cfg": ([*SHOWN], "name: demo/vit/mha"),
    "-c": ([MHA, "-c", "hydra"], "sweeper:"),
    "--resolve": ([*SHOWN, "--resolve", "-p", "data"], "name: fashion"),
    "--package": ([*SHOWN, "--package=optim"], "# @package optim"),
    "-p": ([*SHOWN, "-p", "optim"], "# @package optim"),
    "--multirun": (["--multirun", MHA, "seed=3,4", "--list"], "demo/vit/mha/seed4"),
    "-m": (["-m", MHA, "seed=3,4", "--list"], "demo/vit/mha/seed4"),
    "--info": ([MHA, "--info", "defaults"], "experiment/demo/vit/mha"),
    "-i": (["-i", "searchpath", MHA], "main"),
}
REFUSED = {
    *("--run", "-r", "--hydra-help", "--shell-completion", "-sc", "--config-path", "-cp"),
    *("--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun"),
}


@pytest.mark.parametrize(
    "option", [name for action in get_args_parser()._actions for name in action.option_strings]
)
def test_each_option_of_hydra_is_honoured_or_refused(main: Main, option):
    if option in HONOURED:
        arguments, printed = HONOURED[option]
        status, out, err = main(*arguments)
        assert (status, err) == (0, "")
        assert printed in out
        return
    assert option in REFUSED
    for written in ([option], [option, "x"], [f"{option}=x"]):
        status, out, err = main(MHA, *written)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"moh: {written[0]}: no such option; ")


def test_an_option_takes_its_value_with_a_space_or_an_equals_sign(main: Main):
    first = main("table=demo_vit", "--only=2", "--list")
    assert first == main("table=demo_vit", "--list", "--only", "2")
    assert first[0] == 0
    assert first[1].split()[:2] == ["2", run_id(compose_jobs(["table=demo_vit"])[2])]
    shown = main("table=demo_vit", "--only=3", "-c=job", "-p=seed")
    assert shown[1].split()[-1] == "1"
    assert main("table=demo_vit", "--cfg", "job", "--package", "fo")[0] == 2


def agent_commands(sweep: dict[str, Any], settings: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The words behind the program that a wandb agent starts for each setting."""
    commands = []
    for setting in settings:
        macros = create_sweep_command_args({"args": {k: {"value": v} for k, v in setting.items()}})
        macros |= {"env": ["env"], "interpreter": ["python"], "program": [sweep["program"]]}
        words: list[str] = []
        for word in create_sweep_command(list(sweep.get("command", [])) or None):
            words += macros[word[2:-1]] if word.startswith("${") else [word]
        start = words.index("moh" if "moh" in words else sweep["program"]) + 1
        commands.append(words[start:])
    return commands


AGENT_SETTINGS = [
    {"seed": 0, "optim.lr": 1e-05, "heads.ratio": 0.5},
    {"seed": 1, "optim.lr": 0.002, "heads.ratio": 0.75},
    {"seed": 1, "optim.lr": 0.002, "heads.ratio": 1.0},
]


@pytest.mark.parametrize("macro", ["${args}", "${args_no_hyphens}", "${args_override_hydra}"])
def test_each_setting_of_a_wandb_sweep_is_a_run_of_its_own(macro):
    sweep = yaml.safe_load((ROOT / "scripts" / "wandb" / "sweep.yaml").read_text())
    assert sweep["command"][-1] == "${args}"
    assert set(sweep["parameters"]) == set(AGENT_SETTINGS[0])
    sweep["command"][-1] = macro
    jobs = [job for words in agent_commands(sweep, AGENT_SETTINGS) for job in compose_jobs(words)]
    assert len({run_id(job) for job in jobs}) == 3
    for job, setting in zip(jobs, AGENT_SETTINGS, strict=True):
        assert (job.seed, job.optim.lr, job.heads.ratio) == tuple(setting.values())


def test_wandbs_own_command_and_every_kind_of_value_reach_the_configuration():
    setting = {
        "experiment": "demo/vit/mha",
        "trainer.compile": False,
        "trainer.samples": 1280,
        "heads.num_shared": [2, 2, 2],
        "heads.top_k": [1, 2, 3],
        "eval.tasks": ["piqa", "arc_easy"],
        "eval.shots": {"piqa": 5, "arc_easy": 0},
        "optim.clip_norm": None,
        "logger.project": "a (b) = c",
    }
    (words,) = agent_commands({"program": "moh/__main__.py"}, [setting])
    (job,) = compose_jobs(words)
    assert job.trainer.compile is False
    assert job.trainer.samples == 1280
    assert job.heads.top_k == [1, 2, 3]
    assert job.eval.tasks == ["piqa", "arc_easy"]
    assert job.eval.shots == {"piqa": 5, "arc_easy": 0}
    assert job.optim.clip_norm is None
    assert job.logger.project == "a (b) = c"


@pytest.mark.parametrize("macro", ["${args_no_equals}", "${args_no_boolean_flags}", "${args_json}"])
def test_other_forms_of_wandbs_arguments_are_refused(main: Main, macro):
    sweep = {"program": "x", "command": ["moh", MHA, macro]}
    (words,) = agent_commands(sweep, [{"dry_run": True}])
    status, _, err = main(*words)
    assert (status, err.count("\n")) == (2, 1)


FAILURES = [
    (KeyError("label"), "KeyError: 'label'"),
    (RuntimeError("first\nsecond"), "RuntimeError: first"),
    (AssertionError(), "AssertionError"),
    (ValueError("not so"), "not so"),
    (OSError(28, "No space left on device", "x.pt"), "No space left on device (x.pt)"),
    (EOFError("Ran out of input"), "EOFError: Ran out of input"),
]


def fail(number: int) -> None:
    if number < len(FAILURES):
        raise FAILURES[number][0]


def test_any_failure_of_one_run_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    started = []

    def execute(folder, arguments) -> None:
        started.append(folder)
        fail(int(folder.name[4]))

    monkeypatch.setattr("moh.worker.execute", execute)
    seeds = f"seed=range({len(FAILURES) + 1})"
    monkeypatch.setattr(sys, "argv", ["moh", "-m", *tiny_command("vit", tmp_path), seeds])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(started) == len(FAILURES) + 1
    assert len(lines) == len(FAILURES)
    for line, folder, (error, told) in zip(lines, started, FAILURES, strict=False):
        assert line.startswith(f"moh: demo/vit/moh_50/{folder.name}: {told}")
        assert type(error).__name__ in (folder / "error.log").read_text()
    assert not (started[-1] / "error.log").exists()
    assert f"{len(FAILURES)} of {len(FAILURES) + 1} runs failed" in printed.out


def test_a_failure_outside_a_runs_folder_is_told_and_leaves_the_others_alone(
    tmp_path, monkeypatch, capsys
):
    started = []

    def run(config, arguments) -> None:
        started.append(config.seed)
        fail(config.seed)

    monkeypatch.setattr("moh.runner.run", run)
    seeds = f"seed=range({len(FAILURES) + 1})"
    monkeypatch.setattr(sys, "argv", ["moh", "-m", *tiny_command("vit", tmp_path), seeds])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert started == list(range(len(FAILURES) + 1))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moh: ")]
    assert [line.partition(": ")[2][:23] for line in lines] == [
        f"demo/vit/moh_50 seed {number}:" for number in range(len(FAILURES))
    ]


def test_the_record_has_the_overrides_of_an_agents_command(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("moh.worker.execute", lambda folder, arguments: seen.append(arguments))
    command = [f"--{word}" for word in tiny_command("vit", tmp_path)]
    monkeypatch.setattr(sys, "argv", ["moh", *command, "--seed=3"])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen == [[*tiny_command("vit", tmp_path), "seed=3"]]
