"""Benchmark data of the form of the real ones, made up, and a tiny LLaMA to score on them."""

from __future__ import annotations

import json

from transformers import LlamaConfig, LlamaForCausalLM

from moh.data.text import read_documents, train_tokenizer

VOCAB = 300


def make_tokenizer():
    return train_tokenizer([text[:2000] for text in read_documents()[:20]], VOCAB)


def make_llama(**changes):
    """A model whose answers differ from item to item, though it knows nothing."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def write_dataset(root, name, config, **splits):
    """A data set in the form that the hub's have."""
    folder = root / name
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        path = folder / config / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def questions(first, count):
    """Rows of PIQA's form."""
    return [
        {"goal": f"Count to {n}.", "sol1": "One by one.", "sol2": f"Say {n}.", "label": n % 2}
        for n in range(first, first + count)
    ]


def sums(first, count):
    """Rows of GSM8K's form."""
    return [
        {"question": f"What is {n} and {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(first, first + count)
    ]


def truths(count):
    """Rows of TruthfulQA's form, whose two tasks score them differently."""
    return [
        {
            "question": f"What is {n}?",
            "mc1_targets": {"choices": ["Nothing.", f"All of {n}."], "labels": [1, 0]},
            "mc2_targets": {"choices": ["Nil.", f"Just {n}.", "A bird."], "labels": [1, 1, 0]},
        }
        for n in range(count)
    ]


def exams(subject, first, count):
    """Rows of the form of C-Eval and MMLU's choices in four columns."""
    return [
        {
            "id": n,
            "question": f"{subject} {n}?",
            "A": "one",
            "B": "two",
            "C": f"{n}",
            "D": "four",
            "answer": "ABCD"[n % 4],
        }
        for n in range(first, first + count)
    ]


def rows_of_every_benchmark():
    """Benchmark -> split -> rows; those with subjects are of one subject, named in a column."""
    lettered = exams("Word", 0, 6)
    science = [
        {
            "id": f"Q{n}",
            "question": f"Why {n}?",
            "question_stem": f"Why {n}?",
            "choices": {"text": ["a stone", f"the {n}"], "label": ["A", "B"]},
            "answerKey": "AB"[n % 2],
        }
        for n in range(6)
    ]
    only = {
        "piqa": questions(0, 6),
        "gsm8k": sums(0, 6),
        "hellaswag": [
            {
                "activity_label": "Counting",
                "ctx_a": f"A man counts to {n}.",
                "ctx_b": "he",
                "endings": ["stops.", "sits.", f"says {n}.", "runs."],
                "label": str(n % 4),
            }
            for n in range(6)
        ],
        "logiqa": [
            {
                "context": f"All {n} are numbers.",
                "question": "What follows?",
                "options": ["Nothing.", f"{n} is one.", "Much.", "Little."],
                "label": "abcd"[n % 4],
            }
            for n in range(6)
        ],
        "boolq": [
            {"question": f"is {n} even", "passage": f"{n} is a number.", "label": n % 2}
            for n in range(6)
        ],
        "lambada_openai": [{"text": f"one two three and then comes {n}"} for n in range(6)],
        "sciq": [
            {
                "question": f"What is {n}?",
                "distractor1": "rain",
                "distractor2": "wind",
                "distractor3": "snow",
                "correct_answer": f"{n}",
                "support": "",
            }
            for n in range(6)
        ],
        "winogrande": [
            {
                "sentence": f"Ann gave {n} to Bea because _ asked.",
                "option1": "Ann",
                "option2": "Bea",
                "answer": "12"[n % 2],
            }
            for n in range(6)
        ],
        "nq_open": [{"question": f"how much is {n}", "answer": [f"{n}", "many"]} for n in range(6)],
        "arc_easy": science,
        "arc_challenge": science,
        "openbookqa": science,
        "truthfulqa": truths(6),
        "ceval-valid": lettered,
        "cmmlu": [
            {"Question": row["question"], "Answer": row["answer"], **{c: row[c] for c in "ABCD"}}
            for row in lettered
        ],
        "mmlu": [
            {"question": row["question"], "choices": ["1", "2", "3", "4"], "answer": n % 4}
            for n, row in enumerate(lettered)
        ],
    }
    splits = {
        **dict.fromkeys(only, ("train", "test")),
        **dict.fromkeys(
            ("piqa", "hellaswag", "boolq", "winogrande", "nq_open"), ("train", "validation")
        ),
        "lambada_openai": ("test",),
        "truthfulqa": ("validation",),
        "mmlu": ("dev", "test"),
        "cmmlu": ("dev", "test"),
        "ceval-valid": ("dev", "val"),
    }
    return {name: dict.fromkeys(splits[name], rows) for name, rows in only.items()}
