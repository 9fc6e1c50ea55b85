"""Random numbers of a training forward pass that belong to samples, not to a process.

Dropout, stochastic depth and patch dropout draw from a stream. Split over processes or over
micro-batches, equal streams would give all parts the same masks, and different streams would make
a run depend on how it is split. Here each draw is a function of the update, of its place in the
forward pass and of the sample, whatever part of the global batch a process holds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moh.errors import RunError
from moh.heads.draws import combine


class SampleDraws(TorchFunctionMode):
    """Inside it, what PyTorch draws at random for a batch belongs to the samples of the batch.

    A draw is keyed by one number from the global stream, which must be seeded equally for every
    part of an update, and by the number of the sample. Its first dimension is the batch, or the
    batch times a number of rows of each sample (windows); a draw of one row is shared by all
    samples. Draws from a generator of their own are left alone. A recomputed forward pass
    (activation checkpointing, which restores the stream) draws the same again.

    Args:
        first: number of the first sample of the batch in its update.
        count: B, samples of the batch.

    Attributes:
        used: whether anything was drawn.
    """

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.used = self.drawing = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        handler = HANDLERS.get(func)
        if handler is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.drawing = True
        try:
            return handler(self, func, *args, **kwargs)
        finally:
            self.drawing = False

    def uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Numbers in [0, 1) with 24 random bits each, float32.

        Raises:
            RunError: the first dimension is no multiple of the batch.
        """
        self.used = True
        key = torch.randint(2**62, (), device=device)
        rows = shape[0] if shape else 1
        if rows != 1 and rows % self.count:
            raise RunError(
                f"the model draws random numbers of shape {tuple(shape)} for a batch of "
                f"{self.count}: they belong to no sample, and would depend on the device batch"
            )
        row_R = torch.arange(rows, device=device)
        if rows >= self.count:
            row_R = row_R + self.first * (rows // self.count)
        row_R = combine(key, row_R)
        entries = math.prod(shape[1:])
        if entries == 1:
            bits = row_R
        else:
            bits = combine(row_R.unsqueeze(-1), torch.arange(entries, device=device))
        return ((bits & 0xFFFFFF).float() * 2.0**-24).view(shape)

    def normal(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Standard normal numbers by the Box-Muller transform, float32."""
        radius = (-2 * torch.log1p(-self.uniform(shape, device))).sqrt()
        return radius * torch.cos(2 * math.pi * self.uniform(shape, device))

    def keep(self, x: Tensor, shape: torch.Size, p: float) -> Tensor:
        """What dropout multiplies with: 0 with probability p, else ``1 / (1 - p)``."""
        kept = (self.uniform(shape, x.device) >= p).to(x.dtype)
        return kept.div_(1 - p) if p < 1 else kept


def backward(loss: Tensor) -> None:
    """``loss.backward()`` that leaves :class:`SampleDraws` on: a recomputed forward pass draws too.

    PyTorch's own functions for it switch the mode off, since it could override them.
    """
    seed = torch.ones_like(loss)
    _engine_run_backward(
        (loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _dropout(
    draws: SampleDraws,
    func: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Dropout of entries, or of whole channels for the functions that drop these."""
    if not training or p == 0:
        return input
    entries = func in (F.dropout, torch.dropout)
    shape = input.shape if entries else torch.Size((*input.shape[:2], *[1] * (input.dim() - 2)))
    kept = draws.keep(input, shape, p)
    return input.mul_(kept) if inplace else input * kept


def _attention(
    draws: SampleDraws,
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose weights are dropped; the fused kernels draw masks of their own."""
    if dropout_p == 0:
        settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask=attn_mask, **settings)
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    weights = scores.softmax(dim=-1)
    return (weights * draws.keep(weights, weights.shape, dropout_p)) @ value


def _bernoulli_in_place(
    draws: SampleDraws, func: Callable[..., Tensor], x: Tensor, p: float | Tensor = 0.5
) -> Tensor:
    return x.copy_(draws.uniform(x.shape, x.device) < p)


def _bernoulli(draws: SampleDraws, func: Callable[..., Tensor], input: Tensor) -> Tensor:
    return (draws.uniform(input.shape, input.device) < input).to(input.dtype)


def _uniform_in_place(
    draws: SampleDraws, func: Callable[..., Tensor], x: Tensor, low: float = 0, high: float = 1
) -> Tensor:
    return x.copy_(low + (high - low) * draws.uniform(x.shape, x.device))


def _normal_in_place(
    draws: SampleDraws, func: Callable[..., Tensor], x: Tensor, mean: float = 0, std: float = 1
) -> Tensor:
    return x.copy_(mean + std * draws.normal(x.shape, x.device))


def _like(draws: SampleDraws, func: Callable[..., Tensor], input: Tensor, **kwargs: Any) -> Tensor:
    empty = torch.empty_like(input, **kwargs)
    source = draws.uniform if func is torch.rand_like else draws.normal
    return empty.copy_(source(empty.shape, empty.device))


def _sized(draws: SampleDraws, func: Callable[..., Tensor], *size: Any, **kwargs: Any) -> Tensor:
    empty = torch.empty(*size, **kwargs)
    source = draws.uniform if func is torch.rand else draws.normal
    return empty.copy_(source(empty.shape, empty.device))


HANDLERS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _dropout,
    F.dropout2d: _dropout,
    F.dropout3d: _dropout,
    F.scaled_dot_product_attention: _attention,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_in_place,
    torch.Tensor.uniform_: _uniform_in_place,
    torch.Tensor.normal_: _normal_in_place,
    torch.rand: _sized,
    torch.randn: _sized,
    torch.rand_like: _like,
    torch.randn_like: _like,
}


class OtherDraws(TorchDispatchMode):
    """Finds what a forward pass draws from the global stream beside :class:`SampleDraws`.

    PyTorch tags every operator that reads a random stream.

    Attributes:
        found: the operators, each with the class of the module that called it.
    """

    def __init__(self, draws: SampleDraws) -> None:
        super().__init__()
        self.draws = draws
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and not self.draws.drawing:
            named = {argument.name: argument for argument in func._schema.arguments}
            values = dict(zip(named, args, strict=False)) | kwargs
            # Fused attention is tagged for the dropout that it can have.
            idle = "dropout_p" in named and not values.get("dropout_p", 0.0)
            if not idle and values.get("generator") is None:
                self.found.append(f"{func.name()} in {_calling_module()}")
        return func(*args, **kwargs)


def _calling_module() -> str:
    """Class of the innermost module whose forward pass is running."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return "a function"
