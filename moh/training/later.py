"""Between host and device, with neither waiting for the other."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """A copy on its way to the host: reading it waits for what came before it, and no more.

    Read an update late, it costs nothing: the device has the next update in its queue already.

    Args:
        values: of any device; a few numbers.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values.detach().cpu()

    def read(self) -> list[float]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device; a GPU takes them from pinned memory when it comes to them."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
