"""The model, the heads and the data of many experiments, without composing each of them.

Hydra takes a tenth of a second for an experiment with all its parts. Here it composes the files of
these three groups, all in one call, and what an experiment chooses and sets is read from its file
and from those that this one is built on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from moh.compose import CONF
from moh.config import Config, register

GROUPS = ("model", "heads", "data")
_DEFAULTS = {"heads": "mha"}  # what conf/config.yaml chooses


def model_parts(names: Sequence[str]) -> dict[str, DictConfig]:
    """The ``model``, ``heads`` and ``data`` of experiments that have a file.

    They equal those of :func:`moh.compose.compose_config`; what else it has is not there.
    """
    read = {name: _read(name) for name in names}
    wanted = {(group, choice[group]) for choice, _ in read.values() for group in GROUPS}
    composed = _compose(sorted(wanted))
    found = {}
    for name, (choice, settings) in read.items():
        config = OmegaConf.structured(Config)
        for group in GROUPS:
            config[group] = copy.deepcopy(composed[group][choice[group]])
        for setting in settings:
            config.merge_with(setting)
        found[name] = config
    return found


def _read(name: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What an experiment chooses of each group, and the settings of the three, in order."""
    file = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    choice, settings = dict(_DEFAULTS), []
    for entry in file["defaults"]:
        if entry == "_self_":
            settings.append({group: file[group] for group in GROUPS if group in file})
        elif isinstance(entry, str):
            base, of_base = _read(entry)
            choice |= base
            settings += of_base
        else:
            choice |= {key.removeprefix("override /"): value for key, value in entry.items()}
    return choice, settings


def _compose(wanted: Sequence[tuple[str, str]]) -> DictConfig:
    """Files of groups, each under its group and name."""
    register()
    ConfigStore.instance().store(name="model_parts", node={})
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = [f"+{group}@{group}.{name}={name}" for group, name in wanted]
        return compose("model_parts", overrides=overrides)
