"""Exponential moving average of a model's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class ModelAverage(AveragedModel):
    """torch's ``AveragedModel``, updated from lists of tensors that are collected once.

    Its own update walks through all modules at every step, which takes 5 % of a step of a small
    model. As there, parameters are averaged and buffers (statistics of batch norm) copied.

    Args:
        model: to average; FSDP may shard it and ``self.module`` before the first update.
        decay: of the average, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        average = get_ema_multi_avg_fn(decay)
        super().__init__(model, multi_avg_fn=average)
        self._average = average
        # Averaged parameters, parameters, averaged buffers, buffers.
        self._lists: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average the model's present weights in."""
        if self._lists is None:
            super().update_parameters(model)
            self._lists = (
                list(self.module.parameters()),
                list(model.parameters()),
                list(self.module.buffers()),
                list(model.buffers()),
            )
            return
        averaged, parameters, averaged_buffers, buffers = self._lists
        self._average(averaged, parameters, self.n_averaged)
        if buffers:
            torch._foreach_copy_(averaged_buffers, buffers)
        self.n_averaged += 1

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Take over the model's buffers without an update."""
        for averaged, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            averaged.copy_(buffer)
