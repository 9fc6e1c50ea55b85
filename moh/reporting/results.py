"""What the runs of a row add up to: state, mean and spread over seeds, gap to the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moh.reporting.records import Metric, Record, Records
from moh.reporting.spec import DIRECTIONS, ColumnSpec, RowSpec, TableDefinition

# Units a value is recorded in -> units a table may show it in -> factor.
_SCALES = {("", "%"): 100.0, ("", "M"): 1e-6, ("s", "min"): 1 / 60, ("s", "h"): 1 / 3600}


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; one value has no spread, so None."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def scale(unit: str, shown: str) -> float:
    """Factor from a recorded unit to the shown one.

    Raises:
        ValueError: units of different things.
    """
    if unit == shown:
        return 1.0
    if (unit, shown) not in _SCALES:
        raise ValueError(f"recorded in {unit or 'no unit'!r}, cannot be shown in {shown!r}")
    return _SCALES[unit, shown]


@dataclass(frozen=True)
class State:
    """What can be said of a row, in one word, with what must be known beside it.

    ``complete`` is True where the numbers are those of the table's protocol in full; anything else
    stays marked wherever it is shown and takes part in no gap and no judgement.
    """

    word: str  # not run | smoke | partial | changed | demo | done | matched | off | blocked
    detail: str = ""

    @property
    def complete(self) -> bool:
        """True where the numbers may be compared."""
        return self.word in ("demo", "done", "matched", "off")

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})" if self.detail else self.word


@dataclass(frozen=True)
class Score:
    """One metric of one row.

    Attributes:
        values: seed -> value, in the column's unit.
        stderr: mean standard error over items, in the same unit.
    """

    values: Mapping[int, float]
    stderr: float | None
    marks: tuple[str, ...]

    @property
    def n(self) -> int:
        """Seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return mean_and_sd(list(self.values.values()))[0]

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        return mean_and_sd(list(self.values.values()))[1]


@dataclass(frozen=True)
class Gap:
    """Row minus baseline, in the column's unit.

    Attributes:
        value: mean of the differences of common seeds, else difference of the means.
        n: common seeds; 0 where there are none.
        sd: standard deviation of those differences; None for fewer than two.
        item_error: where no sd is known, the combined standard error over items, if recorded.
        verdict: ``better``, ``worse``, ``equal``, ``within spread`` or ``within item error``;
            ``higher`` or ``lower`` where neither is better.
    """

    value: float
    n: int
    sd: float | None
    item_error: float | None
    verdict: str


@dataclass(frozen=True)
class RowResult:
    """A row and the runs that stand for it, one a seed."""

    row: RowSpec
    runs: tuple[Record, ...]
    state: State
    remarks: tuple[str, ...] = ()

    def score(self, column: ColumnSpec) -> Score | None:
        """The column's metric over this row's seeds; None where no run has it.

        Raises:
            ValueError: a unit or a direction that contradicts the column's.
        """
        found = {
            run.seed: metric
            for run in self.runs
            if (metric := _metric(run, column, self.row)) is not None
        }
        if not found:
            return None
        for metric in found.values():
            _check_direction(column, metric, self.row)
        factors = {seed: _factor(column, metric, self.row) for seed, metric in found.items()}
        errors = [
            metric.stderr * factors[seed]
            for seed, metric in found.items()
            if metric.stderr is not None
        ]
        return Score(
            values={seed: metric.value * factors[seed] for seed, metric in found.items()},
            stderr=statistics.fmean(errors) if len(errors) == len(found) else None,
            marks=tuple(dict.fromkeys(mark for item in found.values() for mark in item.marks)),
        )


def collect(definition: TableDefinition, records: Records) -> dict[str, RowResult]:
    """Results of every row, by row id, judged against the paper where it states a value."""
    results = {}
    for row in definition.spec.rows:
        runs = records.of(row.experiment) if row.experiment else []
        result = _select(row, runs, definition)
        results[row.id] = _judge(result, definition)
    return results


def compare(score: Score, baseline: Score, column: ColumnSpec) -> Gap:
    """Difference of a row to its baseline with the spread of that difference itself."""
    common = sorted(score.values.keys() & baseline.values.keys())
    sd = None
    if common:
        differences = [score.values[seed] - baseline.values[seed] for seed in common]
        value, sd = mean_and_sd(differences)
    else:
        value = score.mean - baseline.mean
    item_error = None
    if len(common) == 1 and score.stderr is not None and baseline.stderr is not None:
        item_error = math.hypot(score.stderr, baseline.stderr)
    if value == 0:
        verdict = "equal"
    elif sd is not None and abs(value) <= sd:
        verdict = "within spread"
    elif item_error is not None and abs(value) <= item_error:
        verdict = "within item error"
    else:
        words = ("higher", "lower") if column.direction == "neither" else ("better", "worse")
        verdict = words[value * (DIRECTIONS[column.direction] or 1) < 0]
    return Gap(value, len(common), sd, item_error, verdict)


def _select(row: RowSpec, runs: Sequence[Record], definition: TableDefinition) -> RowResult:
    """Pick one run a seed, all of one configuration: the table's protocol, finished, newest."""
    spec = definition.spec
    if not runs:
        state = State("blocked", row.blocked) if row.blocked else State("not run")
        return RowResult(row, (), state)

    needed = [*row.needs, *(["checkpoint"] if row.calibration else [])]

    def rank(group: list[Record]) -> tuple[bool, bool, bool, str]:
        return (
            group[0].protocol == spec.protocol,
            not group[0].changes(needed),
            any(run.finished for run in group),
            max(run.ended for run in group),
        )

    groups: dict[str, list[Record]] = {}
    for run in runs:
        groups.setdefault(run.configuration, []).append(run)
    chosen = max(groups.values(), key=rank)
    by_seed: dict[int, Record] = {}
    for run in sorted(chosen, key=lambda run: (run.finished, run.ended)):
        by_seed[run.seed] = run
    finished = {seed: run for seed, run in by_seed.items() if run.finished}
    used = finished or by_seed
    remarks = []
    if len(groups) > 1:
        remarks.append(f"{row.label}: runs of {len(groups) - 1} other configuration(s) left out")
    for seed in sorted(by_seed.keys() - used.keys()):
        remarks.append(f"{row.label}: seed {seed} is partial and left out of the mean")
    picked = tuple(used[seed] for seed in sorted(used))
    # An evaluation of given weights has no seed worth repeating.
    seeds = 1 if row.calibration else spec.seeds
    state = _state(picked, spec.protocol, seeds, picked[0].changes(needed))
    return RowResult(row, picked, state, tuple(remarks))


def _state(runs: Sequence[Record], protocol: str, seeds: int, changes: Sequence[str]) -> State:
    trained = f"{100 * min(run.share for run in runs):.0f} %"
    if runs[0].protocol == "smoke" != protocol:
        return State("smoke", "" if runs[0].finished else trained)
    if runs[0].protocol != protocol:
        return State("changed", f"{runs[0].protocol} protocol")
    if not runs[0].finished:
        return State("partial", trained)
    if not any(run.metrics for run in runs):
        return State("partial", "trained, not evaluated")
    if changes:
        return State("changed", ", ".join(changes))
    detail = f"{len(runs)} of {seeds} seeds" if len(runs) < seeds else ""
    return State("demo" if protocol == "demo" else "done", detail)


def _judge(result: RowResult, definition: TableDefinition) -> RowResult:
    """Turn ``done`` into ``matched`` or ``off`` where a tolerance and a paper value are stored.

    A run that measured nothing of what the table shows is not done, however finished it is.
    """
    metrics = [column for column in definition.spec.columns if column.metric]
    measured = any(result.score(column) for column in metrics) or not metrics
    if result.state.complete and not measured:
        return replace(result, state=State("partial", "not measured"))
    if result.state.word != "done":
        return result
    hits = []
    for column in definition.spec.columns:
        if column.metric is None:
            continue
        paper = definition.paper_value(result.row, column.key)
        tolerance = definition.tolerance(result.row, column)
        score = result.score(column)
        if paper is not None and tolerance is not None and score is not None:
            # A rounding error of the subtraction must not turn "at the tolerance" into "off".
            hits.append(abs(score.mean - paper) <= tolerance + 1e-9)
    if not hits:
        return result
    state = State("matched" if all(hits) else "off", result.state.detail)
    return replace(result, state=state)


def _metric(run: Record, column: ColumnSpec, row: RowSpec) -> Metric | None:
    """A run's value of a column: recorded, the mean of recorded ones, or of its head load."""
    if column.head_load is not None:
        return _last_layer(run, column.head_load)
    if not column.mean_of:
        return run.metrics.get(column.metric or "")
    parts = [run.metrics[name] for name in column.mean_of if name in run.metrics]
    if len(parts) < len(column.mean_of):
        return None
    factors = [_factor(column, part, row) for part in parts]
    errors = [
        part.stderr * factor
        for part, factor in zip(parts, factors, strict=True)
        if part.stderr is not None
    ]
    return Metric(
        value=statistics.fmean(p.value * f for p, f in zip(parts, factors, strict=True)),
        unit=column.unit,
        # The benchmarks' items are independent of each other.
        stderr=math.hypot(*errors) / len(parts) if len(errors) == len(parts) else None,
        marks=tuple(dict.fromkeys(mark for part in parts for mark in part.marks)),
    )


def _last_layer(run: Record, part: str) -> Metric | None:
    """Least, mean or largest head load of the last routed layer."""
    if run.head_load is None:
        return None
    loads = run.head_load.overall[-1]
    of = {"min": min(loads), "mean": statistics.fmean(loads), "max": max(loads)}
    return Metric(of[part])


def _factor(column: ColumnSpec, metric: Metric, row: RowSpec) -> float:
    try:
        return scale(metric.unit, column.unit)
    except ValueError as error:
        raise ValueError(f"{column.metric} of {row.experiment}: {error}") from None


def _check_direction(column: ColumnSpec, metric: Metric, row: RowSpec) -> None:
    wanted = DIRECTIONS[column.direction]
    if wanted and metric.higher_is_better not in (None, wanted > 0):
        raise ValueError(
            f"{column.metric} of {row.experiment}: the table says {column.direction} is better, "
            f"the record says {'higher' if metric.higher_is_better else 'lower'}"
        )
