"""A model over the processes of a run: replicated (DDP) or sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moh import distribution
from moh.backbones.convert import attention_layers, converted_layers
from moh.config import TrainerConfig
from moh.errors import RunError
from moh.heads import Router

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wrap(model: nn.Module, ema: nn.Module | None, trainer: TrainerConfig) -> nn.Module:
    """Compile a model and spread it, as the configuration asks; sharding happens in place.

    Args:
        model: on this process's device, equal on all of them.
        ema: its averaged copy, sharded like it.

    Returns:
        What to call in place of ``model``. The gradients that it leaves are means over the
        processes.
    """
    if trainer.compile:
        import torch._inductor.config

        # Compiled code draws the random numbers that it would draw uncompiled.
        torch._inductor.config.fallback_random = True
    if trainer.parallel == "fsdp":
        _shard(model, trainer, compiled=trainer.compile)
        if ema is not None:
            _shard(ema, trainer, compiled=False)
        return model
    if distribution.world_size() > 1:
        model = DistributedDataParallel(
            model,
            device_ids=None if _device(model).type == "cpu" else [_device(model)],
            # Constants, and statistics of batch norm, which are averaged when they are saved.
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
    return cast(nn.Module, torch.compile(model)) if trainer.compile else model


def without_sync(run_model: nn.Module, wanted: bool) -> AbstractContextManager[object]:
    """A forward and backward pass whose gradients stay with their process, if ``wanted``."""
    if isinstance(run_model, FSDPModule):
        run_model.set_requires_gradient_sync(not wanted)
        return nullcontext()
    inner = getattr(run_model, "_orig_mod", run_model)
    if wanted and isinstance(inner, DistributedDataParallel):
        return cast(AbstractContextManager[object], inner.no_sync())
    return nullcontext()


def gathered(model: nn.Module, empty: nn.Module) -> nn.Module:
    """A sharded model's weights in an ordinary one, on every process.

    Args:
        model: sharded.
        empty: the same architecture, not sharded, on its device; its weights are overwritten.
    """
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    # Only the main process was given the whole state.
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, state, options=everywhere)
    return empty


def recompute_activations(model: nn.Module) -> None:
    """Switch activation checkpointing on, each library's own way; none of them reentrant.

    Raises:
        RunError: the model has no such switch.
    """
    # transformers, diffusers, timm
    for name in (
        "activation_checkpointing_enable",
        "enable_gradient_checkpointing",
        "set_grad_checkpointing",
    ):
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise RunError(
        f"{type(model).__name__} cannot recompute: trainer.activation_checkpointing=false"
    )


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer blocks: members of a list of modules that hold one attention layer each."""
    names = [name for name, *_ in (*attention_layers(model), *converted_layers(model))]
    for list_name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        for child_name, child in container.named_children():
            prefix = f"{list_name}.{child_name}." if list_name else f"{child_name}."
            if sum(name.startswith(prefix) for name in names) == 1:
                yield child


def _shard(model: nn.Module, trainer: TrainerConfig, compiled: bool) -> None:
    """FSDP2 block by block. Half precision computes in it, sums gradients in float32."""
    half = HALF.get(trainer.precision)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in list(blocks(model)):
        for router in [part for part in block.modules() if isinstance(part, Router)]:
            # Routing stays in float32 whatever the rest computes in.
            if next(router.parameters(), None) is not None:
                fully_shard(router, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        if compiled:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
