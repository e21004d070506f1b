"""The conditions of a run, the times of its rounds, and its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tessera.formulation.answer.check import Violation
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.hazards import (
    DAY_S,
    Failure,
    Hazards,
    Straggler,
    draw_failures,
    draw_stragglers,
)
from tessera.simulator.overheads import Overheads, preset_overheads
from tessera.simulator.run import Conditions, Decider, Result
from tessera.simulator.scenario import Scenario
from tessera.simulator.truth import perturb_estimates
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.worlds import (
    COSTLY,
    FREE,
    GREEDY,
    a_profile,
    a_scenario,
    a_world,
    an_arrival,
    give,
    simulate_scenario,
    some_specs,
)

ONE_GPU = some_specs(("a100", 1, 1))


def rounds_of(result: Result) -> list[float]:
    return [row.at_s for row in result.rounds]


def test_rounds_happen_at_whole_multiples_of_the_period_and_only_while_there_are_jobs() -> None:
    scenario = a_scenario(
        an_arrival("a", 450.0, iterations=100),
        an_arrival("b", 90_000.0, iterations=100),
        an_arrival("c", 90_300.1, iterations=100),
        nodes=ONE_GPU,
        profiles=[a_profile()],
    )
    result = simulate_scenario(scenario)
    assert rounds_of(result) == [600.0, 90_000.0, 90_600.0]
    assert result.end_s.tolist() == [700.0, 90_100.0, 90_700.0]


def test_with_a_gap_rounds_are_those_of_a_server_with_that_gap_and_period() -> None:
    arrivals = [
        an_arrival(f"j{at_s}", at_s, iterations=10**6, max_gpus=1) for at_s in (0, 1, 2, 50, 900)
    ]
    scenario = a_scenario(*arrivals)
    result = simulate_scenario(scenario, on_events=True, spacing_s=3.0, horizon_s=1300.0)
    assert rounds_of(result) == [0.0, 3.0, 50.0, 350.0, 650.0, 900.0, 1200.0]


def test_events_that_no_round_sees_do_not_delay_rounds_on_events() -> None:
    """A straggler at 990 s calls for no decision; the arrival at 1,000 s does."""
    scenario = a_scenario(
        an_arrival("a", 10.0, iterations=10_000),
        an_arrival("b", 1000.0, iterations=10_000),
        profiles=[a_profile()],
    )
    slow = [Straggler(node="a100-0", start_s=990.0, end_s=995.0, factor=2.0)]
    result = simulate_scenario(scenario, on_events=True, stragglers=slow, horizon_s=2000.0)
    assert rounds_of(result) == [10.0, 1000.0]


def test_jobs_running_at_the_horizon_are_logged_until_then() -> None:
    """The horizon is in the middle of a segment and between two rounds."""
    scenario = a_scenario(an_arrival("a", iterations=10_000), profiles=[a_profile()])
    result = simulate_scenario(scenario, overheads=COSTLY, horizon_s=1000.0)
    last = result.segments[-1]
    assert (last.start_s, last.ready_s, last.end_s, last.ended_by) == (0.0, 31.0, 1000.0, "horizon")
    assert last.iterations == 969
    assert (result.ended_s, result.state, result.stuck) == (1000.0, ("running",), False)
    assert math.isinf(result.end_s[0])


def test_jobs_that_arrive_after_the_horizon_are_not_part_of_the_run() -> None:
    scenario = a_scenario(an_arrival("a"), an_arrival("b", 5000.0), profiles=[a_profile()])
    result = simulate_scenario(scenario, overheads=replace(FREE, profile_s=100.0), horizon_s=2000.0)
    assert result.state == ("succeeded", "held")
    assert [one.arrival_s for one in result.tasks] == [0.0]
    assert result.profiling_gpu_s == 100.0


def test_a_run_is_stuck_if_nothing_can_start_the_remaining_jobs() -> None:
    """No node ever returns, so the job waits. Without a limit of patience the run would never end."""
    scenario = a_scenario(an_arrival("a", 100.0), nodes=ONE_GPU, profiles=[a_profile()])
    gone = [Failure(node="a100-0", down_s=1.0, up_s=math.inf)]
    for on_events in (False, True):
        result = simulate_scenario(scenario, failures=gone, patience_s=7200.0, on_events=on_events)
        assert result.stuck
        assert result.state == ("queued",)
        assert 7200.0 < result.ended_s <= 8000.0


def test_a_run_is_not_stuck_while_a_node_may_still_return() -> None:
    scenario = a_scenario(an_arrival("a", 100.0), nodes=ONE_GPU, profiles=[a_profile()])
    gone = [Failure(node="a100-0", down_s=1.0, up_s=50_000.0)]
    result = simulate_scenario(scenario, failures=gone, patience_s=7200.0)
    assert (result.stuck, result.end_s.tolist()) == (False, [51_100.0])


def test_a_round_that_breaks_a_rule_changes_nothing_but_is_counted_and_numbered() -> None:
    decider, numbers = Decider(GREEDY), []

    def decide(snapshot: Snapshot) -> RoundOutcome:
        numbers.append(snapshot.round_number)
        outcome = decider(snapshot)
        if snapshot.round_number == 1:
            broken = Violation(rule="none", detail="made up")
            outcome = replace(outcome, violations=(broken,))
        return outcome

    result = simulate_scenario(a_scenario(an_arrival("a")), decide=decide)
    assert result.refused == 1
    assert result.first_start_s.tolist() == [300.0]
    assert numbers[:2] == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"round_s": 0.0},
        {"round_s": math.inf},
        {"horizon_s": 0.0},
        {"patience_s": -1.0},
        {"spacing_s": 3.0},
        {"spacing_s": -1.0, "on_events": True},
    ],
)
def test_meaningless_conditions_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Conditions(**wrong)  # type: ignore[arg-type]


# scenarios


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (lambda: a_scenario(nodes=some_specs(("a100", 1, 4)), types=["v100"]), "gpu_types lacks"),
        (lambda: a_scenario(nodes=some_specs(("a100", 1, 0))), "at least one GPU"),
        (lambda: a_scenario(nodes=some_specs(("a100", 1, 4), ("a100", 1, 2))), "unique names"),
        (lambda: a_scenario(an_arrival("a"), an_arrival("a")), "unique names"),
        (lambda: a_scenario(an_arrival("a", 5.0), an_arrival("b", 1.0)), "ordered by time"),
        (lambda: a_scenario(an_arrival("a", -1.0)), "ordered by time"),
        (lambda: a_scenario(an_arrival("a", math.nan)), "ordered by time"),
        (lambda: a_scenario(an_arrival("a", math.inf)), "ordered by time"),
        (lambda: a_scenario(an_arrival("a", iterations=0)), "no iterations"),
        (lambda: a_scenario(an_arrival("a", requested_gpu_type="h100")), "the type h100"),
        (lambda: a_scenario(an_arrival("a", avoid_nodes=("x",))), "the node x"),
        (lambda: a_scenario(tenants=[TenantSpec(name="t", quotas={"h100": 1})]), "the type h100"),
    ],
)
def test_a_meaningless_scenario_is_refused(scenario: Callable[[], Scenario], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        scenario()


def test_visible_estimates_of_workloads_without_jobs_do_not_shift_the_others() -> None:
    """``aaa`` sorts before bert, so workload indices could be off by one."""
    strange = a_profile(1, 99.0, workload=Workload(model="aaa", params="1B", global_batch=3))
    world = a_world(a_scenario(an_arrival("a")), visible=[strange, a_profile()])
    give(world, "a", ("a100-0", [0]))
    world.advance(1000.0)
    assert not world.store.jobs.live


# errors of estimates


@pytest.mark.parametrize("error", [0.05, 0.1, 0.2])
def test_estimates_are_off_by_the_stated_error_on_average(error: float) -> None:
    cells = [a_profile(n, 2.0) for n in range(1, 20_001)]
    off = np.array([e.iter_time_s / 2.0 - 1.0 for e in perturb_estimates(cells, error, 1)])
    assert np.abs(off).mean() == pytest.approx(error, rel=0.04)
    assert (off > 0).mean() == pytest.approx(0.5, abs=0.02)


def test_all_shapes_of_a_cell_share_one_error_and_infeasible_cells_stay_infeasible() -> None:
    cells = [a_profile(4, 1.0), a_profile(4, 3.0, nodes=2), a_profile(4, math.inf, nodes=4)]
    one, two, four = (e.iter_time_s for e in perturb_estimates(cells, 0.3, 5))
    assert two / one == pytest.approx(3.0)
    assert one != 1.0
    assert math.isinf(four)


def test_errors_are_drawn_by_seed_and_an_error_of_zero_changes_nothing() -> None:
    cells = [a_profile(n, 2.0) for n in (1, 2, 4)]
    assert perturb_estimates(cells, 0.2, 1) == perturb_estimates(cells, 0.2, 1)
    assert perturb_estimates(cells, 0.2, 1) != perturb_estimates(cells, 0.2, 2)
    assert perturb_estimates(cells, 0.0, 1) == cells
    for error in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidInput):
            perturb_estimates(cells, error, 1)


# hazards


MANY = some_specs(("a100", 400, 8))


def test_nodes_fail_and_return_at_the_given_rates() -> None:
    drawn = Hazards(between_failures_s=10 * DAY_S, repair_s=6 * 3600.0)
    failures = draw_failures(MANY, 200 * DAY_S, 3, drawn)
    expected = 400 * 200 / 10.25
    assert len(failures) == pytest.approx(expected, rel=0.04)
    away_s = np.array([f.up_s - f.down_s for f in failures])
    assert away_s.mean() == pytest.approx(6 * 3600.0, rel=0.04)
    assert away_s.std() == pytest.approx(6 * 3600.0, rel=0.06)
    assert failures == sorted(failures, key=lambda f: f.down_s)
    assert max(f.down_s for f in failures) < 200 * DAY_S


def test_nodes_lag_by_at_most_the_stated_factor() -> None:
    stragglers = draw_stragglers(
        MANY, 60 * DAY_S, 3, Hazards(between_lags_s=5 * DAY_S, slowest=3.0)
    )
    factors = np.array([s.factor for s in stragglers])
    assert (factors.min() >= 1.0, factors.max() <= 3.0) == (True, True)
    assert factors.mean() == pytest.approx(2.0, rel=0.03)
    assert len(stragglers) == pytest.approx(400 * 60 / (5 + 2 / 24), rel=0.05)


def test_spells_of_a_node_do_not_overlap_and_do_not_depend_on_other_nodes() -> None:
    often = Hazards(between_failures_s=DAY_S, repair_s=DAY_S)
    failures = draw_failures(MANY[:3], 100 * DAY_S, 9, often)
    alone = draw_failures(MANY[1:2], 100 * DAY_S, 9, often)
    assert [f for f in failures if f.node == "a100-1"] == alone
    assert all(a.up_s < b.down_s for a, b in pairwise(alone))
    assert draw_failures(MANY[:3], 100 * DAY_S, 8, often) != failures
    lags = draw_stragglers(MANY[1:2], 100 * DAY_S, 9, replace(often, between_lags_s=DAY_S))
    assert [s.start_s for s in lags][:3] != [f.down_s for f in alone][:3]


def test_an_infinite_mean_draws_no_failures_and_invalid_means_are_refused() -> None:
    assert draw_failures(MANY, DAY_S, 1, Hazards(between_failures_s=math.inf)) == []
    with pytest.raises(InvalidInput):
        draw_failures(MANY, math.inf, 1)
    for wrong in ({"repair_s": 0.0}, {"between_lags_s": math.nan}, {"slowest": 0.5}):
        with pytest.raises(InvalidInput):
            Hazards(**wrong)


@pytest.mark.parametrize(("down_s", "up_s"), [(-1.0, 5.0), (5.0, 5.0), (math.nan, 5.0)])
def test_a_meaningless_failure_or_straggler_is_refused(down_s: float, up_s: float) -> None:
    with pytest.raises(InvalidInput):
        Failure(node="a", down_s=down_s, up_s=up_s)
    with pytest.raises(InvalidInput):
        Straggler(node="a", start_s=down_s, end_s=up_s, factor=2.0)
    with pytest.raises(InvalidInput):
        Straggler(node="a", start_s=0.0, end_s=1.0, factor=0.9)


def test_a_failure_of_a_missing_node_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no node named a100-9"):
        a_world(a_scenario(), failures=[Failure(node="a100-9", down_s=0.0, up_s=1.0)])


# the table of overheads


@pytest.mark.parametrize(
    ("name", "gpus", "saved", "new_cell", "seconds"),
    [
        ("default", 4, True, True, 39 + 39 + 90),
        ("default", 4, False, True, 39 + 90),
        ("default", 4, True, False, 78),
        ("default", 4, False, False, 39),
        ("full-search", 16, False, True, 39 + 1800),
        ("morphling", 8, True, True, 78),
        ("testbed-pruned", 4, False, True, 39 + 68),
        ("testbed-full", 16, False, True, 39 + 31),
        ("testbed-full", 64, False, True, 39 + 31),
        ("none", 8, True, True, 0),
    ],
)
def test_a_start_costs_the_time_in_the_table(
    name: str, gpus: int, saved: bool, new_cell: bool, seconds: float
) -> None:
    assert preset_overheads(name).start_s(gpus, saved=saved, new_cell=new_cell) == seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_s": -1.0},
        {"load_s": math.nan},
        {"load_s": math.inf},
        {"search_s": {}},
        {"search_s": {0: 1.0}},
        {"search_s": {1: math.nan}},
        {"checkpoint_every_s": 0.0},
        {"profile_s": -1.0},
    ],
)
def test_a_meaningless_table_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        Overheads(**wrong)  # type: ignore[arg-type]
