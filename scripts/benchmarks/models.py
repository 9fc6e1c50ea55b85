"""Contenders for whole models: inference, and a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import moh
from benchmarks.attention import EXECUTIONS
from benchmarks.reference import make_plain
from benchmarks.shape import DTYPES
from benchmarks.timing import Contender
from moh.backbones.build import build_model, is_mha
from moh.cli import compose_config
from moh.config import Config, DiTConfig, HeadsConfig, LlamaConfig, TextConfig, TimmConfig
from moh.evaluation.cost import describe_model
from moh.validation import validate

BALANCE_COEF = 0.01
# The plain way sums in another order, through every layer of a model.
REFERENCE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class ModelShape:
    """A model of an experiment.

    Attributes:
        experiment: name of an experiment whose heads are MoH.
        batch: images or sequences.
        tokens: of a sequence, for language models; None for the experiment's.
        train: a training step (forward, backward, AdamW) instead of inference.
    """

    experiment: str
    batch: int
    tokens: int | None
    train: bool
    dtype: str
    device: str

    def config(self) -> Config:
        """The experiment's configuration.

        Raises:
            ValueError: an unknown experiment, or one of an MHA baseline.
        """
        config = validate(compose_config([f"experiment={self.experiment}"]), paths=False)
        if is_mha(config.heads):
            raise ValueError(f"experiment {self.experiment} is an MHA baseline: name a MoH one")
        return config


def model_contenders(shape: ModelShape) -> tuple[dict[str, Contender], float]:
    """The contenders, and the least possible ratio of MoH to MHA in multiply-accumulates."""
    config = shape.config()
    tokens = shape.tokens
    if tokens is None and isinstance(config.data, TextConfig):
        tokens = config.data.seq_len
    cost = describe_model(config.model, config.heads, tokens)
    baseline = build_model(config.model, HeadsConfig()).to(shape.device)
    converted = build_model(config.model, config.heads).to(shape.device)
    models = {"mha": baseline}
    for execution in EXECUTIONS:
        models[execution] = _twin(converted)
        moh.set_execution(models[execution], execution)  # type: ignore[arg-type]
    models["reference"] = make_plain(_twin(converted))
    inputs = _inputs(config.model, shape.batch, tokens, shape.device)
    _check_equal(models, inputs)
    optimizers = (
        {
            name: torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
            for name, model in (("mha", baseline), ("moh", converted))
        }
        if shape.train
        else {}
    )

    def autocast() -> AbstractContextManager[object]:
        if shape.dtype == "fp32":
            return nullcontext()
        return torch.autocast(shape.device, dtype=DTYPES[shape.dtype])

    def infer(model: nn.Module) -> Contender:
        model.eval()

        def run() -> None:
            with torch.no_grad(), autocast():
                inputs(model)

        return run

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contender:
        model.train()

        def run() -> None:
            with autocast():
                loss = inputs(model).float().square().mean()
            balance = moh.balance_loss(model)
            if balance is not None:
                loss = loss + BALANCE_COEF * balance
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    found = {}
    for name, model in models.items():
        optimizer = optimizers.get("mha" if name == "mha" else "moh")
        found[name] = infer(model) if optimizer is None else step(model, optimizer)
    return found, cost.sparse_macs / cost.mha_macs


def _twin(model: nn.Module) -> nn.Module:
    """Other modules with the same parameters."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def _inputs(
    model: Any, batch: int, tokens: int | None, device: str
) -> Callable[[nn.Module], Tensor]:
    """Calls a model on random inputs of its kind."""
    torch.manual_seed(0)
    if isinstance(model, TimmConfig):
        images = torch.randn(batch, model.in_chans, model.img_size, model.img_size, device=device)
        return lambda built: built(images)
    if isinstance(model, DiTConfig):
        size = (batch, model.in_channels, model.input_size, model.input_size)
        noised = torch.randn(size, device=device)
        times = torch.randint(0, 1000, (batch,), device=device)
        labels = torch.randint(0, model.num_classes, (batch,), device=device)
        return lambda built: built(noised, times, labels)
    assert isinstance(model, LlamaConfig)
    ids = torch.randint(0, model.vocab_size, (batch, tokens or 1), device=device)
    return lambda built: built(ids, use_cache=False).logits


def _check_equal(models: dict[str, nn.Module], inputs: Callable[[nn.Module], Tensor]) -> None:
    """What is timed must compute the same thing."""
    with torch.no_grad():
        outputs = {name: inputs(model.eval()) for name, model in models.items() if name != "mha"}
    scale = outputs["dense"].abs().max().clamp_min(1e-6)
    for name, output in outputs.items():
        error = float((output - outputs["dense"]).abs().max() / scale)
        if error > REFERENCE_TOLERANCE:
            raise AssertionError(f"{name} differs from dense by {error:.2g} of the largest output")
