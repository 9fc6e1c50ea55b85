"""Shared set-up: few threads, and no test that reaches for the network."""

from __future__ import annotations

import os

# Before any library reads them.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true"
)

import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same random stream."""
    torch.manual_seed(0)
