"""Freed memory that stays in the process."""

import os
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from moh.memory import keep_freed_memory
print(keep_freed_memory())
def work():
    # Several at once, so that the heap's end is freed again and again.
    tensors = [torch.ones(2**21) for _ in range(12)]
for _ in range(6):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = [
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="perhaps another allocator"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc"),
]


def pages_asked_for(**environment: str) -> tuple[str, int]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-c", COUNT]
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )
    known, pages = done.stdout.split()
    return known, int(pages)


def test_freed_memory_is_not_asked_for_again() -> None:
    known, pages = pages_asked_for()
    assert known == "True"
    assert pages < 200


def test_a_choice_of_the_user_stands() -> None:
    known, pages = pages_asked_for(MALLOC_TRIM_THRESHOLD_="131072")
    assert known == "False"
    # 12 tensors of 2048 pages, five times.
    assert pages > 100_000
