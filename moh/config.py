"""The configuration schema: every key that Hydra accepts, with its unit and its default.

Groups in ``conf/`` fill these dataclasses; a key that is not here is refused before any work.
Values that the paper states are in ``conf/``, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

PRETRAINED = "pretrained"  # checkpoint=pretrained: the weights that model.pretrained names


@dataclass
class HeadsConfig:
    """The heads: the only thing that differs between a model and its MHA baseline.

    With neither ``num_shared``/``top_k`` nor ``ratio`` the model keeps its library's attention.
    """

    name: str = "mha"
    layers: list[int] | None = None  # layers in each group of the lists below; null: one a layer
    num_heads: list[int] | None = None  # null: the model's own
    head_dim: int | None = None  # fixed width of a head where num_heads varies; null: the model's
    num_shared: list[int] | None = None
    top_k: list[int] | None = None
    ratio: float | None = None  # activated ratio, from which an even plan is made
    shared_share: float = 0.4  # shared heads over active heads, with ratio
    router: str = "two_stage"  # two_stage | query_norm
    gate_scale: str = "released"  # released | paper
    two_stage: bool = True
    selection: str = "learned"  # learned | random | fixed
    straight_through: bool = True
    balance_coef: float = 0.01
    execution: str = "auto"  # auto | dense | sparse: how heads are computed, not what they are


@dataclass
class ModelConfig:
    """Common part of all backbones."""

    family: str = MISSING
    name: str = MISSING


@dataclass
class TimmConfig(ModelConfig):
    """Any timm model; this project's TransNeXt is one."""

    family: str = "timm"
    img_size: int = 224  # pixels
    in_chans: int = 3
    num_classes: int = 1000
    drop_path_rate: float | None = 0.0  # null: the model's own
    pretrained: bool = False  # weights from timm's hub
    args: dict[str, Any] = field(default_factory=dict)  # further arguments of the model's class


@dataclass
class DiTConfig(ModelConfig):
    """Class-conditional diffusion transformer."""

    family: str = "dit"
    input_size: int = 32  # latent pixels
    patch_size: int = 2
    in_channels: int = 4
    hidden_size: int = MISSING
    depth: int = MISSING
    num_heads: int = MISSING
    mlp_ratio: float = 4.0
    num_classes: int = 1000


@dataclass
class LlamaConfig(ModelConfig):
    """Decoder-only language model."""

    family: str = "llama"
    vocab_size: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_hidden_layers: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int | None = None  # null: as many as query heads
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pretrained: str | None = None  # folder of a LLaMA-architecture model to start from


@dataclass
class LlamaFolderConfig(LlamaConfig):
    """A LLaMA whose sizes are those of the folder ``pretrained``."""

    num_key_value_heads: int | None = MISSING
    max_position_embeddings: int = MISSING
    rope_theta: float = MISSING
    rms_norm_eps: float = MISSING
    tie_word_embeddings: bool = MISSING
    initializer_range: float = MISSING
    pretrained: str | None = MISSING


@dataclass
class DataConfig:
    """Common part of all data sets."""

    name: str = MISSING
    root: str | None = None  # null: the copy that ships with the project, where there is one


@dataclass
class ImagesConfig(DataConfig):
    """Labelled images."""

    size: int = MISSING  # pixels
    channels: int = 3
    mean: list[float] = MISSING
    std: list[float] = MISSING
    flip: bool = True
    crop_padding: int = 0  # pixels of zero padding for random crops; 0: none (npz)
    # npz (all in memory) | folder (train/ and val/, a folder a class) | latents (cached by
    # scripts/cache_latents.py) | folder_vae (train/, encoded on the device while it trains); for
    # mode=eval also tar (folders in archives) | webdataset (shards of .jpg and .cls) | datasets
    # (parquet, Arrow)
    form: str = "npz"
    vae: str | None = None  # folder or hub name of an AutoencoderKL (folder_vae)
    repeats: int = 1  # times that a pass shows each image it has (repeated augmentation; folder)
    repeat_spread: int = 1  # parts of a global batch over which the copies are dealt
    workers: int = 8  # processes that decode images (folder, folder_vae)
    # How evaluation images become square; not for npz, which is resized as a whole.
    crop_pct: float = 0.875  # size over the side they are resized to
    crop_mode: str = "center"  # timm's: center | squash | border
    interpolation: str = "bicubic"


@dataclass
class TextConfig(DataConfig):
    """Token sequences."""

    seq_len: int = MISSING  # tokens
    form: str = "text"  # text (documents, tokenised at the start) | shards (scripts/tokenise.py)
    # text: folder of a tokenizer; null: a BPE trained on the text. shards: null, they hold theirs
    tokenizer: str | None = None
    validation_share: float = 0.02  # of the documents (text)
    # Mixture (shards): folder under root -> weight. Empty: root itself is the only source
    sources: dict[str, float] = field(default_factory=dict)
    validation_tokens: int = 2_000_000  # most held-out tokens that are scored (shards)


@dataclass
class TaskConfig:
    """Common part of all tasks."""

    name: str = MISSING


@dataclass
class ClassificationConfig(TaskConfig):
    """Images to classes."""

    name: str = "classification"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_switch: float = 0.5  # probability of CutMix where both are on
    mix_batch: int = 2  # consecutive images that are mixed with each other, by one draw
    random_erasing: float = 0.0  # probability
    auto_augment: str | None = None  # timm's policy string


@dataclass
class GenerationConfig(TaskConfig):
    """Class-conditional diffusion."""

    name: str = "generation"
    diffusion_steps: int = 1000
    label_dropout: float = 0.1  # probability, once a sample
    latent: bool = True  # the data are VAE latents; false: pixels


@dataclass
class LanguageConfig(TaskConfig):
    """Next token."""

    name: str = "language"


@dataclass
class OptimConfig:
    """AdamW and its schedule, stepped once an update."""

    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: str = "constant"  # constant | cosine
    warmup_samples: int = 0
    warmup_lr: float = 0.0
    min_lr: float = 0.0


@dataclass
class TrainerConfig:
    """How long, in what pieces, on what."""

    samples: int = MISSING  # images or sequences in all
    global_batch: int = MISSING
    device_batch: int | None = None  # of one process; null: its share of global_batch
    precision: str = "fp32"  # fp32 | bf16 | fp16
    ema_decay: float | None = None
    compile: bool = False
    parallel: str = "ddp"  # ddp (a copy on each process) | fsdp (sharded over them)
    activation_checkpointing: bool = False
    checkpoint_every: int = 0  # samples; 0: at the end only
    keep_at: list[int] = field(default_factory=list)  # samples whose checkpoint is never dropped
    log_every: int = 20  # updates
    threads: int | None = None  # CPU threads; null: PyTorch's own choice
    device: str = "auto"  # auto | cpu | cuda


@dataclass
class EvalConfig:
    """What is measured, and how much of it."""

    batch: int = 64
    ema: bool = True  # evaluate the averaged weights where there are any
    samples: int | None = None  # generated images; null: the protocol's number
    sampling_steps: int = 250
    guidance: float = 1.0
    labels: str = "balanced"  # balanced (image number modulo classes) | drawn (uniformly)
    precision: str = "fp32"  # of the model that is scored: fp32 | bf16 | fp16
    vae: str | None = None  # of latents: folder or hub name of diffusers' AutoencoderKL
    save_samples: bool = False  # keep the generated set as an .npz for the ADM suite
    reference: str | None = None  # ADM's .npz or a folder of images; null: the data's test images
    features: str = "inception"  # inception | efficientnet_lite0
    features_path: str | None = None  # file with its weights; null: its package or download
    tasks: list[str] = field(default_factory=list)  # language benchmarks
    shots: dict[str, int] = field(default_factory=dict)  # 0 for benchmarks not named
    # Benchmark -> its metric in the averages; the others': acc_norm, acc or exact_match.
    score: dict[str, str] = field(default_factory=dict)
    # Name -> the benchmarks that it is the mean of; empty: "average" of all that are evaluated.
    averages: dict[str, list[str]] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)  # of a whole benchmark; fewer are marked
    limit: int | None = None  # items of each benchmark; null: all
    data_root: str | None = None  # folder of benchmark data; null: the hub
    head_load: bool = True
    similarity_samples: int | None = None  # for head similarity; null: the task's own; 0: none


@dataclass
class LauncherConfig:
    """How many processes carry out a run."""

    processes: int = 1  # on each machine; one a GPU
    nodes: int = 1  # machines; more than one under SLURM or torchrun's own variables
    peak_tflops: float = 312.0  # of one GPU in the run's precision (A100 in bf16); dry runs, MFU
    utilisation: float = 0.4  # share of it that a dry run reckons with


@dataclass
class LoggerConfig:
    """Weights & Biases; the same files lie on disk in every mode."""

    wandb: str = "auto"  # auto (online with a key, else offline) | online | offline | disabled
    project: str = "moh"
    entity: str | None = None
    progress: bool = True


@dataclass
class Config:
    """One run."""

    name: str = MISSING  # path-like, e.g. vit/moh_s_75
    protocol: str = "paper"  # paper | demo | smoke
    mode: str = "both"  # train | eval | both
    dry_run: bool = False  # print sizes and cost, train nothing
    # For mode=eval: a file, a folder, or "pretrained"; null: the run's own newest checkpoint.
    checkpoint: str | None = None
    evaluates: str | None = None  # where the weights come from that an experiment is there to score
    weights_of: str | None = None  # experiment whose trained run an evaluation takes, same seed
    weights_at: int | None = None  # samples; null: at the end of that run
    seed: int = 0
    runs_dir: str = "runs"
    results_dir: str = "results"
    heads: HeadsConfig = MISSING
    model: Any = MISSING
    task: Any = MISSING
    data: Any = MISSING
    optim: OptimConfig = MISSING
    trainer: TrainerConfig = MISSING
    eval: EvalConfig = field(default_factory=EvalConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)


def _of_timm(model: str, key: str) -> Any:
    from moh.backbones.preparation import preparation

    return preparation(model)[key]


_GROUPS: tuple[tuple[str, str, type], ...] = (
    ("heads", "schema", HeadsConfig),
    ("model", "timm_schema", TimmConfig),
    ("model", "dit_schema", DiTConfig),
    ("model", "llama_schema", LlamaConfig),
    ("model", "llama_folder_schema", LlamaFolderConfig),
    ("data", "images_schema", ImagesConfig),
    ("data", "text_schema", TextConfig),
    ("task", "classification_schema", ClassificationConfig),
    ("task", "generation_schema", GenerationConfig),
    ("task", "language_schema", LanguageConfig),
    ("optim", "schema", OptimConfig),
    ("trainer", "schema", TrainerConfig),
    ("eval", "schema", EvalConfig),
    ("logger", "schema", LoggerConfig),
    ("launcher", "schema", LauncherConfig),
)


@cache
def keys() -> dict[str, set[str]]:
    """Every key that some configuration has, dotted, with its types as they are written here."""
    found: dict[str, set[str]] = {}
    for prefix, node in (("", Config), *((f"{group}.", node) for group, _, node in _GROUPS)):
        for item in fields(node):
            found.setdefault(prefix + item.name, set()).add(str(item.type))
    return found


def register() -> None:
    """Make the schema known to Hydra; conf files name it in their defaults list.

    ``${of_timm:MODEL,KEY}`` in them is how a timm model's own weights want their images.
    """
    OmegaConf.register_new_resolver("of_timm", _of_timm, replace=True)
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for group, name, node in _GROUPS:
        store.store(group=group, name=name, node=node)
