"""Experiments that need no file: a baseline at any activated ratio, and its controls.

Where a baseline's name has ``mha``, its sweep has what differs: ``demo/vit/ratio_60`` is
``demo/vit/mha`` with 60 % of its heads active (an even plan, ``heads=moh_ratio``), and
``dit/ratio_75_random_s2`` is ``dit/mha_s2`` at 75 % with heads selected at random. So each point of
a curve is an experiment with a name and a hash of its own, which is skipped when it is finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

EXPERIMENT_FILES = Path(__file__).resolve().parent.parent / "conf" / "experiment"
HEADS_FILES = EXPERIMENT_FILES.parent / "heads"

# Control -> what it sets in the heads of the model that it is compared with.
CONTROLS: dict[str, dict[str, Any]] = {
    "random": {"selection": "random"},
    "fixed": {"selection": "fixed"},
    "paper": {"gate_scale": "paper"},
}

_HEADS = re.compile(r"override /heads: (\w+)")
_NUMBER = r"\d+(?:\.\d+)?"
_POINT = re.compile(
    rf"(?P<folder>(?:.*/)?)(?P<kind>ratio|moh)_(?P<percent>{_NUMBER})"
    rf"(?:_shared_(?P<shared>{_NUMBER}))?(?:_(?P<control>{'|'.join(CONTROLS)}))?(?P<rest>(?:_.*)?)"
)
_BASE = re.compile(r"(?P<folder>(?:.*/)?)mha(?P<rest>(?:_.*)?)")


@dataclass(frozen=True)
class Point:
    """What differs from the baseline.

    Attributes:
        ratio: activated ratio, a fraction.
        shared: shared heads over active heads; None for the project's usual share.
        control: a key of :data:`CONTROLS`, or empty for MoH itself.
    """

    ratio: float
    shared: float | None = None
    control: str = ""

    @property
    def id(self) -> str:
        """The part of an experiment's name that stands for ``mha``."""
        shared = "" if self.shared is None else f"_shared_{percent(self.shared)}"
        control = f"_{self.control}" if self.control else ""
        return f"ratio_{percent(self.ratio)}{shared}{control}"

    @property
    def without_control(self) -> Point:
        """MoH itself with the same heads."""
        return replace(self, control="")

    @property
    def heads(self) -> dict[str, Any]:
        """Settings of the heads on top of ``heads=moh_ratio``."""
        shared = {} if self.shared is None else {"shared_share": self.shared}
        return {"ratio": self.ratio, **shared, **CONTROLS.get(self.control, {})}


def percent(share: float) -> str:
    """0.6 -> ``60``, 0.625 -> ``62.5``."""
    return f"{100 * share:.10g}"


def experiment_of(base: str, point: Point) -> str:
    """The experiment of a point of the sweep over ``base``.

    A file that has the same heads under the demo's own name (``moh_75``) goes before the name made
    up here, so that nothing is trained twice.

    Raises:
        ValueError: ``base`` is not named as a baseline.
    """
    match = _BASE.fullmatch(base)
    if match is None:
        raise ValueError(f"base {base!r} is no baseline: its name must have mha in its last part")
    folder, rest = match["folder"], match["rest"]
    own = f"{folder}moh_{percent(point.ratio)}{rest}"
    if point == Point(point.ratio) and _has_heads_of(EXPERIMENT_FILES / f"{own}.yaml", point):
        return own
    return f"{folder}{point.id}{rest}"


def _has_heads_of(file: Path, point: Point) -> bool:
    """Whether an experiment's heads are given by this ratio, and not by a plan of their own."""
    if not file.is_file():
        return False
    found = _HEADS.search(file.read_text())
    heads = HEADS_FILES / f"{found[1]}.yaml" if found else None
    return heads is not None and yaml.safe_load(heads.read_text()).get("ratio") == point.ratio


def point_of(name: str) -> tuple[str, Point] | None:
    """The baseline and the point that an experiment's name stands for, None for other names."""
    match = _POINT.fullmatch(name)
    if match is None:
        return None
    shared = None if match["shared"] is None else float(match["shared"]) / 100
    point = Point(float(match["percent"]) / 100, shared, match["control"] or "")
    base = f"{match['folder']}mha{match['rest']}"
    return (base, point) if experiment_of(base, point) == name else None


def register(names: Iterable[str]) -> None:
    """Make experiments of sweeps known to Hydra, those among ``names`` that are any."""
    for name in names:
        found = point_of(name)
        if found is None or (EXPERIMENT_FILES / f"{name}.yaml").is_file():
            continue
        base, point = found
        if not (EXPERIMENT_FILES / f"{base}.yaml").is_file():
            continue
        folder, _, leaf = name.rpartition("/")
        ConfigStore.instance().store(
            group=f"experiment/{folder}".rstrip("/"),
            name=leaf,
            package="_global_",
            node={
                "defaults": [base, {"override /heads": "moh_ratio"}, "_self_"],
                "name": name,
                "heads": point.heads,
            },
        )


def points(
    ratios: Sequence[float],
    controls: Sequence[str] = (),
    control_ratios: Sequence[float] | None = None,
    shares: Sequence[float] | None = None,
) -> list[Point]:
    """The points of a sweep in order: each ratio, its controls after it.

    Where every head is active nothing is selected: there the selection controls would be MoH itself
    and are left out.

    Args:
        control_ratios: where the controls stand; None for every ratio. Those that are not among
            ``ratios`` are added, since a control without its MoH says nothing.
        shares: a point for each share of shared heads instead of the usual one; no controls.
    """
    if shares:
        return [Point(ratio, share) for ratio in ratios for share in shares]
    where = list(ratios if control_ratios is None else control_ratios) if controls else []
    found = []
    for ratio in sorted({*ratios, *where}):
        found.append(Point(ratio))
        for control in controls if ratio in where else ():
            if ratio < 1 or "selection" not in CONTROLS[control]:
                found.append(Point(ratio, control=control))
    return found
