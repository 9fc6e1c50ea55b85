"""Rows that train nothing: they evaluate what another row has trained, once, and find it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import folder_of, tiny

from moh.cli import compose_config
from moh.errors import RunError
from moh.lineage import trained_weights
from moh.runner import run
from moh.validation import validate

EVALUATION = ["name=other", "mode=eval", "weights_of=demo/vit/moh_50"]


def recorded(folder: Path, name: str) -> tuple[dict, dict]:
    """The record and the scores of an experiment's only run."""
    (run_json,) = (folder / "results" / "runs" / name).glob("seed0-*/run.json")
    metrics = run_json.with_name("metrics.json")
    return json.loads(run_json.read_text()), json.loads(metrics.read_text())


def test_a_row_evaluates_the_weights_that_another_has_trained(tmp_path: Path, capsys) -> None:
    trained = tiny("vit", tmp_path, "trainer.keep_at=[16]", "trainer.checkpoint_every=16")
    other = tiny("vit", tmp_path, *EVALUATION)
    with pytest.raises(RunError, match=r"demo/vit/moh_50 is not trained with seed 0.*run it first"):
        run(other)
    assert not (tmp_path / "runs" / "other").exists()
    run(trained)
    # The two newest and the one to keep, of four.
    kept = sorted(path.name for path in (folder_of(trained) / "checkpoints").glob("[0-9]*"))
    assert [int(name) for name in kept] == [16, 48, 64]

    run(other)
    record, metrics = recorded(tmp_path, "other")
    assert (record["status"], record["samples"], record["share"]) == ("finished", 64, 1.0)
    assert record["weights_of"] == "demo/vit/moh_50"
    assert Path(record["checkpoint"]["path"]) == folder_of(trained)
    scores = recorded(tmp_path, "demo/vit/moh_50")[1]
    assert metrics == scores
    run(other)
    assert "other/seed0" in capsys.readouterr().out.splitlines()[-1]

    early = tiny("vit", tmp_path, *EVALUATION, "name=early", "weights_at=16")
    run(early)
    record, metrics = recorded(tmp_path, "early")
    assert (record["status"], record["samples"]) == ("finished", 16)
    assert metrics != scores
    gone = tiny("vit", tmp_path, *EVALUATION, "name=gone", "weights_at=32")
    with pytest.raises(RunError, match="no checkpoint at sample 32"):
        run(gone)


def test_of_several_runs_that_fit_the_user_chooses(tmp_path: Path) -> None:
    for index in "ab":
        folder = tmp_path / "runs" / "demo/vit/moh_50" / f"seed0-{index}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"share": 1.0}')
    torn = tmp_path / "runs" / "demo/vit/moh_50" / "seed0-c"
    torn.mkdir()
    (torn / "run.json").write_text('{"share": 0.5}')
    config = validate(tiny("vit", tmp_path, *EVALUATION))
    with pytest.raises(RunError, match=r"several runs fit.*seed0-a, .*seed0-b$"):
        trained_weights(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights_of=demo/vit/mha"], "mode 'both' must be 'eval'"),
        (["weights_at=128"], "weights_at 128 needs weights_of"),
        (["trainer.keep_at=[100]"], "keep_at 100 is not a multiple of trainer.global_batch 128"),
        (["trainer.keep_at=[128000]"], "up to trainer.samples 46080"),
    ],
)
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(compose_config(["experiment=demo/vit/mha", *overrides]))
