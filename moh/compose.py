"""Composition of one run's configuration, with every mistake of it told in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moh import sweeps
from moh.config import register
from moh.errors import nearest
from moh.overrides import names_of, readable

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

MANY = 12  # options that a message does not list any more


def experiments() -> list[str]:
    """Names that ``experiment=`` takes."""
    return options("experiment")


def tables() -> list[str]:
    """Names that ``table=`` takes."""
    return options("table")


def options(group: str) -> list[str]:
    """Names that ``group=`` takes: the files of a folder of ``conf/``."""
    folder = CONF / group
    names = (str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return sorted(name for name in names if name != "schema")


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose one run's configuration, Hydra's part left out.

    Raises:
        ValueError: an unknown group option or key, or a value of the wrong type; one line.
    """
    return compose_with(readable(overrides))


def compose_with(overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """Compose overrides that Hydra can read.

    Args:
        with_hydra: keep Hydra's own part.

    Raises:
        ValueError: as :func:`compose_config`.
    """
    register()
    sweeps.register(names_of("experiment", overrides))
    if not CONF.is_dir():
        raise ValueError(f"no folder {CONF}: run from a clone of the project, installed with -e")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=list(overrides), return_hydra_config=with_hydra)
    except MissingConfigException as error:
        raise ValueError(_explain_missing(error, overrides)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain_key(error, overrides)) from None


def _explain_missing(error: MissingConfigException, overrides: Sequence[str]) -> str:
    missing = str(error.missing_cfg_file)
    group, _, name = missing.partition("/")
    for override in overrides:
        key, _, value = override.partition("=")
        if value and missing == f"{key}/{value}":
            group, name = key, value
    known_names = options(group) or list(error.options or [])
    many = len(known_names) > MANY
    known = "; `python -m moh` lists them" if many else f"; known: {', '.join(known_names)}"
    listed = nearest(name, known_names) or known
    return f"unknown {group} {name!r}{listed}"


def _explain_key(error: Exception, overrides: Sequence[str]) -> str:
    """The key, its value and what is allowed, from Hydra's several kinds of message."""
    text = str(error)
    cause = str(error.__cause__ or "")
    there = re.search(r"already at '([^']+)'|Multiple values for (\S+?)\. ", text)
    if there and (plus := [o for o in overrides if o.startswith(f"+{there[1] or there[2]}=")]):
        return f"{plus[0]}: {there[1] or there[2]} has a value already; leave out the +"
    bad = re.search(r"Could not override '([^']+)'", text)
    if bad and "not in" in text + cause:
        key = bad.group(1)
        return f"unknown key {key}={_value(key, overrides)}{_allowed(key, overrides)}"
    full = re.search(r"full_key: (\S+)", text) or re.search(r"full_key: (\S+)", cause)
    first = next((line for line in (cause or text).splitlines() if line.strip()), text)
    key = full.group(1) if full else bad.group(1) if bad else ""
    if explained := _explain_value(key, text + cause, overrides):
        return explained
    if full and "not in" in first:
        key = full.group(1)
        return f"unknown key {key} in a file of conf/{_allowed(key, overrides)}"
    if isinstance(error, ConfigCompositionException) and bad:
        return f"{bad.group(1)}={_value(bad.group(1), overrides)}: {first}"
    return f"{full.group(1)}: {first}" if full else first


KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
}


def _explain_value(key: str, text: str, overrides: Sequence[str]) -> str | None:
    """A value of the wrong type in the user's words, None if ``text`` is not about one."""
    value = _value(key, overrides)
    if wrong := re.search(r"could not be converted to (\w+)", text):
        wanted = KINDS.get(wrong.group(1), wrong.group(1))
        return f"{key}={value}: must be {wanted}"
    if "is not a ListConfig" in text:
        return f"{key}={value}: must be a list, such as [2,2,2]"
    return None


def _value(key: str, overrides: Sequence[str]) -> str:
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name == key:
            return value
    return "?"


def _allowed(key: str, overrides: Sequence[str]) -> str:
    """Keys that stand where ``key`` does not."""
    groups = [o for o in overrides if (CONF / o.partition("=")[0]).is_dir()]
    parent, _, leaf = key.rpartition(".")
    try:
        config = compose_config(groups)
        node: Any = OmegaConf.select(config, parent) if parent else config
        known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    except ValueError:
        known = []
    if not known:
        return ""
    close = nearest(leaf, known, prefix=f"{parent}." if parent else "")
    return close or f"; allowed here: {', '.join(known)}"
