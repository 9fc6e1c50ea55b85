"""Compositions and builds that several tests read, made once."""

from __future__ import annotations

from functools import cache

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from moh.backbones.build import build_model, make_plan, router_options, without_pretrained
from moh.backbones.convert import convert, head_plan, head_shapes, revert
from moh.cli import compose_config, experiments
from moh.config import Config, HeadsConfig
from moh.reporting.spec import TableDefinition, load_table, table_names
from moh.reporting.stored import ModelFacts

# Two are whatever a folder or a name of timm makes them.
EXPERIMENTS = [name for name in experiments() if name not in ("llm/llama_folder", "vit/timm")]


@cache
def composed(name: str) -> DictConfig:
    """The configuration of an experiment; not to be changed."""
    return compose_config([f"experiment={name}"])


@cache
def definition(name: str) -> TableDefinition:
    """A table of ``experiments/``."""
    return load_table(name)


def paper_tables() -> list[str]:
    """Names of the tables that are the paper's."""
    return [name for name in table_names() if definition(name).spec.paper]


@cache
def _baseline(model: str, name: str) -> nn.Module:
    """The MHA model of an experiment; ``model`` is its configuration as text, the key."""
    config = _typed(name)
    return build_model(config.model, HeadsConfig())


def _typed(name: str) -> Config:
    config: Config = OmegaConf.to_object(composed(name))  # type: ignore[assignment]
    config.model = without_pretrained(config.model)
    return config


@cache
def facts_of(name: str) -> ModelFacts:
    """Sizes of an experiment's model, built where nothing is allocated; each baseline once."""
    config = _typed(name)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        if config.heads.num_heads is not None:
            return _count(build_model(config.model, config.heads))
        model = _baseline(str(config.model), name)
        plan = make_plan(config.heads, head_shapes(model))
        if plan is None:
            return _count(model)
        # In place and back, as build_model does once the baseline stands.
        facts = _count(convert(model, plan, router_options(config.heads)))
        revert(model)
        return facts


def _count(model: nn.Module) -> ModelFacts:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    plan = head_plan(model)
    if plan is None:
        heads = sum(num_heads for num_heads, _ in head_shapes(model))
        return ModelFacts(parameters, heads, heads, 0, 0, len(head_shapes(model)))
    return ModelFacts(
        parameters,
        plan.num_active,
        plan.num_heads,
        plan.num_shared,
        plan.routed_layers,
        len(plan),
    )
