"""A table handed to Hydra's submitit launcher, on this machine in place of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tiny_runs import tiny_command

from moh.cli import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("submitit"), reason="needs hydra-submitit-launcher (moh[slurm])")
def test_each_run_of_a_table_is_a_job(tmp_path):
    tiny_settings = tiny_command("vit", tmp_path)[1:]
    command = [
        "table=demo_vit",
        "experiment=demo/vit/mha,demo/vit/moh_75",
        "seed=0",
        *tiny_settings,
        "hydra/launcher=submitit_local",
        f"hydra.launcher.submitit_folder={tmp_path}/jobs/%j",
    ]
    subprocess.run([sys.executable, "-m", "moh", *command], cwd=ROOT, check=True, timeout=300)
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/runs/**/run.json")]
    assert {record["heads"] for record in records} == {"mha", "moh_75"}
    assert all(record["samples"] == 64 for record in records)
    assert len(list(tmp_path.glob("jobs/*/*_result.pkl"))) == 2
