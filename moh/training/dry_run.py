"""What a run would cost, before anybody pays for it: built on the meta device, nothing trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from moh.backbones.build import build_model, without_pretrained
from moh.config import Config, GenerationConfig, TextConfig
from moh.evaluation.cost import describe_model, example_inputs, flops_of_sample
from moh.training.parallel import recompute_activations

BYTES_FP32 = 4
GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """Size and cost of one run.

    Attributes:
        parameters: of the model, routers included.
        activated_ratio: active heads over all heads.
        updates, samples: of the whole training.
        tokens: trained, None where samples are images.
        flops: of training, floating-point operations of the model with all heads computed,
            forward and backward, nothing recomputed.
        state_gib: weights, gradients, AdamW's moments and averaged weights on one device.
        activations_gib: what the backward pass of one device batch keeps; an estimate.
        device_batch: samples of one process at a time.
        processes: in all.
        accumulation: micro-batches of an update.
        gpu_hours: at the utilisation that the configuration names.
    """

    name: str
    parameters: int
    activated_ratio: float
    updates: int
    samples: int
    tokens: int | None
    flops: float
    state_gib: float
    activations_gib: float
    device_batch: int
    processes: int
    accumulation: int
    gpu_hours: float


def forecast(config: Config) -> Forecast:
    """Work out what a run takes.

    Raises:
        ValueError: a model or plan that cannot be built.
    """
    trainer, launcher = config.trainer, config.launcher
    processes = launcher.processes * launcher.nodes
    device_batch = trainer.device_batch or max(1, trainer.global_batch // processes)
    text = isinstance(config.data, TextConfig)
    seq_len = config.data.seq_len if text else None
    sizes = describe_model(config.model, config.heads, seq_len)
    flops = flops_of_sample(sizes, seq_len) * trainer.samples
    copies = 4 + (trainer.ema_decay is not None)
    shards = processes if trainer.parallel == "fsdp" else 1
    return Forecast(
        name=config.name,
        parameters=sizes.parameters,
        activated_ratio=sizes.activated_ratio,
        updates=trainer.samples // trainer.global_batch,
        samples=trainer.samples,
        tokens=trainer.samples * seq_len if seq_len else None,
        flops=flops,
        state_gib=copies * BYTES_FP32 * sizes.parameters / shards / GIB,
        activations_gib=device_batch * _kept_bytes(config, seq_len) / GIB,
        device_batch=device_batch,
        processes=processes,
        accumulation=trainer.global_batch // (device_batch * processes),
        gpu_hours=flops / (launcher.peak_tflops * 1e12 * launcher.utilisation) / 3600,
    )


def _kept_bytes(config: Config, seq_len: int | None) -> float:
    """Bytes that autograd keeps between the passes for one sample."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = build_model(without_pretrained(config.model), config.heads).train()
        inputs, options = example_inputs(config.model, seq_len)
    if config.trainer.activation_checkpointing:
        recompute_activations(model)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(*inputs, **options)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    # Under half precision most of what is kept is half as wide.
    return total / (1 if config.trainer.precision == "fp32" else 2)


def show(forecasts: list[Forecast], config: Config, console: Console) -> None:
    """Print forecasts, a row each."""
    launcher = config.launcher
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    headers = ("parameters", "active", "updates", "samples", "tokens", "FLOPs", "state", "act.")
    for header in (*headers, "batch", "GPU-hours"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in forecasts:
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            f"{100 * row.activated_ratio:.1f} %",
            f"{row.updates:,}",
            f"{row.samples:,}",
            "" if row.tokens is None else _tokens(row.tokens),
            f"{row.flops:.2e}",
            f"{row.state_gib:.1f} GiB",
            f"{row.activations_gib:.1f} GiB",
            f"{row.device_batch} x {row.processes} x {row.accumulation}",
            f"{row.gpu_hours:,.0f}" if row.gpu_hours >= 10 else f"{row.gpu_hours:.2g}",
        )
    console.width = max(console.width, 160)
    console.print(table)
    console.print(
        f"\nstate: weights, gradients, AdamW moments{_averages(config)} on one device; act.: what "
        "the backward pass keeps, an estimate;\nbatch: device batch x processes x accumulation; "
        f"GPU-hours at {launcher.utilisation:.0%} of {launcher.peak_tflops:g} TFLOP/s "
        "(launcher.utilisation, launcher.peak_tflops);\nFLOPs of the model with all heads "
        "computed, without recomputation"
        + (" and without the image encoder" if isinstance(config.task, GenerationConfig) else ""),
        style="dim",
    )


def _tokens(count: int) -> str:
    return f"{count / 1e9:.1f} G" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _averages(config: Config) -> str:
    return ", averaged weights" if config.trainer.ema_decay is not None else ""
