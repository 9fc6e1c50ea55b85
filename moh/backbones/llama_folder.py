"""Any folder of a LLaMA as transformers saves it: its sizes, its weights, its tokenizer."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from moh.errors import RunError

MODEL_TYPES = ("llama", "moh_llama")
# Keys of moh.config.LlamaConfig that a folder's config.json answers.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
SHOWN = 6  # names of weights in one message; the rest are counted
# A table of frequencies that older LLaMA files store and that is computed today.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq")


def read_config(folder: str | Path) -> Any:
    """The transformers config of a LLaMA's folder, a :class:`MoHLlamaConfig` where it has heads.

    A folder may name code of its own (``auto_map``). It is never run: the released MoH-LLaMA3 is
    recognised by what its code says and gets the heads that this code fixes; any other is
    refused, since without its code it would be another model.

    Raises:
        ValueError: no such folder, or not one of a LLaMA; one line.
    """
    from transformers import LlamaConfig

    from moh.backbones.llama import MoHLlamaConfig
    from moh.backbones.published.llama import config_from_published

    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"model.pretrained={folder} does not exist")
    try:
        plain: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = plain.get("model_type")
    except FileNotFoundError:
        raise ValueError(
            f"model.pretrained={folder} has no config.json: it needs a folder as save_pretrained "
            "writes it"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"cannot read {path / 'config.json'}: {_first_line(error)}") from None
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"model.pretrained={folder} is no LLaMA: its model_type is {kind!r}, not one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    if kind == "moh_llama":
        return MoHLlamaConfig.from_dict(plain)
    code = str((plain.pop("auto_map", None) or {}).get("AutoModelForCausalLM", ""))
    if not code:
        return LlamaConfig.from_dict(plain)
    if _routes_heads(path / f"{code.split('.')[0]}.py"):
        return config_from_published(plain)
    raise ValueError(
        f"model.pretrained={folder} names code of its own ({code}), which is not run: remove "
        "auto_map from its config.json if its weights are plain LLaMA's"
    )


def _routes_heads(code: Path) -> bool:
    """True if a modelling file is the authors' MoH; read, not run."""
    try:
        text = code.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return "self.routed_head" in text and "self.shared_head" in text


def sizes(config: Any) -> dict[str, Any]:
    """A transformers LLaMA config as the keys of :class:`moh.config.LlamaConfig`."""
    values = {key: getattr(config, key, None) for key in SIZES if key != "rope_theta"}
    values["rope_theta"] = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
    return values


def fill_sizes(model: DictConfig) -> None:
    """Take the sizes of a model's configuration that have no value from ``model.pretrained``.

    Raises:
        ValueError: not a folder of a LLaMA, or one of another size than the configuration says.
    """
    folder = str(model.pretrained)
    for key, value in sizes(read_config(folder)).items():
        said = None if OmegaConf.is_missing(model, key) else model[key]
        if OmegaConf.is_missing(model, key):
            model[key] = value
        elif said is not None and said != value:
            raise ValueError(
                f"model.{key} {said} is not that of model.pretrained={folder}: {value}"
            )


def load_llama(folder: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of a folder, with the heads that its config names.

    Args:
        dtype: of the weights.

    Raises:
        ValueError: not a folder of a LLaMA.
        RunError: weights that are missing, damaged, of another model, or could run code.
    """
    from safetensors import SafetensorError
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from moh.backbones.llama import MoHLlamaConfig, MoHLlamaForCausalLM

    if not sys.stderr.isatty():  # a bar in a log file is a line of garbage
        disable_progress_bar()

    config = read_config(folder)
    cls = MoHLlamaForCausalLM if isinstance(config, MoHLlamaConfig) else LlamaForCausalLM
    path = Path(folder)
    if not weight_files(path):
        raise RunError(f"{path} holds neither *.safetensors nor pytorch_model*.bin")
    try:
        model, report = cls.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except pickle.UnpicklingError:
        raise RunError(
            f"{path} is refused: it holds more than tensors and could run code"
        ) from None
    except (OSError, RuntimeError, SafetensorError, EOFError, ValueError) as error:
        raise RunError(f"cannot load {path}: {_first_line(error)}") from None
    _check_report(path, report)
    return model


def _check_report(path: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would have drawn at random or left out."""
    faults = []
    for kind, key in (("missing", "missing_keys"), ("unexpected", "unexpected_keys")):
        if names := sorted(n for n in report[key] if not _COMPUTED.fullmatch(n)):
            faults.append(f"{kind}: {_names(names)}")
    if others := report["mismatched_keys"]:
        faults.append(f"of another shape: {_names(sorted(str(entry[0]) for entry in others))}")
    if faults:
        raise RunError(f"the weights in {path} do not fit its config.json; {'; '.join(faults)}")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that are loaded from a folder."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def fingerprint(folder: str | Path) -> str:
    """SHA-256 of a folder's config and weights: which model was evaluated."""
    digest = hashlib.sha256()
    path = Path(folder)
    for file in (path / "config.json", *weight_files(path)):
        with open(file, "rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def load_tokenizer(folder: str | Path, vocab_size: int) -> Any:
    """The tokenizer of a folder.

    Raises:
        RunError: none there, or one with more tokens than the model.
    """
    from transformers import AutoTokenizer

    path = Path(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"no tokenizer in {path} ({_first_line(error)}); data.tokenizer=FOLDER names another"
        ) from None
    if len(tokenizer) > vocab_size:
        raise RunError(
            f"the tokenizer in {path} has {len(tokenizer)} tokens > model.vocab_size {vocab_size}"
        )
    return tokenizer


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
