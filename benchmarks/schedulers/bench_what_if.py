"""A benchmark of what-ifs: foretold changes of throughput and waiting, and those that happened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.supposed_changes import SupposedKind, SupposedRun
from tessera.benchmarks.schedulers.supposed_worlds import SPACING_S
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.workloads.synthetic import ArrivalProcess

ARRIVALS: Final[Sequence[ArrivalProcess]] = ("philly-like", "poisson")
"""The generators of jobs, which take turns."""
MEASURES: Final[Mapping[str, float]] = {
    "throughput": 0.0,
    "waiting": 0.5,
    "work": 0.0,
    "wait": SPACING_S,
}
"""The measures, with the change below which a change is noise in any case: effective GPUs and waiting
jobs once the round after the change is carried out, and work (effective GPU-hours) and mean waiting (s)
over the next hour."""
NOISE_SHARE: Final = 0.02
"""The share of a measure below which its true change counts as noise."""
SURE_ERRORS: Final = 2.0
"""The standard errors of a true change below which its direction is not known."""
JUDGED_CHANGES: Final = 50
"""The changes beyond noise from which bounds are judged. With fewer, chance decides."""
LEAST_SIGN_RIGHT: Final = 0.95
LARGEST_ERROR: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedChange:
    """A foretold change of a measure, and what happened. All are in the measure's unit.

    ``happened`` has the measure without and with the change in each realisation.
    """

    kind: str
    measure: str
    foretold: float
    low: float
    high: float
    happened: tuple[tuple[float, float], ...]

    @property
    def changes(self) -> list[float]:
        """Return the true change in each realisation."""
        return [after - before for before, after in self.happened]

    @property
    def true(self) -> float:
        """Return the true change: the mean over the realisations."""
        return float(np.mean(self.changes))

    @property
    def size(self) -> float:
        """Return the measure's mean without or with the change, whichever is larger."""
        return float(np.mean(self.happened, axis=0).max())

    @property
    def least(self) -> float:
        """Return the size below which a change of the measure counts as none."""
        return max(NOISE_SHARE * self.size, MEASURES[self.measure])

    @property
    def is_noise(self) -> bool:
        """Return whether the true change is too small to have a direction, or it is not known."""
        spread = float(np.std(self.changes, ddof=1)) if len(self.changes) > 1 else 0.0
        error = spread / math.sqrt(len(self.changes))
        return abs(self.true) <= max(self.least, SURE_ERRORS * error)

    @property
    def is_calm(self) -> bool:
        """Return whether no change was foretold: a small one, or one whose interval contains 0."""
        return abs(self.foretold) <= self.least or self.low <= 0 <= self.high

    @property
    def is_clear(self) -> bool:
        """Return whether the what-if is sure of a direction: its interval does not contain 0."""
        return self.low > 0 or self.high < 0

    @property
    def sign_right(self) -> bool:
        """Return whether the foretold direction is the true one. No change has no direction."""
        return self.foretold * self.true > 0

    @property
    def error(self) -> float:
        """Return the error of the foretold change, relative to the measure."""
        return abs(self.foretold - self.true) / self.size

    @property
    def error_of_change(self) -> float:
        """Return the error of the foretold change, relative to the true change."""
        return abs(self.foretold - self.true) / abs(self.true)

    @property
    def error_of_no_change(self) -> float:
        """Return the error of foretelling no change, relative to the measure."""
        return abs(self.true) / self.size

    @property
    def covered(self) -> float:
        """Return the share of the realisations whose change lies in the interval."""
        return float(np.mean([self.low <= change <= self.high for change in self.changes]))

    def once(self) -> JudgedChange:
        """Return the judgement by the first realisation only."""
        return replace(self, happened=self.happened[:1])


@register_case(
    "what-if",
    smoke={
        "cases": 2,
        "jobs": 12,
        "futures": 4,
        "realisations": 2,
        "horizon_s": 600.0,
        "workers": 0,
    },
    sign_right=(">=", LEAST_SIGN_RIGHT),
    median_error=("<=", LARGEST_ERROR),
)
@with_sweep
def measure_what_if(
    *,
    cases: Annotated[int, typer.Option(min=1, help="Number of changes that are foretold.")] = 100,
    jobs: Annotated[int, typer.Option(min=10, help="Number of jobs of each case.")] = 100,
    load: Annotated[float, typer.Option(min=0.1, help="Load of the jobs on the GPUs.")] = 2.5,
    futures: Annotated[int, typer.Option(min=4, help="Pairs of futures of each what-if.")] = 16,
    realisations: Annotated[
        int, typer.Option(min=2, help="Worlds in which each change really happens.")
    ] = 6,
    known: Annotated[
        bool,
        typer.Option("--known", help="Let the what-if know what comes: a limit for all of them."),
    ] = False,
    horizon_s: Annotated[
        float, typer.Option(min=600.0, help="Seconds over which changes are foretold.")
    ] = 3600.0,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Foretell what a change does in the middle of a run, and simulate the run without and with it.

    Kinds of changes and two generators of jobs take turns: a quarter to a half more nodes of a type,
    10 to 30 % of the nodes lost, another job, 10 to 30 % of the running jobs removed, a job's weight
    times ten or a tenth, and another objective. A case has its own jobs on 64 GPUs of the published
    cluster's types, more than it can run at once. The what-if sees the snapshot, and the submissions
    before it. Jobs to come are hidden from it, a quarter of the jobs ends early, and times are wrong
    by 10 % on average, except on Cells on which a job has run, whose times are measured.

    Four measures are foretold from futures: throughput (effective GPUs) and waiting jobs once the round
    after the change is carried out, and work (effective GPU-hours) and mean waiting over the next hour.
    What-ifs foretell expectations. So the true change is the mean over several realisations of what
    comes next, with the same past: other jobs come next, and other jobs end early. A single one also
    depends on chance, for one job that comes or ends at another time changes all later rounds. Figures
    that end with ``once`` judge by the first realisation only.

    A true change is noise if it is at most 2 % of the measure, half a job or a minute of waiting, or
    not larger than two standard errors of its mean, so that its direction is not known. ``calm_share``
    is the share of such changes for which no clear change was foretold. All others are judged.
    ``sign_right`` is the share of these whose direction is right, where a foretold change of exactly
    0 is wrong. ``sign_right_clear`` is that of those whose interval does not contain 0, which are the
    share ``clear_share``.

    ``median_error`` is the median of the error over the measure itself, such as the mean waiting: it
    says how far off the foretold throughput or waiting is. ``median_error_of_no_change`` is that of
    who foretells no change. ``median_error_of_change`` is the error over the true change, where no
    change has an error of 1. A change is the difference of two measures, each of which depends on
    times that nobody has measured, so that even the best what-if has a large one. ``covered`` is the
    share of realisations, those of noise included, within the foretold 80 % intervals.

    With ``--known``, futures have the jobs to come, the ends and the times of the realisations. What
    is left is the error of the futures' own mechanics, which no knowledge of chance can lessen.

    The bounds are aims, and are waived with fewer than 50 changes beyond noise. No constant of
    what-ifs was chosen on these cases.
    """
    kinds = list(SupposedKind)
    runs = {}
    for number in range(cases):
        kind, turn = kinds[number % len(kinds)], number // len(kinds)
        own = 1000 * (seed + 1) + number
        arrivals = ARRIVALS[turn % len(ARRIVALS)]
        runs[f"{number}: {kind}, {arrivals}"] = SupposedRun(
            work=WorkloadSpec(
                trace=SYNTHETIC,
                gpus_share=0.05,
                jobs=jobs,
                load=load,
                rounds=10**6,
                arrivals_as=arrivals,
                seed=own,
            ),
            kind=kind,
            moment=float(np.random.default_rng([own, 2]).uniform(0.4, 0.7)),
            horizon_s=horizon_s,
            futures=futures,
            realisations=realisations,
            known=known,
        )
    results = sweep.run([run.task(name) for name, run in runs.items()])
    judged = [change for result in results.values() for change in judge_result(result)]
    figures = describe_changes(judged)
    is_judged = sum(not change.is_noise for change in judged) >= JUDGED_CHANGES
    return Report(
        seed=seed,
        figures={"cases": cases, **figures},
        waived=frozenset() if is_judged else frozenset({"sign_right", "median_error"}),
        table=_table(judged),
    )


def judge_result(result: Mapping[str, Any]) -> list[JudgedChange]:
    """Return the judged changes of a case, one for each measure."""
    return [
        JudgedChange(
            kind=result["kind"],
            measure=measure,
            foretold=foretold["change"],
            low=foretold["low"],
            high=foretold["high"],
            happened=tuple((before, after) for before, after in _of(result, measure)),
        )
        for measure, foretold in result["foretold"].items()
    ]


def _of(result: Mapping[str, Any], measure: str) -> list[Sequence[float]]:
    return [realisation[measure] for realisation in result["happened"]]


def describe_changes(judged: Sequence[JudgedChange]) -> dict[str, Figure]:
    """Return the figures of judged changes: of all, by one realisation, and by measure."""
    figures = _figures(judged)
    once = _figures([change.once() for change in judged])
    names = "sign_right", "median_error", "median_error_of_change"
    figures |= {f"{name}_once": once[name] for name in names}
    for measure in MEASURES:
        own = _figures([change for change in judged if change.measure == measure])
        figures |= {f"{name}_{measure}": own[name] for name in (*names, "covered")}
    return figures


def _figures(judged: Sequence[JudgedChange]) -> dict[str, Figure]:
    noise = [change for change in judged if change.is_noise]
    large = [change for change in judged if not change.is_noise]
    clear = [change for change in large if change.is_clear]
    return {
        "changes": len(judged),
        "noise_share": _share(noise, judged),
        "calm_share": _share([c for c in noise if c.is_calm], noise),
        "sign_right": _share([c for c in large if c.sign_right], large),
        "clear_share": _share(clear, large),
        "sign_right_clear": _share([c for c in clear if c.sign_right], clear),
        "median_error": _median([c.error for c in large]),
        "median_error_of_no_change": _median([c.error_of_no_change for c in large]),
        "median_error_of_change": _median([c.error_of_change for c in large]),
        "covered": _mean([c.covered for c in judged]),
    }


def _share(part: Sequence[JudgedChange], whole: Sequence[JudgedChange]) -> float:
    return len(part) / len(whole) if whole else math.nan


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _table(judged: Sequence[JudgedChange]) -> list[dict[str, Figure | str]]:
    """Return a row for each kind of change and measure."""
    rows: list[dict[str, Figure | str]] = []
    for kind in SupposedKind:
        for measure in MEASURES:
            own = [c for c in judged if c.kind == kind and c.measure == measure]
            if own:
                rows.append({"kind": kind.value, "measure": measure, **_figures(own)})
    return rows
