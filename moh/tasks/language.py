"""Next token: MoH-LLaMA's task."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.config import Config
from moh.data.mixture import MixtureStream, ShardedText
from moh.data.order import StepRandom, stable_seed
from moh.data.text import TextSet, TokenStream
from moh.errors import RunError
from moh.evaluation.benchmarks import evaluate_benchmarks
from moh.evaluation.heads import HeadLoad
from moh.evaluation.language import bits_per_byte, bits_per_byte_of_counts
from moh.evaluation.lm_harness import check_data
from moh.evaluation.lm_metrics import average_metrics, benchmark_metrics, benchmark_table
from moh.heads import draws_by_prefix
from moh.tasks.base import Evaluation, Look, Metric, Progress, Task, device_of, spread_over
from moh.training.gradients import DTYPES

HELD_OUT = "validation text"
EMBEDDED = "state-of-the-union"  # the text set that needs no data.root


class Language(Task):
    """Cross entropy of the next token; bits per byte of held-out text and benchmarks.

    An evaluation needs no text: without one there are the benchmarks alone.
    """

    evaluates_together = False
    look_samples = 8

    def __init__(self, config: Config) -> None:
        self.config = config
        evaluation = config.eval
        if evaluation.tasks and config.mode != "train":
            try:
                check_data(evaluation.tasks, evaluation.data_root)
            except ValueError as error:
                raise RunError(str(error)) from None
        self.data: TextSet | ShardedText | None = None
        self.tokenizer: Any
        self.stream: TokenStream | MixtureStream | None = None
        if config.mode != "eval" or config.data.root is not None or config.data.name == EMBEDDED:
            self._open()
        else:
            self.tokenizer = self._own_tokenizer()

    def _open(self) -> None:
        """The text, and unless it is for an evaluation alone the order of its training part."""
        config, training = self.config, self.config.mode != "eval"
        if config.data.form == "shards":
            shards = ShardedText.load(config.data, config.model.vocab_size)
            self.data = shards
            self.stream = shards.stream(config.data.seq_len, config.seed) if training else None
        else:
            cache = Path(config.runs_dir) / "cache"
            text = TextSet.load(config.data, config.model.vocab_size, cache)
            self.data = text
            if training:
                self.stream = TokenStream(text.train, config.data.seq_len, config.seed)
        self.tokenizer = self.data.tokenizer

    def _own_tokenizer(self) -> Any:
        from moh.backbones.llama_folder import load_tokenizer

        folder = self.config.data.tokenizer or self.config.model.pretrained
        if folder is None:
            raise RunError(
                "data.tokenizer has no value: without a text (data.root) an evaluation needs the "
                "folder of the model's tokenizer (data.tokenizer=FOLDER)"
            )
        return load_tokenizer(Path(folder), self.config.model.vocab_size)

    def fingerprint(self) -> dict[str, Any]:
        if self.data is None:
            return {
                "name": self.config.data.name,
                "benchmarks": self.config.eval.data_root or "hub",
            }
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
        assert self.stream is not None, "an evaluation has no training samples"
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
        evaluation = self.config.eval
        model = self._in_precision(model)
        load = HeadLoad([HELD_OUT, *evaluation.tasks])
        metrics: dict[str, Metric] = {}
        watched = load.watch(model) if evaluation.head_load else nullcontext()
        with watched, self._draws(model):
            if self.data is not None:
                load.group = 0
                metrics |= self._bits_per_byte(model, self.data, progress)
            results = evaluate_benchmarks(
                model,
                self.tokenizer,
                evaluation.tasks,
                evaluation.shots,
                evaluation.limit,
                evaluation.batch,
                evaluation.data_root,
                evaluation.score,
                progress,
                load,
            )
        averages = average_metrics(results, evaluation)
        metrics |= averages | benchmark_metrics(results, evaluation)
        table = benchmark_table(results, averages, evaluation) if results else None
        return Evaluation(metrics, load.to_json(), benchmarks=results or None, table=table)

    @torch.inference_mode()
    def look(self, model: nn.Module, samples: int, progress: Progress) -> Look | None:
        if self.data is None:
            return None
        text, device = self.data.validation, device_of(model)
        seq_len = min(self.config.data.seq_len, len(text))
        starts = spread_over(len(text) - seq_len + 1, samples)
        load = HeadLoad([HELD_OUT])
        load.group = 0
        with load.watch(model), self._draws(model):
            for done, start in enumerate(starts, 1):
                window = torch.from_numpy(text[start : start + seq_len].astype(np.int64))
                model(input_ids=window[None].to(device), use_cache=False)
                progress("looking at heads", done, len(starts))
        return Look(
            f"{len(starts)} windows of {seq_len} held-out tokens of {self.config.data.name}",
            load.to_json(),
        )

    def _draws(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keys of the tokens, for the random control."""
        return draws_by_prefix(model, stable_seed(self.config.seed, "heads", "text"))

    def _in_precision(self, model: nn.Module) -> nn.Module:
        """The model with weights of ``eval.precision``, as lm-eval's ``dtype=`` loads them.

        Buffers stay as they are: rotary's frequencies would lose what long texts need of them.
        """
        dtype = DTYPES[self.config.eval.precision]
        if all(parameter.dtype == dtype for parameter in model.parameters()):
            return model
        if self.config.mode != "eval":  # training may go on with the weights as they are
            model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    def _bits_per_byte(
        self, model: nn.Module, data: TextSet | ShardedText, progress: Progress
    ) -> dict[str, Metric]:
        seq_len = self.config.data.seq_len
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
            progress=partial(progress, "validation"),
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
