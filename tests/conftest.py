"""Shared set-up: few threads, and no test that reaches for the network."""

from __future__ import annotations

import os

# Before any library reads them.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true"
)

import multiprocessing

import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))

# What tests start and kill in processes of their own comes from a server that has these ready.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["moh.worker", "moh.tasks.classification", "moh.data.encoding", "moh.data.tokenising"]
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same random stream."""
    torch.manual_seed(0)
