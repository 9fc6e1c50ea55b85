"""A run gives the same numbers however its global batch is split; what cannot is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from random_models import RANDOM_MODELS, random_run
from test_parallel import frozen, start
from tiny_runs import folder_of, tiny, weights
from torch import nn

from moh import distribution
from moh.errors import RunError
from moh.runner import load_config, run
from moh.tasks.base import Task
from moh.training.averaging import ModelAverage
from moh.training.batch_norm import average_statistics
from moh.training.sample_draws import SampleDraws

LOUD = "logger.progress=true"
LOSSES = ("task_loss", "balance_loss", "loss")


def losses_of(config) -> list[float]:
    """Losses of every update, and the head load."""
    text = (folder_of(config) / "curves.jsonl").read_text()
    found = []
    for row in map(json.loads, text.splitlines()):
        found += [row[name] or 0.0 for name in LOSSES]
        found += [load for key in row if key.startswith("head_load/") for load in row[key]]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Name -> losses of one process that holds the global batch at once."""
    found = {}

    def losses(name: str) -> list[float]:
        if name not in found:
            config = random_run(name, tmp_path_factory.mktemp("whole"))
            run(config)
            found[name] = losses_of(config)
        return found[name]

    return losses


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_the_device_batch_moves_no_loss(name, whole, tmp_path):
    config = random_run(name, tmp_path, "trainer.device_batch=4")
    run(config)
    assert losses_of(config) == pytest.approx(whole(name), abs=1e-6, rel=1e-6)


def start_all(processes: int, folder, more: list):
    """Name -> run of several processes, every other one accumulating too; and ``more`` runs."""
    configs = {}
    for index, name in enumerate(RANDOM_MODELS):
        settings = ["trainer.device_batch=2"] if index % 2 else []
        configs[name] = random_run(name, folder / str(index), *settings)
    for config in [*configs.values(), *more]:
        config.launcher.processes = processes
    start([(frozen(config), False) for config in [*configs.values(), *more]], processes)
    return configs


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Runs of two processes, by name."""
    folder = tmp_path_factory.mktemp("two")
    network = norms(folder, "mode=train")
    return {"batch norm": network, **start_all(2, folder, [network])}


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_two_processes_move_no_loss(name, whole, two_processes):
    assert losses_of(two_processes[name]) == pytest.approx(whole(name), abs=1e-6, rel=1e-6)


@pytest.mark.slow
def test_four_processes_move_no_loss(whole, tmp_path):
    for name, config in start_all(4, tmp_path, []).items():
        assert losses_of(config) == pytest.approx(whole(name), abs=1e-6, rel=1e-6), name


def test_activation_checkpointing_draws_the_same_again(whole, tmp_path):
    name = "stochastic depth"
    recomputed = "trainer.activation_checkpointing=true"
    config = random_run(name, tmp_path, recomputed, "trainer.device_batch=8")
    run(config)
    assert losses_of(config) == pytest.approx(whole(name), abs=1e-6, rel=1e-6)


SOURCES = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "a module": nn.Dropout(0.3),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.4)),
    "rand": lambda x: x + torch.rand(x.shape),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(*x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-2, 2),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1, 3),
    "windows": lambda x: F.dropout(x.reshape(4 * len(x), -1), 0.3).view(x.shape),
    "two draws": lambda x: F.dropout(x, 0.3) + torch.rand_like(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
}


def drawn(source, x, first, count):
    torch.manual_seed(5)
    with SampleDraws(first, count) as draws:
        y = source(x[first : first + count])
    assert draws.used
    return y


@pytest.mark.parametrize("name", SOURCES)
def test_a_part_draws_what_the_whole_draws_for_it(name):
    x = torch.randn(8, 4, 6, 8)
    whole = drawn(SOURCES[name], x, 0, 8)
    parts = [drawn(SOURCES[name], x, first, 2) for first in range(0, 8, 2)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.equal(parts[0] - x[:2], parts[1] - x[2:4])


def test_draws_are_distributed_as_pytorchs():
    torch.manual_seed(0)
    with SampleDraws(0, 64):
        kept = F.dropout(torch.ones(64, 4096), 0.3)
        uniform, normal = torch.rand(64, 4096), torch.randn(64, 4096)
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert (kept == 0).float().mean().item() == pytest.approx(0.3, abs=0.005)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.005)
    assert 0 <= uniform.min() < uniform.max() < 1
    assert (normal.mean().item(), normal.std().item()) == pytest.approx((0, 1), abs=0.01)
    # No sample's mask tells of another's, and no entry's of its neighbour.
    masks = (kept == 0).float() - 0.3
    assert abs((masks[:-1] * masks[1:]).mean().item()) < 0.002
    assert abs((masks[:, :-1] * masks[:, 1:]).mean().item()) < 0.002


def test_attention_without_dropout_keeps_its_kernel():
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with SampleDraws(0, 2) as draws:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    assert not draws.used


class Drawing(nn.Module):
    """Draws from the global stream in a way that belongs to no sample."""

    def forward(self, x):
        return x[:, torch.randperm(x.shape[1])] if self.training else x


@pytest.mark.parametrize(
    "module", [Drawing(), nn.AlphaDropout(0.3), nn.RReLU()], ids=lambda m: type(m).__name__
)
def test_other_random_numbers_are_refused_in_parts_alone(module, tmp_path, monkeypatch):
    from moh.training import loop

    init = loop.Trainer.__init__

    def with_module(self, config, model, *rest):
        model.classifier_hook = module
        model.register_forward_hook(lambda net, _, y: module.train(net.training)(y))
        init(self, config, model, *rest)

    monkeypatch.setattr(loop.Trainer, "__init__", with_module)
    run(tiny("vit", tmp_path / "whole", "mode=train"))
    parts = tiny("vit", tmp_path / "parts", "mode=train", "trainer.device_batch=8")
    with pytest.raises(RunError, match=f"random numbers .* in {type(module).__name__}"):
        run(parts)


def norms(tmp_path, *more: str):
    """A run of a small network with batch norm."""
    model = ("model.name=test_resnet", "model.img_size=28", "trainer.ema_decay=0.5")
    return tiny("timm", tmp_path, *model, *more)


def test_averaged_weights_have_the_present_statistics(tmp_path):
    config = norms(tmp_path, "mode=train")
    run(config)
    state = weights(config)
    statistics = [key for key in state if key.startswith("/model/") and "running" in key]
    assert len(statistics) > 4
    for key in statistics:
        averaged = state[key.replace("/model/", "/ema/module.", 1)]
        assert torch.equal(averaged, state[key]), key
    tracked = [key for key in state if "num_batches_tracked" in key]
    assert {int(state[key]) for key in tracked} == {4}


@pytest.mark.parametrize("network", ["batch norm", "conv", "constant"])
def test_the_average_is_that_of_pytorch(network):
    layers = {
        "batch norm": [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)],
        "conv": [nn.Conv2d(1, 4, 3)],
        "constant": [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)],
    }[network]
    model = nn.Sequential(*layers)
    decay = 0.7
    reference = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    average = ModelAverage(model, decay)
    for _ in range(4):
        model(torch.randn(2, 1, 8, 8))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        reference.update_parameters(model)
        average.update_parameters(model)
    expected = reference.state_dict()
    assert average.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in average.state_dict().items())


def test_batch_norm_depends_on_the_device_batch_alone(tmp_path, two_processes, capfd):
    alone = norms(tmp_path, "mode=train", "trainer.device_batch=8", LOUD)
    run(alone)
    assert "batch norm normalises over 8 samples at a time" in capfd.readouterr().out
    together = two_processes["batch norm"]
    # The same eight samples are normalised together, by one process after the other or by two.
    assert losses_of(together) == pytest.approx(losses_of(alone), rel=1e-5)
    state = weights(together)
    name = next(key for key in state if key.startswith("/model/") and "running_mean" in key)
    assert torch.equal(state[name], state[name.replace("/model/", "/ema/module.", 1)])
    # Eight updates of the running mean in one process, four in two (momentum 0.1).
    expected = weights(alone)[name] * (1 - 0.9**4) / (1 - 0.9**8)
    torch.testing.assert_close(state[name], expected, rtol=0.05, atol=0.01)


def test_statistics_are_averaged_over_processes(monkeypatch):
    norm = nn.BatchNorm1d(2)
    norm.running_mean.copy_(torch.tensor([1.0, 2.0]))
    monkeypatch.setattr(distribution, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op: x.add_(3))
    average_statistics(nn.Sequential(norm))
    assert norm.running_mean.tolist() == [2.0, 2.5]
    assert norm.running_var.tolist() == [2.0, 2.0]


def test_batch_norm_goes_on_with_its_device_batch_alone(tmp_path):
    first = norms(tmp_path, "mode=train", "trainer.device_batch=8")
    run(first)
    other = norms(tmp_path, "mode=train", "trainer.device_batch=4")
    assert folder_of(first) == folder_of(other)
    with pytest.raises(RunError, match=r"go on with trainer\.device_batch=8"):
        run(other)


def test_a_finished_run_is_not_trained_again_on_another_machine(tmp_path, capsys, monkeypatch):
    run(tiny("vit", tmp_path))
    capsys.readouterr()
    monkeypatch.setattr("moh.worker.execute", None)
    for change in ("eval.batch=7", "trainer.device_batch=4", "trainer.threads=1"):
        run(tiny("vit", tmp_path, change))
        assert "finished before, skipped" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_in_smaller_pieces(tmp_path, monkeypatch, capfd):
    from moh.training.loop import Trainer

    more = ("mode=train", "trainer.checkpoint_every=32")
    whole = tiny("vit", tmp_path / "whole", *more)
    run(whole)
    stopped = tiny("vit", tmp_path / "stopped", *more)
    update = Trainer._update

    def failing(self, *how):
        if self.samples == 32:
            raise torch.OutOfMemoryError
        return update(self, *how)

    monkeypatch.setattr(Trainer, "_update", failing)
    with pytest.raises(RunError, match=r"try trainer\.device_batch=8, which goes on"):
        run(stopped)
    monkeypatch.setattr(Trainer, "_update", update)
    smaller = tiny("vit", tmp_path / "stopped", *more, "trainer.device_batch=8", LOUD)
    assert folder_of(smaller) == folder_of(stopped)
    capfd.readouterr()
    run(smaller)
    assert "goes on from sample 32" in capfd.readouterr().out
    assert load_config(folder_of(smaller)).trainer.device_batch == 8
    assert losses_of(smaller) == pytest.approx(losses_of(whole), rel=1e-5)


def test_other_data_are_no_part_of_a_run(tmp_path, monkeypatch):
    run(tiny("vit", tmp_path, "mode=train"))
    from moh.tasks.classification import Classification

    assert issubclass(Classification, Task)
    fingerprint = Classification.fingerprint
    other = lambda self: fingerprint(self) | {"sha256": "0" * 64}  # noqa: E731
    monkeypatch.setattr(Classification, "fingerprint", other)
    with pytest.raises(RunError, match="holds other data than those"):
        run(tiny("vit", tmp_path, "mode=train"))
