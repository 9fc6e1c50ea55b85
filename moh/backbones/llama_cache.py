"""Cached keys and values with room to grow: a step of generation writes its own rows alone.

transformers' growing cache makes all its keys and values anew for each token, which costs several
times what attention to them costs, and as much whether a head is active or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Room for this share of the rows, and for these at least. What is moved to larger memory comes to
# eight rows for each new one, however long the cache is.
SHARE, LEAST = 1 / 8, 64


class _Room:
    """Memory of one tensor (B, G, M, K) that grows in M.

    Rows are only ever written behind the last one in use, so that a view handed out before keeps
    its contents.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._used = 0

    def append(self, held: Tensor, rows: Tensor) -> Tensor:
        """``held`` and ``rows`` behind it, (B, G, M + N, K): in place where ``held`` is in here."""
        length = held.shape[-2] if held.numel() else 0
        total, memory = length + rows.shape[-2], self._memory
        if memory is None or not self.ends_with(held) or total > memory.shape[-2]:
            self._memory = memory = None  # freed before as much is taken again
            spare = max(LEAST, int(SHARE * total))
            memory = rows.new_empty((*rows.shape[:-2], total + spare, rows.shape[-1]))
            if length:
                memory[..., :length, :] = held
            self._memory = memory
        memory[..., length:total, :] = rows
        self._used = total
        return memory[..., :total, :]

    def ends_with(self, held: Tensor) -> bool:
        """True if ``held`` is all that is in use of the memory, which may be written now."""
        memory = self._memory
        return (
            memory is not None
            and held.dim() == memory.dim()
            and held.shape[-2] == self._used
            and held.data_ptr() == memory.data_ptr()
            and held.stride() == memory.stride()
            and held.shape[:-2] == memory.shape[:-2]
            and held.shape[-1] == memory.shape[-1]
            and (torch.is_inference_mode_enabled() or not memory.is_inference())
        )

    def crop(self, length: int) -> None:
        """Use the first rows alone."""
        self._used = length


class RoomyLayer(DynamicLayer):
    """transformers' growing layer of a cache, in memory with room for more rows.

    With gradients, whose graph holds the tensors handed out, and while a graph is compiled it does
    what the library's does.
    """

    keys: Tensor
    values: Tensor
    _rooms: tuple[_Room, _Room] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put keys and values (B, G, N, K) behind the cached ones; all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pairs = ((self.keys, key_states), (self.values, value_states))
        alike = all(x.dtype == new.dtype and x.device == new.device for x, new in pairs)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not alike:
            self._rooms = None
            grown: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return grown
        if self._rooms is None:
            self._rooms = _Room(), _Room()
        keys, values = self._rooms
        self.keys = keys.append(self.keys, key_states)
        self.values = values.append(self.values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; ``tokens_to_remove`` is their number, negative."""
        whole = self._rooms is not None and all(
            room.ends_with(x) for room, x in zip(self._rooms, (self.keys, self.values), strict=True)
        )
        super().crop(tokens_to_remove)
        if whole and self._rooms is not None:
            for room in self._rooms:
                room.crop(self.keys.shape[-2])

    def reset(self) -> None:
        """Forget everything."""
        self._rooms = None
        super().reset()


def make_room(cache: Any, layer_idx: int) -> None:
    """Let a layer of transformers' growing cache reserve memory; others are left as they are.

    Also one in use. A cache that is offloaded moves its tensors and is left alone too.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading or torch.compiler.is_compiling():
        return
    if layer_idx >= len(cache.layers):
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = RoomyLayer
    elif type(cache.layers[layer_idx]) is DynamicLayer:
        cache.layers[layer_idx].__class__ = RoomyLayer
