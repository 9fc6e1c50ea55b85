"""DropPath whose draws do not depend on how a micro-batch is spread over processes."""

from __future__ import annotations

from timm.layers import DropPath
from torch import Tensor, nn

from moh import distribution


class SharedDropPath(DropPath):
    """timm's DropPath, drawn for the whole micro-batch and cut to this process's part.

    Every process draws the same numbers, those that one process alone would draw; without this
    all processes would drop the same samples of their parts.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep, own = 1 - self.drop_prob, x.shape[0]
        shape = (own * distribution.world_size(), *[1] * (x.ndim - 1))
        kept = x.new_empty(shape).bernoulli_(keep).narrow(0, distribution.rank() * own, own)
        if keep > 0.0 and self.scale_by_keep:
            kept.div_(keep)
        return x * kept


def draw_for_all_processes(model: nn.Module) -> None:
    """Make every DropPath of a model a :class:`SharedDropPath`, in place."""
    for module in model.modules():
        if type(module) is DropPath:
            module.__class__ = SharedDropPath
