"""``table=head_ratio family=vit ratios=0.5,0.75``: a sweep's own words on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from moh.errors import nearest
from moh.overrides import names_of, parse, values_of
from moh.sweeps import CONTROLS, EXPERIMENT_FILES, experiment_of, points

# Words of a sweep; the table's file holds their defaults. They are no keys of a run.
WORDS = ("family", "base", "ratios", "controls", "control_ratios", "shares", "seeds")
SET_BY_THE_ROW = ("heads", "heads.ratio", "heads.selection", "heads.gate_scale", "experiment")
PROTOCOLS = ("paper", "demo")


def expand_table(overrides: Sequence[str]) -> list[str] | None:
    """A command's overrides with the rows of its sweep written out; None if it has no sweep.

    Raises:
        ValueError: a word or value that is not allowed; one line.
    """
    names = names_of("table", overrides)
    path = EXPERIMENT_FILES.parent / "table" / f"{names[0] if names else ''}.yaml"
    if not path.is_file():
        return None
    params = OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.params") or {}
    return expand(overrides, params) if "ratios" in params else None


def expand(overrides: Sequence[str], params: Mapping[str, Any]) -> list[str]:
    """A sweep's command as the experiments and seeds that it stands for.

    Args:
        overrides: the command line, ``table=`` among them.
        params: the table's defaults (``hydra.sweeper.params``).

    Returns:
        Overrides without the sweep's own words, ``experiment=`` and ``seed=`` listing all.

    Raises:
        ValueError: a word or value that is not allowed; one line.
    """
    given = {override.key_or_group: override for override in map(parse, overrides)}
    for key in SET_BY_THE_ROW:
        if key in given:
            raise ValueError(f"{key} is set by each row of the table: leave it out")
    settings = {key: _values(override) for key, override in given.items()}
    for key, value in params.items():
        if key not in settings and key != "bases":
            settings[key] = _listed(value)
    if "ratios" in given and "control_ratios" not in given:
        settings["control_ratios"] = []  # the table's own may not be among them: every ratio
    base = _base(settings, params)
    rows = points(
        _numbers("ratios", settings),
        _controls(settings),
        _numbers("control_ratios", settings) if settings.get("control_ratios") else None,
        _numbers("shares", settings) if settings.get("shares") else None,
    )
    names = [base, *(experiment_of(base, point) for point in rows)]
    taken = {"table", "seed", "protocol", *WORDS}
    kept = [str(override.input_line) for key, override in given.items() if key not in taken]
    if "protocol" in given and _one("protocol", settings) not in PROTOCOLS:
        kept.append(str(given["protocol"].input_line))
    seeds = settings.get("seeds") if "seeds" in given else settings.get("seed")
    numbers = ",".join(map(str, seeds or [0]))
    return [*kept, f"experiment={','.join(names)}", f"seed={numbers}"]


def _values(override: Override) -> list[Any]:
    """The values of an override: a sweep's (``a,b``, ``range(...)``), a list's, or the one."""
    return values_of(override) if override.is_sweep_override() else _listed(override.value())


def _listed(value: Any) -> list[Any]:
    if isinstance(value, ListConfig | DictConfig):
        value = OmegaConf.to_container(value)
    if isinstance(value, str):
        value = [part for part in value.split(",") if part]
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _one(key: str, settings: Mapping[str, list[Any]]) -> str | None:
    values = settings.get(key) or [None]
    if len(values) > 1:
        raise ValueError(f"{key} takes one value, not {', '.join(map(str, values))}")
    return None if values[0] is None else str(values[0])


def _base(settings: Mapping[str, list[Any]], params: Mapping[str, Any]) -> str:
    """The baseline's experiment: ``base``, else the table's for ``family`` and ``protocol``."""
    base = _one("base", settings)
    if base is None:
        protocol = _one("protocol", settings) or "paper"
        known = params["bases"]["demo" if protocol == "demo" else "paper"]
        family = _one("family", settings)
        if family not in known:
            raise ValueError(f"family {family} is not one of {', '.join(known)}")
        base = str(known[family])
    if not (EXPERIMENT_FILES / f"{base}.yaml").is_file():
        files = EXPERIMENT_FILES.rglob("mha*.yaml")
        names = [str(path.relative_to(EXPERIMENT_FILES).with_suffix("")) for path in files]
        raise ValueError(f"base {base} is no experiment{nearest(base, names)}")
    return base


def _numbers(key: str, settings: Mapping[str, list[Any]]) -> list[float]:
    """Ratios of a setting, as fractions.

    Raises:
        ValueError: no number, or not in (0, 1].
    """
    found = []
    for value in settings[key]:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{key} {value!r} is no number: write {key}=0.5,0.75") from None
        if not 0 < number <= 1:
            raise ValueError(f"{key} {value} is not in (0, 1]")
        found.append(number)
    if not found:
        raise ValueError(f"{key} is empty: write {key}=0.5,0.75")
    return found


def _controls(settings: Mapping[str, list[Any]]) -> list[str]:
    names = [str(name) for name in settings.get("controls") or [] if str(name) != "none"]
    for name in names:
        if name not in CONTROLS:
            raise ValueError(f"controls {name} is not one of {', '.join(CONTROLS)}, none")
    return names
