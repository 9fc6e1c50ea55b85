"""The benchmarks that a mirror can hold: where lm-eval looks for each, and what it reads there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Column:
    """What a column must hold.

    Attributes:
        needed: in words, for the message.
        convert: value -> the hub's form of it; None if it is not what is needed.
    """

    needed: str
    convert: Callable[[Any], Any]


def text(needed: str = "a text", holds: str = "") -> Column:
    """A text, with something that the task looks for in it."""
    return Column(
        needed, lambda value: value if isinstance(value, str) and holds in value else None
    )


def texts(count: int | None = None) -> Column:
    """A list of texts."""

    def convert(value: Any) -> Any:
        fits = isinstance(value, list) and value and count in (None, len(value))
        return value if fits and all(isinstance(one, str) for one in value) else None

    return Column(f"a list of {f'{count} ' if count else ''}texts", convert)


def one_of(*allowed: str | int) -> Column:
    """One of a few values; ``"1"``, ``1`` and ``true`` are the same, and become the hub's form."""
    known = {str(value).lower(): value for value in allowed}

    def convert(value: Any) -> Any:
        plain = int(value) if isinstance(value, bool) else value
        return known.get(str(plain).strip().lower())

    shown = [repr(value) if isinstance(value, str) else str(value) for value in allowed]
    return Column(f"one of {', '.join(shown)}", convert)


def paired(first: str, second: str, kind: type) -> Column:
    """Two lists of one length under their names: texts, and what belongs to each."""

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        left, right = value.get(first), value.get(second)
        if not (isinstance(left, list) and isinstance(right, list)) or len(left) != len(right):
            return None
        fits = all(isinstance(a, str) for a in left) and all(isinstance(b, kind) for b in right)
        return {first: left, second: right} if fits and left else None

    return Column(f"{{{first}: list of texts, {second}: as many}}", convert)


TEXT = text()
LETTERED = {"A": TEXT, "B": TEXT, "C": TEXT, "D": TEXT}
SCIENCE = {"choices": paired("text", "label", str), "answerKey": TEXT}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: as ``eval.tasks`` and lm-eval call it.
        dataset: on the hub.
        config: variant of the data set; of those with ``subjects``, each has its own.
        evaluated: split that is scored.
        demonstrations: split that demonstrations are taken from. lm-eval opens it even where none
            are asked for. None: the task has none.
        columns: what the task reads.
        licence: of the authors.
        called: other names that its files or folders may have.
        optional: further splits that may be laid out.
        splits: other names of files of a split.
        subjects: folder and prefix of lm-eval's definitions, a file a subject.
    """

    name: str
    dataset: str
    config: str
    evaluated: str
    demonstrations: str | None
    columns: Mapping[str, Column]
    licence: str
    called: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    splits: Mapping[str, str] = field(default_factory=dict)
    subjects: tuple[str, str] | None = None

    @property
    def required(self) -> list[str]:
        """Splits without which the task cannot be opened."""
        return [split for split in (self.evaluated, self.demonstrations) if split]

    @property
    def known_splits(self) -> dict[str, str]:
        """Name in a file's name -> split."""
        own = {split: split for split in (*self.required, *self.optional)}
        if "validation" in own:
            own |= {"valid": "validation", "val": "validation"}
        return own | dict(self.splits)

    def has(self, dataset: str, config: str) -> bool:
        """Whether a part belongs to it."""
        return dataset == self.dataset and (self.subjects is not None or config == self.config)

    @cached_property
    def subject_names(self) -> list[str]:
        """Subjects that lm-eval's group is made of; none where it has none."""
        if self.subjects is None:
            return []
        spec = find_spec("lm_eval")
        if spec is None or spec.origin is None:
            raise ValueError("lm-eval is not installed: make setup")
        folder, prefix = self.subjects
        files = (Path(spec.origin).parent / "tasks" / folder).glob(f"{prefix}*.yaml")
        pattern = re.compile(r'^"?dataset_name"?:\s*"?([\w-]+)"?', re.MULTILINE)
        found = (pattern.search(file.read_text(encoding="utf-8")) for file in files)
        return sorted(match.group(1) for match in found if match)


BENCHMARKS = (
    Benchmark(
        "mmlu",
        "cais/mmlu",
        "",
        "test",
        "dev",
        {"question": TEXT, "choices": texts(4), "answer": one_of(0, 1, 2, 3)},
        "MIT",
        called=("mmlu_no_train", "hendrycks_test"),
        optional=("validation",),
        subjects=("mmlu/default", "mmlu_"),
    ),
    Benchmark(
        "ceval-valid",
        "ceval/ceval-exam",
        "",
        "val",
        "dev",
        {"question": TEXT, **LETTERED, "answer": one_of("A", "B", "C", "D")},
        "CC BY-NC-SA 4.0",
        called=("ceval", "ceval_exam", "ceval_valid"),
        splits={"validation": "val", "valid": "val"},
        subjects=("ceval", "ceval-valid_"),
    ),
    Benchmark(
        "cmmlu",
        "haonan-li/cmmlu",
        "",
        "test",
        "dev",
        {"Question": TEXT, **LETTERED, "Answer": one_of("A", "B", "C", "D")},
        "CC BY-NC-SA 4.0",
        subjects=("cmmlu", "cmmlu_"),
    ),
    Benchmark(
        "gsm8k",
        "openai/gsm8k",
        "main",
        "test",
        "train",
        {"question": TEXT, "answer": text("a text with #### before its result", "####")},
        "MIT",
    ),
    Benchmark(
        "truthfulqa",
        "truthfulqa/truthful_qa",
        "multiple_choice",
        "validation",
        None,
        {
            "question": TEXT,
            "mc1_targets": paired("choices", "labels", int),
            "mc2_targets": paired("choices", "labels", int),
        },
        "Apache-2.0",
        called=("truthful_qa", "truthfulqa_mc"),
    ),
    Benchmark(
        "hellaswag",
        "Rowan/hellaswag",
        "default",
        "validation",
        "train",
        {
            "activity_label": TEXT,
            "ctx_a": TEXT,
            "ctx_b": TEXT,
            "endings": texts(4),
            "label": one_of("0", "1", "2", "3"),
        },
        "MIT",
    ),
    Benchmark(
        "logiqa",
        "EleutherAI/logiqa",
        "logiqa",
        "test",
        "train",
        {
            "context": TEXT,
            "question": TEXT,
            "options": texts(4),
            "label": one_of("a", "b", "c", "d"),
        },
        "none stated",
        optional=("validation",),
    ),
    Benchmark(
        "boolq",
        "aps/super_glue",
        "boolq",
        "validation",
        "train",
        {"question": TEXT, "passage": TEXT, "label": one_of(0, 1)},
        "CC BY-SA 3.0",
    ),
    Benchmark(
        "lambada_openai",
        "EleutherAI/lambada_openai",
        "default",
        "test",
        None,
        {"text": text("a text of several words", " ")},
        "CC BY 4.0",
        called=("lambada",),
    ),
    Benchmark(
        "sciq",
        "allenai/sciq",
        "default",
        "test",
        "train",
        {
            "question": TEXT,
            "distractor1": TEXT,
            "distractor2": TEXT,
            "distractor3": TEXT,
            "correct_answer": TEXT,
            "support": TEXT,
        },
        "CC BY-NC 3.0",
        optional=("validation",),
    ),
    Benchmark(
        "piqa",
        "baber/piqa",
        "default",
        "validation",
        "train",
        {"goal": TEXT, "sol1": TEXT, "sol2": TEXT, "label": one_of(0, 1)},
        "AFL-3.0",
    ),
    Benchmark(
        "winogrande",
        "allenai/winogrande",
        "winogrande_xl",
        "validation",
        "train",
        {
            "sentence": text("a text with _ for the blank", "_"),
            "option1": TEXT,
            "option2": TEXT,
            "answer": one_of("1", "2"),
        },
        "CC BY",
        splits={"dev": "validation"},
    ),
    Benchmark(
        "nq_open",
        "google-research-datasets/nq_open",
        "default",
        "validation",
        "train",
        {"question": TEXT, "answer": texts()},
        "CC BY-SA 3.0",
        splits={"dev": "validation"},
    ),
    Benchmark(
        "arc_easy",
        "allenai/ai2_arc",
        "ARC-Easy",
        "test",
        "train",
        {"question": TEXT, **SCIENCE},
        "CC BY-SA 4.0",
        optional=("validation",),
    ),
    Benchmark(
        "arc_challenge",
        "allenai/ai2_arc",
        "ARC-Challenge",
        "test",
        "train",
        {"question": TEXT, **SCIENCE},
        "CC BY-SA 4.0",
        optional=("validation",),
    ),
    Benchmark(
        "openbookqa",
        "allenai/openbookqa",
        "main",
        "test",
        "train",
        {"question_stem": TEXT, **SCIENCE},
        "none stated",
        optional=("validation",),
    ),
)
