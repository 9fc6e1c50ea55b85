"""What a diffusion model is at during sampling: which images, and how noisy they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from moh.data.order import stable_seed
from moh.evaluation.heads import HeadLoad
from moh.heads import combine, set_draws

NOISE_LEVELS = 5  # bins of the timestep by which head load is counted


def level_names(num_train_steps: int) -> list[str]:
    """Each bin by its timesteps, the least noisy first."""
    ends = [level * num_train_steps // NOISE_LEVELS for level in range(NOISE_LEVELS + 1)]
    return [f"t {first}\N{EN DASH}{next_first - 1}" for first, next_first in pairwise(ends)]


def level_of(t_B: Tensor, num_train_steps: int) -> Tensor:
    """Bin of each timestep of the full schedule."""
    ends = [level * num_train_steps // NOISE_LEVELS for level in range(1, NOISE_LEVELS)]
    return torch.bucketize(t_B, torch.tensor(ends), right=True)


class SamplingLoad(HeadLoad):
    """Head load of each image at each noise level while a DiT draws them.

    By image, so that a set which is drawn in several pieces has the whole load.

    Args:
        numbers: of the images, in the order of the batch.
        num_train_steps: timesteps of the full schedule.
    """

    def __init__(self, numbers: Sequence[int], num_train_steps: int) -> None:
        super().__init__([f"{n} {level}" for n in numbers for level in range(NOISE_LEVELS)])
        self.num_train_steps = num_train_steps

    def at(self, t_B: Tensor) -> None:
        """The next forward pass is at these timesteps, one an image."""
        level_B = level_of(t_B, self.num_train_steps)
        self.groups_B = torch.arange(len(t_B)) * NOISE_LEVELS + level_B


def load_of_images(
    model: nn.Module,
    pieces: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    class_names: Sequence[str],
    num_train_steps: int,
) -> dict[str, Any] | None:
    """What several :class:`SamplingLoad` add up to.

    Args:
        pieces: ``counts()`` of each, and the classes (B,) of its images.

    Returns:
        As :meth:`HeadLoad.to_json` by class, with ``axis`` (a name) and ``axis_groups``, like
        ``groups``, by noise level.
    """
    classes, levels = HeadLoad(class_names), HeadLoad(level_names(num_train_steps))
    for load in (classes, levels):
        load.expect(model)
    for counts, labels_B in pieces:
        classes.add(counts, labels_B.repeat_interleave(NOISE_LEVELS))
        levels.add(counts, torch.arange(NOISE_LEVELS).repeat(len(labels_B)))
    data, by_level = classes.to_json(), levels.to_json()
    if data is None or by_level is None:
        return None
    return data | {"axis": "noise level", "axis_groups": by_level["groups"]}


@contextmanager
def sampling_of(
    model: nn.Module, numbers: Sequence[int], seed: int, load: SamplingLoad | None = None
) -> Iterator[None]:
    """Inside, every forward pass of a DiT is a sampling step of these images.

    The random control draws by image number and timestep, and ``load`` counts.
    Guidance may double the batch.

    Args:
        numbers: of the images, in the order of the batch.
        seed: of the run.
    """
    keys_B = combine(stable_seed(seed, "heads", "samples"), torch.tensor(numbers))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        t_B = args[1][: len(numbers)].cpu()
        set_draws(module, combine(keys_B, t_B))
        if load is not None:
            load.at(t_B)

    handle = model.register_forward_pre_hook(before)
    try:
        with load.watch(model) if load is not None else nullcontext():
            yield
    finally:
        handle.remove()
        set_draws(model, None)
