"""A run from command to record: exact resumption, honest failure, complete records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import folder_of, tiny, weights
from torch import nn

from moh.errors import RunError, StoppedError
from moh.heads import TwoStageRouter
from moh.runner import finished, locked, progress_of, run, run_id
from moh.tasks.classification import Classification
from moh.training import checkpoint
from moh.training.loop import Trainer


class StopError(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("family", ["vit", "dit", "llm"])
def test_a_stopped_run_goes_on_bit_for_bit(family, tmp_path, monkeypatch):
    whole = tiny(family, tmp_path / "a", "trainer.checkpoint_every=16")
    run(whole)

    stopped = tiny(family, tmp_path / "b", "trainer.checkpoint_every=16")
    update, calls = Trainer._update, []

    def stopping(self, logged, stop):
        calls.append(self.samples)
        if len(calls) == 3:
            raise StopError
        return update(self, logged, stop)

    monkeypatch.setattr(Trainer, "_update", stopping)
    with pytest.raises(StopError):
        run(stopped)
    assert not finished(folder_of(stopped))
    run(stopped)
    assert calls == [0, 16, 32, 32, 48]

    first, second = weights(whole), weights(stopped)
    assert first.keys() == second.keys()
    assert len(first) > 20
    assert all(torch.equal(first[key], second[key]) for key in first)
    scores = [
        json.loads((folder_of(c) / "metrics.json").read_text())["metrics"] for c in (whole, stopped)
    ]
    assert scores[0] == scores[1]
    curves = [
        [
            json.loads(line) | {"samples_per_second": 0}
            for line in (folder_of(c) / "curves.jsonl").read_text().splitlines()
        ]
        for c in (whole, stopped)
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("family", ["vit", "dit", "llm"])
def test_accumulation_changes_rounding_alone(family, tmp_path):
    losses = []
    for device_batch in (16, 4):
        config = tiny(
            family,
            tmp_path / str(device_batch),
            f"trainer.device_batch={device_batch}",
            "mode=train",
        )
        run(config)
        curve = (folder_of(config) / "curves.jsonl").read_text()
        rows = [json.loads(row) for row in curve.splitlines()]
        names = ("task_loss", "balance_loss", "loss", "grad_norm")
        loads = [torch.tensor(row[key]) for row in rows for key in row if "head_load" in key]
        losses.append([torch.tensor([row[name] for row in rows for name in names]), *loads])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["vit", "dit", "llm"])
def test_activation_checkpointing_recomputes_and_changes_nothing(family, tmp_path, monkeypatch):
    calls: list[int] = []
    forward = TwoStageRouter.forward

    def counted(self, *inputs):
        if torch.is_grad_enabled():  # not in the pass that looks for random numbers
            calls.append(1)
        return forward(self, *inputs)

    monkeypatch.setattr(TwoStageRouter, "forward", counted)
    losses, forwards = [], []
    for on in ("false", "true"):
        calls.clear()
        switch = f"trainer.activation_checkpointing={on}"
        config = tiny(family, tmp_path / on, switch, "mode=train")
        run(config)
        forwards.append(len(calls))
        rows = (folder_of(config) / "curves.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert forwards[1] == 2 * forwards[0] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_finished_run_is_skipped_and_another_config_is_another_run(tmp_path, capsys):
    config = tiny("vit", tmp_path)
    run(config)
    before = (folder_of(config) / "run.json").read_text()
    run(config)
    assert "finished before, skipped" in capsys.readouterr().out
    assert (folder_of(config) / "run.json").read_text() == before
    other = tiny("vit", tmp_path, "optim.lr=0.001")
    assert folder_of(other) != folder_of(config)


def test_the_record_says_what_was_run(tmp_path):
    config = tiny("vit", tmp_path)
    run(config)
    target = Path(config.results_dir) / "runs" / run_id(config)
    record = json.loads((target / "run.json").read_text())
    assert record["status"] == "finished"
    assert (record["samples"], record["share"], record["seed"]) == (64, 1.0, 0)
    assert record["protocol"] == "demo"
    assert record["activated_ratio"] == 0.5
    assert len(record["head_plan"]) == 2
    assert record["versions"]["torch"] == torch.__version__
    assert record["hardware"]["threads"] == torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    assert record["hardware"]["cpu_kind"].split(", ")[-1] == capability
    assert len(record["data"]["sha256"]) == 64
    assert record["seconds"]["train"] > 0
    metrics = json.loads((target / "metrics.json").read_text())["metrics"]
    assert metrics["top1"]["n"] == 2000
    assert "2000 test images" in metrics["top1"]["protocol"]
    load = json.loads((target / "head_load.json").read_text())
    assert len(load["groups"]) == 10
    for top_k, heads in zip(load["top_k"], load["overall"], strict=True):
        assert sum(heads) == pytest.approx(top_k, abs=1e-3)
    assert not (target / "checkpoints").exists()


def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    config = tiny("vit", tmp_path, "trainer.checkpoint_every=16", "mode=train")
    run(config)
    kept = sorted((folder_of(config) / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["0000000000048", "0000000000064"]
    victim = next(kept[1].glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-100])
    run(config)
    assert "not whole" in capsys.readouterr().out
    assert checkpoint.whole(folder_of(config) / "checkpoints" / "0000000000064")


def test_a_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    config = tiny("vit", tmp_path, "trainer.checkpoint_every=16")
    loss = Classification.loss

    def poisoned(self, model, batch, random):
        value, count = loss(self, model, batch, random)
        if value.requires_grad:
            seen.append(count)
        return (value * float("nan") if len(seen) > 2 else value), count

    seen: list[int] = []
    monkeypatch.setattr(Classification, "loss", poisoned)
    with pytest.raises(RunError, match=r"not finite at step 2 \(sample 32\); last good.*0032"):
        run(config)
    assert checkpoint.newest(folder_of(config) / "checkpoints").name == "0000000000032"
    assert json.loads((folder_of(config) / "run.json").read_text())["status"] == "partial"
    assert not (folder_of(config) / "metrics.json").exists()


def test_an_outcome_that_is_read_late_stops_the_run_before_anything_is_saved(tmp_path, monkeypatch):
    """As on a GPU, where the host looks at an update while the next one is computed."""
    start = Trainer.__init__

    def late(self, *args):
        start(self, *args)
        self.reads_late = True

    monkeypatch.setattr(Trainer, "__init__", late)
    settings = ("trainer.log_every=8", "trainer.samples=128", "mode=train")
    config = tiny("vit", tmp_path / "a", *settings, "trainer.checkpoint_every=32")
    loss, seen = Classification.loss, []

    def poisoned(self, model, batch, random):
        value, count = loss(self, model, batch, random)
        if value.requires_grad:
            seen.append(count)
        return (value * float("nan") if len(seen) == 4 else value), count

    monkeypatch.setattr(Classification, "loss", poisoned)
    with pytest.raises(RunError, match=r"not finite at step 3 \(sample 48\); last good.*0032"):
        run(config)
    assert checkpoint.newest(folder_of(config) / "checkpoints").name == "0000000000032"
    monkeypatch.setattr(Classification, "loss", loss)
    monkeypatch.setattr(Trainer, "__init__", start)
    run(config)
    plain = tiny("vit", tmp_path / "b", *settings)
    run(plain)
    first, second = weights(config), weights(plain)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_second_run_in_one_folder_refuses(tmp_path):
    config = tiny("vit", tmp_path)
    folder = folder_of(config)
    folder.mkdir(parents=True)
    with locked(folder), pytest.raises(RunError, match="in use by another process"):
        run(config)


def test_ctrl_c_in_an_evaluation_names_the_run_and_leaves_it_to_go_on(tmp_path, monkeypatch):
    config = tiny("vit", tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Classification, "evaluate", interrupted)
        with pytest.raises(StoppedError, match=f"{run_id(config)}: stopped by SIGINT") as caught:
            run(config)
    assert "\n" not in str(caught.value)
    assert progress_of(config) == "100% trained"
    run(config)
    assert finished(folder_of(config))
    assert progress_of(config) == "finished"
    shutil.rmtree(tmp_path / "runs")
    assert progress_of(config).startswith("not started; recorded in ")


def test_a_results_folder_that_cannot_be_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    config = tiny("vit", tmp_path, f"results_dir={tmp_path}/file/results")
    with pytest.raises(RunError, match=r"cannot write to .*file is a file"):
        run(config)
    with pytest.raises(RunError, match="cannot write to /proc/moh/results: No such file"):
        run(tiny("vit", tmp_path, "results_dir=/proc/moh/results"))
    assert not folder_of(config).exists()


def test_broken_data_are_one_line(tmp_path):
    broken = tmp_path / "images.npz"
    broken.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(RunError, match="not an image set"):
        run(tiny("vit", tmp_path, f"data.root={broken}"))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["cache"]
    assert not (tmp_path / "results").exists()


def test_eval_needs_and_takes_a_checkpoint(tmp_path):
    config = tiny("vit", tmp_path)
    with pytest.raises(RunError, match="has no checkpoint; train first"):
        run(tiny("vit", tmp_path, "mode=eval"))
    run(config)
    folder = folder_of(config)
    again = tiny("vit", tmp_path / "other", "mode=eval", f"checkpoint={folder}")
    run(again)
    scores = [json.loads((folder_of(c) / "metrics.json").read_text()) for c in (config, again)]
    assert scores[0] == scores[1]


def test_a_checkpoint_of_other_heads_is_refused(tmp_path):
    config = tiny("vit", tmp_path)
    run(config)
    other = tiny(
        "vit", tmp_path, "heads.ratio=0.75", "mode=eval", f"checkpoint={folder_of(config)}"
    )
    with pytest.raises(RunError, match=r"does not fit this model: it has other heads"):
        run(other)


def test_a_published_file_loads_and_a_pickle_with_code_is_refused(tmp_path):
    from moh.backbones.build import build_model
    from moh.backbones.published.vit import to_published
    from moh.validation import validate

    config = tiny("vit", tmp_path, "mode=eval")
    typed = validate(config)
    model = build_model(typed.model, typed.heads, seed=5)
    good = tmp_path / "good.pth"
    torch.save({"model": to_published(model.state_dict())}, good)
    run(tiny("vit", tmp_path, "mode=eval", f"checkpoint={good}"))

    state = to_published(model.state_dict())
    state["extra.weight"] = state.pop("head.bias")
    torch.save({"model": state}, tmp_path / "other.pth")
    with pytest.raises(RunError, match=r"missing: head\.bias; unexpected: extra\.weight"):
        run(tiny("vit", tmp_path, "mode=eval", f"checkpoint={tmp_path}/other.pth"))

    torch.save({"model": {}, "hook": nn.Linear(1, 1)}, tmp_path / "code.pth")
    with pytest.raises(RunError, match="refused: it holds more than tensors"):
        run(tiny("vit", tmp_path, "mode=eval", f"checkpoint={tmp_path}/code.pth"))


@pytest.mark.parametrize("family", ["vit", "dit"])
def test_the_wandb_folder_holds_config_curves_scores_and_images(family, tmp_path):
    from wandb.proto import wandb_internal_pb2

    config = tiny(family, tmp_path, "logger.wandb=offline")
    run(config)
    record = json.loads((folder_of(config) / "run.json").read_text())
    folder = next((folder_of(config) / "wandb").glob("offline-run-*"))
    assert record["wandb"]["id"] in folder.name
    configs, history, summary, files = {}, [], {}, []
    for data in _wandb_records(next(folder.glob("*.wandb"))):
        item = wandb_internal_pb2.Record()
        item.ParseFromString(data)
        kind = item.WhichOneof("record_type")
        if kind == "run":
            configs |= {u.key: json.loads(u.value_json) for u in item.run.config.update}
        elif kind == "history":
            history.append({_key(i): json.loads(i.value_json) for i in item.history.item})
        elif kind == "summary":
            summary |= {_key(u): json.loads(u.value_json) for u in item.summary.update}
        elif kind == "files":
            files += [f.path for f in item.files.files]
    assert configs["heads"]["ratio"] == 0.5
    assert configs["optim"]["lr"] == config.optim.lr
    losses = [row["train/task_loss"] for row in history if "train/task_loss" in row]
    curve = (folder_of(config) / "curves.jsonl").read_text().splitlines()
    assert losses == [json.loads(row)["task_loss"] for row in curve]
    assert any(key.startswith("head_load/") for row in history for key in row)
    metrics = json.loads((folder_of(config) / "metrics.json").read_text())["metrics"]
    for name, metric in metrics.items():
        assert summary[name] == pytest.approx(metric["value"])
    if family == "dit":
        assert list((folder / "files" / "media" / "images").glob("*.png"))
    shutil.rmtree(folder)


def _key(item) -> str:
    return item.key or ".".join(item.nested_key)


def _wandb_records(path: Path):
    """Records of a ``.wandb`` file: LevelDB's log format, in blocks of 32 KiB."""
    raw = path.read_bytes()
    position, parts = 7, b""  # past the file header
    while position + 7 <= len(raw):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size = int.from_bytes(raw[position + 4 : position + 6], "little")
        kind = raw[position + 6]
        parts += raw[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""
