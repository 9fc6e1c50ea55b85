"""One block of a model computed in the place of all blocks that are equal to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, tuple, list, type(None))
# What differs between equal blocks, and costs nothing in an evaluation: stochastic depth and the
# place of a layer's keys and values in a cache.
_OWN = ("drop_prob", "layer_idx")


@dataclass
class _First:
    """The block that stands for those equal to it, and the shape that it keeps."""

    name: str
    shape: Any = None


def pass_equal_blocks(model: nn.Module) -> dict[str, str]:
    """Make the forward pass of a model leave out blocks that an equal one has stood for.

    Blocks are the members of a list or a sequence of modules; equal ones have the same parts with
    the same settings and shapes. A block is left out, its input handed on, where the equal one
    before it had an input of the same shape and gave an output of that shape. So the values of the
    model are lost and every shape is kept.

    Returns:
        Name of a block that was left out -> name of the one that stood for it, filled by the
        forward pass.
    """
    stands_for: dict[str, str] = {}
    within: tuple[str, ...] = ()
    for parent, members in list(model.named_modules()):
        if not isinstance(members, nn.ModuleList | nn.Sequential) or parent.startswith(within):
            continue
        firsts: dict[str, _First] = {}
        for child, block in members.named_children():
            name = f"{parent}.{child}" if parent else child
            within = (*within, f"{name}.")
            key = _description(block)
            if key in firsts:
                block.forward = _repeated(block.forward, firsts[key], name, stands_for)
            else:
                firsts[key] = _First(name)
                block.forward = _watched(block.forward, firsts[key])
    return stands_for


def _watched(forward: Callable[..., Any], first: _First) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = forward(x, *args, **kwargs)
        first.shape = x.shape if isinstance(y, Tensor) and y.shape == x.shape else None
        return y

    return run


def _repeated(
    forward: Callable[..., Any], first: _First, name: str, stands_for: dict[str, str]
) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.shape != x.shape:
            return forward(x, *args, **kwargs)
        stands_for[name] = first.name
        return x

    return run


def _description(block: nn.Module) -> str:
    """Types, settings and shapes of a block and of all that is in it."""
    parts = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN) and key not in _OWN
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, tuple(tensor.shape)) for key, tensor in tensors]
        parts.append((name, type(module), settings, shapes))
    return repr(parts)
