"""The sweep over tightness: the requested runs, and runs without the search for more promises."""

from __future__ import annotations

from typing import NoReturn

import pytest

from tessera.benchmarks.deadlines.bench_deadline import (
    ELASTICFLOW,
    LOOK_AHEAD,
    PAPER_ELASTICFLOW,
    PLANNED,
    figures_of,
)
from tessera.benchmarks.deadlines.bench_deadline import _run_sweep as swept_of
from tessera.benchmarks.deadlines.bench_deadline import _sweep_tasks as asked_of
from tessera.simulator.comparison.runs import RunRequest
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.simulator.sweeps.runner import Sweep
from tessera.solvers.lookahead import exact
from tessera.solvers.rounds.options import RoundOptions
from tests.support.worlds import StoppedClock, a_scenario, an_arrival, some_specs

SMALL = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.03, jobs=6, load=2.0)


def cp_sat_was_asked(monkeypatch: pytest.MonkeyPatch, *, search: bool) -> bool:
    """Return whether CP-SAT was called when two jobs arrived, only one of which could be promised.

    A part of the lighter one would fit, too, so prices do not prove that one is best.
    """

    def never(*_: object) -> NoReturn:
        raise LookupError

    monkeypatch.setattr(exact, "solve_admission", never)
    jobs = [an_arrival(f"j{k}", deadline_s=1500.0, weight=4.0 - k / 2) for k in range(2)]
    decide = Decider(RoundOptions(objective="deadline"), search=search)
    scenario = a_scenario(*jobs, nodes=some_specs(("a100", 1, 1)))
    try:
        simulate(scenario, decide, Conditions(), StoppedClock())
    except LookupError:
        return True
    return False


def test_without_search_only_the_first_fit_makes_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cp_sat_was_asked(monkeypatch, search=True)
    assert not cp_sat_was_asked(monkeypatch, search=False)


def test_elasticflow_as_published_takes_part_if_its_data_is_known() -> None:
    costs = RunRequest(work=SMALL, policy="")
    requests = asked_of(costs, [PLANNED, ELASTICFLOW], 1)
    assert list(requests) == [PLANNED, ELASTICFLOW]
    assert requests[PLANNED].policy == PLANNED
    assert PAPER_ELASTICFLOW not in requests


def test_the_margins_of_planned_and_of_look_ahead_are_separate_figures() -> None:
    requests = asked_of(
        RunRequest(work=SMALL, policy="", search=False), [LOOK_AHEAD, PLANNED, "edf"], 1
    )
    figures = figures_of(swept_of(requests, (1.5,), range(1), Sweep(workers=0)))
    assert figures["planned_worst_margin_tightness"] == 1.5
    assert float(figures["planned_worst_margin_vs_any"]) >= 0
    assert figures["admitted_missed"] == 0
