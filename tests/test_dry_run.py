"""What a dry run says of every row of the paper, against the lengths that the paper states."""

from __future__ import annotations

import io

import pytest
from composed import composed, definition, facts_of, paper_tables
from rich.console import Console

from moh.training import dry_run
from moh.training.dry_run import forecast, show
from moh.validation import validate

EPOCH = 1251  # updates of 1,024 images in an epoch with repeated augmentation
STEPS = {"400K steps": 400_000, "2M steps": 2_000_000, "7M steps": 7_000_000}
# Billions of tokens and tokens of an update.
TOKENS = {
    "100b": (100, 2048 * 2048),
    "200b": (200, 2048 * 2048),
    "stage1": (300, 2048 * 8192),
    "stage2": (100, 2048 * 8192),
}


def rows():
    """Experiment -> updates and samples of an update, of every row that trains."""
    found = {}
    for table in paper_tables():
        for row in definition(table).spec.rows:
            name = row.experiment
            if not name or name.startswith("benchmark/") or composed(name).mode == "eval":
                continue
            if name.startswith("vit/"):
                epochs = 300 if table in ("vit_imagenet", "head_load", "head_similarity") else 100
                lengths = (epochs * EPOCH, 1024)
            elif name.startswith("dit/"):
                if table != "dit_imagenet" and "xl2" in name:
                    continue  # a look at what Table 2 trains
                lengths = (STEPS[row.section if row.section in STEPS else "400K steps"], 256)
            else:
                key = next((key for key in TOKENS if name.endswith(key)), "stage2")
                billions, update = TOKENS[key]
                lengths = (-(-billions * 10**9 // update), 2048)
            found.setdefault(name, set()).add(lengths)
    return found


ROWS = rows()


COUNTED: dict = {}


@pytest.fixture
def once_a_model(monkeypatch):
    """Counting takes seconds and is nearly the same for all heads: each model is counted once."""
    for name in ("describe_model", "_kept_bytes"):
        monkeypatch.setattr(dry_run, name, remembering(name, getattr(dry_run, name)))


def remembering(name, count):
    def counted(source, *others):
        key = (name, str(getattr(source, "model", source)), others[-1])
        if key not in COUNTED:
            COUNTED[key] = count(source, *others)
        return COUNTED[key]

    return counted


def test_the_rows_are_all_of_the_papers_trainings():
    assert len(ROWS) > 40
    assert all(len(lengths) == 1 for lengths in ROWS.values()), ROWS


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_of_the_paper_takes_the_updates_and_samples_that_it_states(name, once_a_model):
    config = validate(composed(name), paths=False)
    found = forecast(config)
    ((updates, batch),) = ROWS[name]
    assert (found.updates, found.samples) == (updates, updates * batch)
    assert found.accumulation * found.device_batch * found.processes == batch
    if found.tokens is not None:
        assert found.tokens == updates * batch * config.data.seq_len
    assert found.flops > 0
    assert found.gpu_hours == pytest.approx(found.flops / 312e12 / 0.4 / 3600)


@pytest.mark.parametrize("name", ["vit/moh_s_75", "dit/moh_s2_75", "llm/moh_s_50_100b"])
def test_the_printed_row_is_the_model_itself(name):
    found = forecast(validate(composed(name), paths=False))
    facts = facts_of(name)
    assert found.parameters == facts.parameters
    assert found.activated_ratio == facts.active / facts.heads
    # Weights, gradients, two moments, and averaged weights where there are any.
    copies = 5 if name.startswith("dit/") else 4
    assert found.state_gib == pytest.approx(copies * 4 * facts.parameters / 2**30)
    console = Console(file=io.StringIO(), width=200)
    show([found], composed(name), console)
    printed = console.file.getvalue()
    for text in (name, f"{facts.parameters:,}", f"{found.updates:,}", f"{found.samples:,}"):
        assert text in printed


def test_a_folder_of_weights_is_not_read(tmp_path):
    config = validate(composed("llm/moh_llama3_8b_75"), paths=False)
    config.model.pretrained = str(tmp_path)
    assert forecast(config).parameters == facts_of("llm/moh_llama3_8b_75").parameters
