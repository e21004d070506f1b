"""A benchmark of what-ifs: foretold changes of throughput and waiting, and those that happened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.supposed_changes import (
    SPACING_S,
    SupposedKind,
    SupposedRun,
)
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.workloads.synthetic import ArrivalProcess

ARRIVALS: Final[Sequence[ArrivalProcess]] = ("philly-like", "poisson")
"""The generators of jobs, which take turns."""
MEASURES: Final = ("work", "wait")
"""The measures: throughput as work done in the hours after the change, and mean waiting."""
NOISE_SHARE: Final = 0.02
"""The share of a measure without the change below which its true change counts as noise."""
LEAST_WAIT_S: Final = SPACING_S
"""The change of mean waiting below which it counts as noise in any case: the time between rounds."""
JUDGED_CHANGES: Final = 50
"""The changes beyond noise from which bounds are judged. With fewer, chance decides."""
LEAST_SIGN_RIGHT: Final = 0.95
LARGEST_ERROR: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedChange:
    """A foretold change of a measure, and what happened. All are in the measure's unit."""

    kind: str
    measure: str
    foretold: float
    low: float
    high: float
    true: float
    true_before: float

    @property
    def noise(self) -> float:
        """Return the size below which a change of the measure counts as noise."""
        least = LEAST_WAIT_S if self.measure == "wait" else 0.0
        return max(NOISE_SHARE * self.true_before, least)

    @property
    def is_noise(self) -> bool:
        """Return whether the true change is too small to have a direction."""
        return abs(self.true) <= self.noise

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
        """Return the relative error of the foretold change."""
        return abs(self.foretold - self.true) / abs(self.true)


@register_case(
    "what-if",
    smoke={"cases": 2, "jobs": 12, "futures": 4, "horizon_s": 600.0, "workers": 0},
    sign_right=(">=", LEAST_SIGN_RIGHT),
    median_error=("<=", LARGEST_ERROR),
)
@with_sweep
def measure_what_if(
    *,
    cases: Annotated[int, typer.Option(min=1, help="Number of changes that are foretold.")] = 100,
    jobs: Annotated[int, typer.Option(min=10, help="Number of jobs of each case.")] = 100,
    load: Annotated[float, typer.Option(min=0.1, help="Load of the jobs on the GPUs.")] = 2.5,
    futures: Annotated[int, typer.Option(min=4, help="Pairs of futures of each what-if.")] = 8,
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
    before it. Jobs to come are hidden from it, times are wrong by 10 % on average, and a quarter of
    the jobs ends early. It foretells the median change of the work that is done in the next hour
    (effective GPU-hours, so throughput), and of the mean waiting of all jobs that are in both runs.

    A true change of less than 2 % of the measure, and of less than a minute of waiting, is noise: it
    has no direction that anyone could foretell. ``noise_share`` is the share of such changes, and
    ``calm_share`` that of them for which the foretold change is as small, too. All other changes are
    judged. ``sign_right`` is the share of these whose direction is right, where a foretold change of
    exactly 0 is wrong. ``sign_right_clear`` is that of those whose interval does not contain 0, which
    are the share ``clear_share``. ``median_error`` is the median of the error over the true change.
    ``covered`` is the share of true changes, noise included, within the foretold 80 % intervals.

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
            foretold=result[f"{measure}_change"],
            low=result[f"{measure}_low"],
            high=result[f"{measure}_high"],
            true=result[f"{measure}_true"],
            true_before=result[f"{measure}_true_before"],
        )
        for measure in MEASURES
    ]


def describe_changes(judged: Sequence[JudgedChange]) -> dict[str, Figure]:
    """Return the figures of judged changes, of all and by measure."""
    figures = _figures(judged)
    for measure in MEASURES:
        own = _figures([change for change in judged if change.measure == measure])
        figures |= {
            f"{name}_{measure}": own[name] for name in ("sign_right", "median_error", "covered")
        }
    return figures


def _figures(judged: Sequence[JudgedChange]) -> dict[str, Figure]:
    noise = [change for change in judged if change.is_noise]
    large = [change for change in judged if not change.is_noise]
    clear = [change for change in large if change.is_clear]
    return {
        "changes": len(judged),
        "noise_share": _share(noise, judged),
        "calm_share": _share([c for c in noise if abs(c.foretold) <= c.noise], noise),
        "sign_right": _share([c for c in large if c.sign_right], large),
        "clear_share": _share(clear, large),
        "sign_right_clear": _share([c for c in clear if c.sign_right], clear),
        "median_error": float(np.median([c.error for c in large])) if large else math.nan,
        "covered": _share([c for c in judged if c.low <= c.true <= c.high], judged),
    }


def _share(part: Sequence[JudgedChange], whole: Sequence[JudgedChange]) -> float:
    return len(part) / len(whole) if whole else math.nan


def _table(judged: Sequence[JudgedChange]) -> list[dict[str, Figure | str]]:
    """Return a row for each kind of change and measure."""
    rows: list[dict[str, Figure | str]] = []
    for kind in SupposedKind:
        for measure in MEASURES:
            own = [c for c in judged if c.kind == kind and c.measure == measure]
            if own:
                rows.append({"kind": kind.value, "measure": measure, **_figures(own)})
    return rows
