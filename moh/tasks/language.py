"""Next token: MoH-LLaMA's task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.config import Config
from moh.data.mixture import MixtureStream, ShardedText
from moh.data.order import StepRandom
from moh.data.text import TextSet, TokenStream
from moh.evaluation.heads import HeadLoad
from moh.evaluation.language import bits_per_byte, bits_per_byte_of_counts, evaluate_benchmarks
from moh.evaluation.lm_tasks import average, expand
from moh.tasks.base import Evaluation, Metric, Progress, Task


class Language(Task):
    """Cross entropy of the next token; bits per byte of held-out text and benchmarks."""

    evaluates_together = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data: TextSet | ShardedText
        self.stream: TokenStream | MixtureStream
        if config.data.form == "shards":
            self.data = ShardedText.load(config.data, config.model.vocab_size)
            self.stream = self.data.stream(config.data.seq_len, config.seed)
        else:
            cache = Path(config.runs_dir) / "cache"
            self.data = TextSet.load(config.data, config.model.vocab_size, cache)
            self.stream = TokenStream(self.data.train, config.data.seq_len, config.seed)

    def fingerprint(self) -> dict[str, Any]:
        described = {
            "name": self.config.data.name,
            "train_tokens": self.data.train_tokens,
            "validation_tokens": len(self.data.validation),
            "validation_bytes": self.data.validation_bytes,
            "sha256": self.data.fingerprint,
        }
        if isinstance(self.stream, MixtureStream):
            described["sources"] = self.stream.describe(self.config.trainer.samples)
        return described

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return {"ids": self.stream.batch(range(first, first + count))}

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], random: StepRandom
    ) -> tuple[Tensor, int]:
        ids_BN = batch["ids"]
        logits = model(input_ids=ids_BN, use_cache=False).logits[:, :-1]
        target = ids_BN[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target, reduction="sum")
        return loss, target.numel()

    def terms(self, samples: int) -> int:
        return samples * (self.config.data.seq_len - 1)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, folder: Path, progress: Progress) -> Evaluation:
        load = HeadLoad(["validation text"])
        load.group = 0
        progress("validation", 0, 1)
        with load.watch(model):
            metrics = self._bits_per_byte(model)
        metrics.update(self._benchmarks(model, progress))
        return Evaluation(metrics, load.to_json())

    def _bits_per_byte(self, model: nn.Module) -> dict[str, Metric]:
        data, seq_len = self.data, self.config.data.seq_len
        n = len(data.validation) - 1
        protocol = (
            f"{self.config.data.name}, {data.validation_bytes:,} held-out bytes, "
            f"{seq_len}-token windows, stride {seq_len // 2}"
        )
        bits = bits_per_byte(
            model,
            data.validation,
            data.validation_bytes,
            seq_len,
            batch_size=self.config.eval.batch,
        )
        unigram = bits_per_byte_of_counts(
            data.token_counts(self.config.model.vocab_size),
            data.validation,
            data.validation_bytes,
        )
        of_unigram = "the same text, token frequencies of the training part alone"
        return {
            "bits_per_byte": Metric(bits, "bits/byte", n, False, protocol),
            "bits_per_byte_unigram": Metric(unigram, "bits/byte", n, False, of_unigram),
        }

    def _benchmarks(self, model: nn.Module, progress: Progress) -> dict[str, Metric]:
        evaluation = self.config.eval
        names = expand(evaluation.tasks)
        results: dict[str, dict[str, Any]] = {}
        for done, name in enumerate(names):
            progress(f"{name}", done, len(names))
            shots = {name: evaluation.shots[name]} if name in evaluation.shots else {}
            results |= evaluate_benchmarks(
                model,
                self.data.tokenizer,
                [name],
                shots,
                evaluation.limit,
                evaluation.batch,
                evaluation.data_root,
            )
        metrics = {
            f"{name}/{key}": _as_metric(name, key, result)
            for name, result in results.items()
            for key in result["metrics"]
        }
        if results:
            n = sum(result["n"] for result in results.values())
            protocol = f"mean of {', '.join(results)}"
            mean = 100 * average(results)
            metrics["average"] = Metric(
                mean, "%", n, True, protocol, marks=_marks(evaluation.limit)
            )
        return metrics


def _as_metric(name: str, key: str, result: dict[str, Any]) -> Metric:
    stderr = result["stderr"].get(key)
    protocol = (
        f"{name} {key}, {result['shots']}-shot, task version {result['version']}, "
        f"lm-eval {result['lm_eval']}, batch {result['batch_size']}"
    )
    share = key.split(",")[0].startswith(("acc", "exact_match", "mc", "mean"))
    scale, unit = (100, "%") if share else (1, "")
    return Metric(
        scale * result["metrics"][key],
        unit,
        result["n"],
        bool(result["higher_is_better"].get(key.split(",")[0], True)),
        protocol,
        stderr=None if stderr is None else scale * stderr,
        marks=_marks(result["limit"], result["evaluated_demonstrations"], result["cut_requests"]),
    )


def _marks(limit: int | None, leaked: int = 0, cut: int = 0) -> list[str]:
    marks = [] if limit is None else [f"limit {limit} items"]
    if leaked:
        marks.append(f"{leaked} demonstrations are evaluated rows")
    if cut:
        marks.append(f"{cut} prompts cut to the model's length")
    return marks
