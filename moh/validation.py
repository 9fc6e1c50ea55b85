"""What a configuration must satisfy beyond its types; checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moh.config import (
    PRETRAINED,
    ClassificationConfig,
    Config,
    GenerationConfig,
    HeadsConfig,
    ImagesConfig,
    LanguageConfig,
    LlamaConfig,
    TextConfig,
    TimmConfig,
)
from moh.errors import nearest

CHOICES = {
    "protocol": ("paper", "demo", "smoke"),
    "mode": ("train", "eval", "both"),
    "data.crop_mode": ("center", "squash", "border"),
    "optim.schedule": ("constant", "cosine"),
    "trainer.precision": ("fp32", "bf16", "fp16"),
    "trainer.parallel": ("ddp", "fsdp"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "eval.precision": ("fp32", "bf16", "fp16"),
    "eval.features": ("inception", "efficientnet_lite0"),
    "eval.labels": ("balanced", "drawn"),
    "logger.wandb": ("auto", "online", "offline", "disabled"),
}

# Of the data of each task.
FORMS = {
    "classification": ("npz", "folder", "tar", "webdataset", "datasets"),
    "generation": ("npz", "latents", "folder_vae"),
    "language": ("text", "shards"),
}
EVALUATION_FORMS = ("tar", "webdataset", "datasets")

AT_LEAST_ONE = (
    "trainer.global_batch",
    "trainer.log_every",
    "eval.batch",
    "launcher.processes",
    "launcher.nodes",
)


def validate(config: DictConfig, paths: bool = True) -> Config:
    """Check a composed configuration and give it its types.

    Builds the model on the meta device, so that an impossible head plan is found here.

    Args:
        paths: whether the folders and files that it names must exist.

    Raises:
        ValueError: the first mistake: key, value, and what is allowed.
    """
    _check_keys(config)
    _fill_from_folder(config, paths)
    try:
        _require_values(config)
        typed: Config = OmegaConf.to_object(config)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        # What a resolver of ours says, without OmegaConf's words about where.
        raise ValueError(reason.rpartition("while resolving interpolation: ")[2]) from None
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value is not None and value not in allowed:
            raise ValueError(f"{key} {value!r} is not one of {', '.join(allowed)}")
    for key in AT_LEAST_ONE:
        if (value := OmegaConf.select(config, key)) < 1:
            raise ValueError(f"{key} {value} must be at least 1")
    # An evaluation of given weights trains nothing.
    if typed.trainer.samples < (0 if typed.mode == "eval" else 1):
        raise ValueError(f"trainer.samples {typed.trainer.samples} must be at least 1")
    _check_heads(typed)
    _check_processes(typed)
    if (typed.eval.similarity_samples or 0) < 0:
        raise ValueError(
            f"eval.similarity_samples {typed.eval.similarity_samples} must be at least 0"
        )
    if typed.seed < 0:
        raise ValueError(f"seed {typed.seed} must be at least 0")
    _check_checkpoint(typed)
    if typed.weights_of is not None and typed.mode != "eval":
        raise ValueError(
            f"weights_of={typed.weights_of} evaluates what another experiment trained: mode "
            f"{typed.mode!r} must be 'eval'"
        )
    if typed.weights_at is not None and typed.weights_of is None:
        raise ValueError(f"weights_at {typed.weights_at} needs weights_of=EXPERIMENT")
    _check_batches(typed)
    _check_mixing(typed)
    _check_parts(typed)
    if isinstance(typed.task, GenerationConfig):
        _check_sampling(typed)
    if paths:
        _check_paths(typed)
    check_plan(typed)
    return typed


def _check_keys(config: DictConfig, prefix: str = "") -> None:
    """Hydra's ``+`` puts any key anywhere; nothing would read one that the schema lacks."""
    kind = OmegaConf.get_type(config) if prefix else Config
    if not dataclasses.is_dataclass(kind):
        return
    known = {field.name for field in dataclasses.fields(kind)}
    for key in map(str, config):
        if key not in known:
            raise ValueError(f"unknown key {prefix}{key}{nearest(key, known, prefix=prefix)}")
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            _check_keys(value, f"{prefix}{key}.")


def _fill_from_folder(config: DictConfig, paths: bool) -> None:
    """Sizes of a language model that its own folder states, where the configuration does not.

    Args:
        paths: whether the folder must exist.
    """
    if OmegaConf.select(config, "model.family") != "llama":
        return
    if OmegaConf.is_missing(config.model, "pretrained"):
        raise ValueError(
            "model.pretrained has no value: it names the folder of a LLaMA to evaluate"
        )
    folder = config.model.pretrained
    if folder is not None and (paths or Path(folder).is_dir()):
        from moh.backbones.llama_folder import fill_sizes

        fill_sizes(config.model)


def _require_values(config: DictConfig) -> None:
    for key in ("model", "task", "data", "optim", "trainer"):
        if OmegaConf.is_missing(config, key) or config[key] is None:
            raise ValueError(f"{key} is not set: the experiment file must choose one ({key}=NAME)")
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{missing[0]} has no value: set it ({missing[0]}=VALUE)")


def _check_heads(config: Config) -> None:
    """Heads with a name of their own must say how many are active."""
    heads = config.heads
    counts = (heads.ratio, heads.num_shared, heads.top_k)
    if heads.name != HeadsConfig().name and all(count is None for count in counts):
        raise ValueError(
            f"heads.ratio is not set: heads={heads.name} needs a number in (0, 1], or "
            "heads.num_shared and heads.top_k"
        )


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint == "":
        raise ValueError("checkpoint is empty: name a file or a run folder, or leave it out")
    if config.evaluates is not None and config.mode != "eval":
        raise ValueError(f"mode {config.mode}: {config.name} scores given weights, mode=eval")
    if checkpoint is not None and config.mode != "eval":
        raise ValueError(f"checkpoint={checkpoint} needs mode=eval; a run resumes from its own")
    if checkpoint == PRETRAINED:
        if not getattr(config.model, "pretrained", None):
            raise ValueError(f"checkpoint={checkpoint} needs model.pretrained")
        _check_classes(config)


def _check_classes(config: Config) -> None:
    """The pretrained classifier must be of as many classes as are asked for."""
    if not isinstance(config.model, TimmConfig):
        return
    from moh.backbones.preparation import preparation

    known = preparation(config.model.name)["num_classes"]
    if known is not None and known != config.model.num_classes:
        raise ValueError(
            f"model.num_classes {config.model.num_classes}: the weights of {config.model.name} "
            f"know {known} classes, and its classifier would be drawn at random"
        )


def _check_batches(config: Config) -> None:
    trainer = config.trainer
    if trainer.device_batch is not None:
        if trainer.device_batch < 1:
            raise ValueError(f"trainer.device_batch {trainer.device_batch} must be at least 1")
        if trainer.global_batch % trainer.device_batch:
            raise ValueError(
                f"trainer.global_batch {trainer.global_batch} is not a multiple of "
                f"trainer.device_batch {trainer.device_batch}"
            )
    for key in ("samples", "checkpoint_every"):
        value = getattr(trainer, key)
        if value % trainer.global_batch:
            allowed = max(1, round(value / trainer.global_batch)) * trainer.global_batch
            raise ValueError(
                f"trainer.{key} {value} is not a multiple of trainer.global_batch "
                f"{trainer.global_batch}; nearest: {allowed}"
            )
    for value in trainer.keep_at:
        if value % trainer.global_batch or not 0 < value <= trainer.samples:
            raise ValueError(
                f"trainer.keep_at {value} is not a multiple of trainer.global_batch "
                f"{trainer.global_batch} up to trainer.samples {trainer.samples}"
            )
    if trainer.threads is not None and trainer.threads < 1:
        raise ValueError(f"trainer.threads {trainer.threads} must be at least 1")
    if trainer.ema_decay is not None and not 0 < trainer.ema_decay < 1:
        raise ValueError(f"trainer.ema_decay {trainer.ema_decay} is not in (0, 1)")
    if trainer.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device cuda: no GPU is visible here; allowed: auto, cpu")


def _check_mixing(config: Config) -> None:
    """Images are mixed in groups that no split over processes or accumulation may cut."""
    task = config.task
    if not isinstance(task, ClassificationConfig) or not (task.mixup or task.cutmix):
        return
    if task.mix_batch < 2 or task.mix_batch % 2:
        raise ValueError(f"task.mix_batch {task.mix_batch} must be even and at least 2")
    trainer = config.trainer
    batch = trainer.device_batch or trainer.global_batch // (
        config.launcher.processes * config.launcher.nodes
    )
    if batch % task.mix_batch:
        raise ValueError(
            f"trainer.device_batch {batch} is not a multiple of task.mix_batch {task.mix_batch}"
        )


def _check_processes(config: Config) -> None:
    launcher, trainer = config.launcher, config.trainer
    gpus = torch.cuda.device_count()
    if trainer.device != "cpu" and 0 < gpus < launcher.processes:
        raise ValueError(f"launcher.processes {launcher.processes}: this machine has {gpus} GPU")
    processes = launcher.processes * launcher.nodes
    if processes == 1:
        if trainer.parallel == "fsdp" and config.mode != "eval":
            raise ValueError("trainer.parallel fsdp needs several processes: launcher.processes=N")
        return
    if config.mode == "eval":
        if isinstance(config.task, LanguageConfig):
            raise ValueError(f"{processes} processes: one evaluates a language model; mode=train")
        return
    micro_batch = processes * (trainer.device_batch or 1)
    if trainer.global_batch % micro_batch:
        of_each = (
            f" times trainer.device_batch {trainer.device_batch}" if trainer.device_batch else ""
        )
        raise ValueError(
            f"trainer.global_batch {trainer.global_batch} is not a multiple of "
            f"{processes} processes (launcher.processes, launcher.nodes){of_each}"
        )


def _check_parts(config: Config) -> None:
    """Task, data and model must be of one kind."""
    task, data, model = config.task, config.data, config.model
    wanted = TextConfig if isinstance(task, LanguageConfig) else ImagesConfig
    if not isinstance(data, wanted):
        raise ValueError(f"task {task.name} cannot train on data {data.name}")
    family = {LanguageConfig: "llama", GenerationConfig: "dit"}.get(type(task), "timm")
    forms = FORMS[task.name]
    if data.form not in forms:
        raise ValueError(f"data.form {data.form!r} is not one of {', '.join(forms)}")
    if model.family != family:
        raise ValueError(f"task {task.name} needs a model of family {family}, not {model.family}")
    if isinstance(data, ImagesConfig):
        if data.form in EVALUATION_FORMS and config.mode != "eval":
            raise ValueError(f"data.form {data.form} is for mode=eval; training reads folder")
        if len(data.mean) != data.channels or len(data.std) != data.channels:
            raise ValueError(f"data.mean and data.std need {data.channels} entries, one a channel")
        taken = {"timm": ("in_chans", "img_size"), "dit": ("in_channels", "input_size")}[family]
        channels, size = (getattr(model, key) for key in taken)
        if (data.channels, data.size) != (channels, size):
            raise ValueError(
                f"data are {data.channels}x{data.size}x{data.size}, the model takes "
                f"{channels}x{size}x{size} (model.{taken[0]}, model.{taken[1]})"
            )
    if isinstance(data, TextConfig) and data.seq_len > model.max_position_embeddings:
        raise ValueError(
            f"data.seq_len {data.seq_len} > model.max_position_embeddings "
            f"{model.max_position_embeddings}"
        )


def _check_sampling(config: Config) -> None:
    samples, steps = config.eval.samples, config.eval.sampling_steps
    if samples is not None and samples < 4:
        raise ValueError(f"eval.samples {samples} must be at least 4: recall needs 4 images")
    if not 2 <= steps <= config.task.diffusion_steps:
        raise ValueError(
            f"eval.sampling_steps {steps} is not in 2..{config.task.diffusion_steps} "
            "(task.diffusion_steps)"
        )


def _check_paths(config: Config) -> None:
    named = {
        "data.root": config.data.root,
        "eval.data_root": config.eval.data_root,
        "eval.features_path": config.eval.features_path,
        "eval.reference": config.eval.reference,
    }
    for key, value in named.items():
        if value is not None and not Path(value).exists():
            hint = ""
            if key == "eval.data_root":
                hint = f": python scripts/make_benchmark_mirror.py {value} lays it out"
            raise ValueError(f"{key}={value} does not exist{hint}")
    if config.checkpoint is None and config.evaluates is not None:
        raise ValueError(
            f"checkpoint is not set: {config.name} scores {config.evaluates}; checkpoint=PATH"
        )
    if config.checkpoint not in (None, PRETRAINED) and not Path(config.checkpoint).exists():
        raise ValueError(f"checkpoint={config.checkpoint} does not exist")


def check_plan(config: Config) -> None:
    """Build the model where nothing is allocated; an impossible plan or model fails here."""
    from moh.backbones.build import build_model, without_pretrained

    pretrained = config.model.pretrained if isinstance(config.model, LlamaConfig) else None
    if pretrained is not None and Path(pretrained).is_dir():
        _check_folder_plan(config)
        return
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            build_model(without_pretrained(config.model), config.heads)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"model {config.model.name}: {_first_line(str(error))}") from None


def _check_folder_plan(config: Config) -> None:
    """Heads for a LLaMA that is loaded from a folder must fit it, and must be its first."""
    from moh.backbones.build import is_mha, make_plan
    from moh.backbones.llama_folder import read_config

    if is_mha(config.heads):
        return
    folder = read_config(config.model.pretrained)
    if getattr(folder, "head_plan", None) is not None:
        raise ValueError(
            f"heads={config.heads.name}: model.pretrained={config.model.pretrained} has heads of "
            "its own; leave heads=mha"
        )
    shape = (folder.num_attention_heads, folder.head_dim)
    make_plan(config.heads, [shape] * folder.num_hidden_layers)


def _first_line(text: str) -> str:
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), "cannot be built")
