"""Arena, Morphling, Synergy, AntMan: the decisions that are characteristic of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulation.check import violations
from formulation.lifecycle import JobState
from formulation.placement import Gang
from formulation.policy import Policy
from formulation.snapshot import STATE_CODE, Quotas, Snapshot, Tenants
from formulation.statement import state
from service.rounds import plan_round
from solvers.answers import answer, objective_of, trivial_bound
from solvers.base import Budget
from solvers.greedy import Greedy
from solvers.policies.antman import AntMan
from solvers.policies.arena import Arena
from solvers.policies.base import Published, Scheduler, carried, seen
from solvers.policies.morphling import Morphling
from solvers.policies.registry import names, published
from solvers.policies.synergy import Synergy
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes
from tests.support.problems import brute_force

RUNNING = JobState.RUNNING
BATCH = 256.0
FOREVER = Budget(remaining_s=lambda: math.inf)
MINE = ("arena", "morphling", "synergy", "antman")


def rates(workload: int, gpu_type: int, by_gpus: dict[int, float], **plan: int) -> list[Any]:
    """Return estimates of samples/s by GPU count, all inside one node of 8."""
    return [
        an_estimate(workload, gpu_type, gpus, iter_time_s=BATCH / rate, **plan)
        for gpus, rate in by_gpus.items()
    ]


def a_round(
    jobs: Sequence[dict[str, Any]],
    estimates: Sequence[list[Any]],
    nodes: Sequence[tuple[int, int, int]] = ((0, 1, 8),),
    gangs: dict[int, Gang] | None = None,
) -> Snapshot:
    return a_snapshot(
        nodes=some_nodes(*nodes), jobs=jobs, gangs=gangs,
        estimates=[e for group in estimates for e in group],
    )  # fmt: skip


def decided(
    scheduler: Published, snapshot: Snapshot, policy: Policy | None = None
) -> dict[str, tuple[int, int] | None]:
    """Return (GPU type, GPUs) that each job is to run on, None: it waits."""
    view = seen(snapshot, policy or Policy())
    choice = scheduler.choose(view)
    return {
        name: None if c < 0 else (int(view.draft.gpu_type[c]), int(view.draft.gpus[c]))
        for name, c in zip(snapshot.jobs.name, choice.tolist(), strict=True)
    }


def with_quota(snapshot: Snapshot, tenant: str, gpus: int) -> Snapshot:
    return replace(
        snapshot,
        tenants=Tenants(
            name=(tenant,), weight=np.ones(1), borrow_gpus=np.array([-1]), lends=np.array([True])
        ),
        quotas=Quotas(tenant=np.array([0]), gpu_type=np.array([-1]), gpus=np.array([gpus])),
    )


LINEAR = {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}
FLAT = {1: 10.0, 2: 11.0, 4: 12.0, 8: 13.0}


# --- Arena -----------------------------------------------------------------------------------------


def test_arena_gives_what_was_requested_even_where_more_is_free() -> None:
    found = decided(
        Arena(max_upgrades=0), a_round([a_job("new", requested_gpus=2)], [rates(0, 0, LINEAR)])
    )

    assert found == {"new": (0, 2)}


def test_arena_launches_at_half_the_request_where_the_request_does_not_fit() -> None:
    jobs = [
        a_job("old", 1, state=RUNNING, cell=(0, 4, 1)),
        a_job("big", 0, requested_gpus=8),
    ]

    found = decided(Arena(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, {4: 40.0})]))

    assert found == {"old": (0, 4), "big": (0, 4)}


def test_arena_halves_the_job_that_loses_least_for_a_new_one() -> None:
    jobs = [
        a_job("steep", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("flat", 1, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("new", 2, requested_gpus=2),
    ]
    cells = [rates(0, 0, LINEAR), rates(1, 0, FLAT), rates(2, 0, {2: 20.0})]

    assert decided(Arena(), a_round(jobs, cells)) == {
        "steep": (0, 4), "flat": (0, 2), "new": (0, 2),
    }  # fmt: skip


def test_arena_moves_a_job_to_an_idle_type_rather_than_halving_it() -> None:
    jobs = [
        a_job("mover", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=8),
        a_job("new", 1, requested_gpus=8, requested_type=0),
    ]
    cells = [rates(0, 0, LINEAR), rates(0, 1, {8: 70.0}), rates(1, 0, {8: 80.0, 4: 10.0})]
    snapshot = a_round(jobs, cells, nodes=((0, 1, 8), (1, 1, 8)))

    assert decided(Arena(), snapshot) == {"mover": (1, 8), "new": (0, 8)}
    # where types are fixed, both have to halve
    assert decided(Arena(heterogeneity=False), snapshot) == {"mover": (0, 4), "new": (0, 4)}
    # where counts are fixed, moving is all there is
    assert decided(Arena(elasticity=False), snapshot) == {"mover": (1, 8), "new": (0, 8)}


@pytest.mark.parametrize(
    ("moved_rate", "expected"),
    [(39.0, {"eight": (0, 8), "four": (1, 4)}), (9.0, {"eight": (0, 4), "four": (0, 4)})],
)
def test_arena_takes_the_cheaper_of_two_ways_to_free_as_many_gpus(
    moved_rate: float, expected: dict[str, tuple[int, int]]
) -> None:
    jobs = [
        a_job("eight", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=8),
        a_job("four", 1, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("new", 2, requested_gpus=4),
    ]
    cells = [
        rates(0, 0, {4: 60.0, 8: 80.0}), rates(1, 0, {4: 40.0}), rates(1, 1, {4: moved_rate}),
        rates(2, 0, {4: 40.0}),
    ]  # fmt: skip

    found = decided(Arena(), a_round(jobs, cells, nodes=((0, 1, 12), (1, 1, 4))))

    assert found == {**expected, "new": (0, 4)}


def test_arena_launches_on_a_slower_type_where_that_costs_others_less() -> None:
    jobs = [
        a_job("dear", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=8, weight=9.0),
        a_job("cheap", 1, state=RUNNING, cell=(1, 8, 1), requested_gpus=8),
        a_job("new", 2, requested_gpus=4),
    ]
    cells = [
        rates(0, 0, LINEAR), rates(1, 1, LINEAR), rates(2, 0, {4: 40.0}), rates(2, 1, {4: 30.0}),
    ]  # fmt: skip

    found = decided(Arena(), a_round(jobs, cells, nodes=((0, 1, 8), (1, 1, 8))))

    assert found == {"dear": (0, 8), "cheap": (1, 4), "new": (1, 4)}


def test_arena_scales_down_no_more_often_than_its_depth() -> None:
    jobs = [
        *(a_job(f"r{k}", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2) for k in range(4)),
        a_job("new", 1, requested_gpus=4),
    ]
    cells = [rates(0, 0, {1: 10.0, 2: 15.0}), rates(1, 0, {4: 400.0, 2: 1.0})]
    snapshot = a_round(jobs, cells)

    assert decided(Arena(depth=4), snapshot)["new"] == (0, 4)
    assert decided(Arena(depth=3), snapshot)["new"] == (0, 2)
    assert decided(Arena(depth=1), snapshot)["new"] is None


def test_arena_never_scales_a_job_to_where_it_cannot_run() -> None:
    jobs = [
        a_job("rigid", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=8),
        a_job("new", 1, requested_gpus=4, queue=1, weight=100.0),
    ]

    found = decided(Arena(), a_round(jobs, [rates(0, 0, {8: 80.0}), rates(1, 0, LINEAR)]))

    assert found == {"rigid": (0, 8), "new": None}


def test_arena_gives_idle_gpus_to_the_job_that_gains_most_step_by_step() -> None:
    jobs = [
        a_job("steep", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
        a_job("flat", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
    ]
    snapshot = a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)])

    assert decided(Arena(max_upgrades=1), snapshot) == {"steep": (0, 4), "flat": (0, 2)}
    assert decided(Arena(), snapshot) == {"steep": (0, 4), "flat": (0, 4)}
    assert decided(Arena(elasticity=False), snapshot) == {"steep": (0, 2), "flat": (0, 2)}


def test_arena_weighs_by_raw_samples_only_where_it_is_told_to() -> None:
    jobs = [
        a_job("small", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
        a_job("large", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
    ]
    # the small model gains 500 samples/s of 1,000, the large one 1 of 1
    cells = [rates(0, 0, {2: 1000.0, 4: 1500.0}), rates(1, 0, {2: 1.0, 4: 2.0})]
    snapshot = a_round(jobs, cells, nodes=((0, 1, 6),))

    assert decided(Arena(), snapshot)["large"] == (0, 4)
    assert decided(Arena(objective="samples"), snapshot)["small"] == (0, 4)


BLOCKED = [rates(0, 0, {8: 80.0}), rates(1, 0, {4: 40.0})]


def test_arena_starts_a_later_job_past_a_blocked_one_and_says_so() -> None:
    jobs = [
        a_job("old", 1, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
        a_job("later", 1, requested_gpus=4, submit_s=2.0),
        a_job("stays", 2, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, submit_s=3.0),
    ]
    snapshot = a_round(jobs, [*BLOCKED, rates(2, 0, {4: 40.0})], nodes=((0, 1, 12),))
    view = seen(snapshot, Policy())

    choice = Arena().choose(view)

    assert (choice >= 0).tolist() == [True, False, True, True]
    assert Arena().gives_way(view, choice).tolist() == [False, False, True, False]
    assert decided(Arena(opportunism=False), snapshot)["later"] is None


def test_a_round_records_which_jobs_were_started_past_a_blocked_one() -> None:
    jobs = [
        a_job("old", 1, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
        a_job("later", 1, requested_gpus=4, submit_s=2.0),
    ]
    snapshot = a_round(jobs, BLOCKED, gangs={0: Gang(members=((0, (0, 1, 2, 3)),))})

    outcome = plan_round(
        snapshot, Policy(), Greedy(), FOREVER, scheduler=Scheduler(published=Arena())
    )

    assert outcome.violations == ()
    assert [d.opportunistic for d in outcome.decisions] == [False, False, True]


def test_arena_suspends_those_started_past_a_blocked_job_once_it_fits() -> None:
    jobs = [
        a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
        a_job("guest", 1, state=RUNNING, cell=(0, 4, 1), submit_s=2.0, opportunistic=True),
    ]
    snapshot = a_round(jobs, BLOCKED)

    assert decided(Arena(), snapshot) == {"blocked": (0, 8), "guest": None}
    assert decided(Arena(opportunism=False), snapshot) == {"blocked": None, "guest": (0, 4)}


def test_arena_suspends_nobody_for_a_job_that_would_still_not_fit() -> None:
    jobs = [
        a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
        a_job("guest", 1, state=RUNNING, cell=(0, 4, 1), submit_s=2.0, opportunistic=True),
        a_job("owner", 1, state=RUNNING, cell=(0, 4, 1), submit_s=0.0),
    ]

    found = decided(Arena(), a_round(jobs, BLOCKED))

    assert found == {"blocked": None, "guest": (0, 4), "owner": (0, 4)}


def test_arena_lets_only_the_blocked_jobs_own_queue_scale_others_down() -> None:
    def a_case(queue: int) -> Snapshot:
        jobs = [
            a_job("old", 2, state=RUNNING, cell=(0, 8, 1), requested_gpus=8),
            a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
            a_job("later", 1, requested_gpus=4, submit_s=2.0, queue=queue),
        ]
        return a_round(jobs, [*BLOCKED, rates(2, 0, {4: 70.0, 8: 80.0})])

    assert decided(Arena(), a_case(queue=1))["later"] == (0, 4)
    assert decided(Arena(), a_case(queue=2))["later"] is None


def test_arena_serves_a_promoted_job_before_later_ones_of_the_queue_above() -> None:
    jobs = [
        a_job("waited", 1, requested_gpus=4, submit_s=1.0, queued_s=1.0, queue=2),
        a_job("young", 1, requested_gpus=4, submit_s=900.0, queued_s=900.0, queue=1),
    ]
    snapshot = a_round(jobs, [rates(1, 0, {4: 40.0})], nodes=((0, 1, 4),))  # it is 1000 s

    assert decided(Arena(), snapshot)["young"] == (0, 4)
    assert decided(Arena(), snapshot, Policy(promote_after_s=500.0))["waited"] == (0, 4)


def test_a_request_without_a_cell_blocks_nobody_in_arena() -> None:
    jobs = [
        a_job("never", 0, requested_gpus=2, submit_s=1.0),
        a_job("later", 1, requested_gpus=4, submit_s=2.0),
    ]

    found = decided(Arena(elasticity=False, opportunism=False), a_round(jobs, BLOCKED))

    assert found == {"never": None, "later": (0, 4)}


# --- Morphling -------------------------------------------------------------------------------------


def test_morphling_gives_each_gpu_where_the_curve_is_steepest() -> None:
    jobs = [a_job("flat", 1, requested_gpus=8), a_job("steep", 0, requested_gpus=8)]

    found = decided(Morphling(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)]))

    # the last four GPUs of the flat one add less than the first four of the steep one; to get the next
    # four, the flat one would have to stop, and its first is worth more than any
    assert found == {"flat": (0, 4), "steep": (0, 4)}


def test_morphling_shrinks_the_least_sensitive_job_for_a_steeper_one() -> None:
    jobs = [
        a_job("flat", 1, state=RUNNING, cell=(0, 8, 1), requested_gpus=1),
        a_job("steep", 0, requested_gpus=4),
    ]

    found = decided(Morphling(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)]))

    assert found == {"flat": (0, 4), "steep": (0, 4)}


def test_morphling_needs_only_the_least_demand_that_is_as_fast_as_the_request() -> None:
    jobs = [
        a_job("mine", 0, requested_gpus=4, guaranteed=True),
        a_job("other", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2, guaranteed=True),
    ]
    cells = [rates(0, 0, {1: 5.0, 2: 12.0, 4: 12.0}), rates(1, 0, {2: 20.0})]

    found = decided(Morphling(), a_round(jobs, cells, nodes=((0, 1, 4),)))

    assert found == {"mine": (0, 2), "other": (0, 2)}


def test_morphling_preempts_a_steeper_best_effort_job_for_a_guaranteed_minimum() -> None:
    jobs = [
        a_job("effort", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=1),
        a_job("owed", 1, requested_gpus=8, guaranteed=True),
    ]

    found = decided(Morphling(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)]))

    assert found == {"effort": None, "owed": (0, 8)}


def test_morphling_raises_a_guaranteed_job_to_its_minimum_or_stops_it() -> None:
    def a_case(*, rival_guaranteed: bool) -> dict[str, tuple[int, int] | None]:
        jobs = [
            a_job("owed", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=4, guaranteed=True),
            a_job("rival", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2,
                  guaranteed=rival_guaranteed),
        ]  # fmt: skip
        cells = [rates(0, 0, {2: 20.0, 4: 40.0}), rates(1, 0, {2: 20.0})]
        return decided(Morphling(), a_round(jobs, cells, nodes=((0, 1, 4),)))

    assert a_case(rival_guaranteed=False) == {"owed": (0, 4), "rival": None}
    assert a_case(rival_guaranteed=True) == {"owed": None, "rival": (0, 2)}


def test_morphling_serves_guaranteed_jobs_only_within_the_tenants_quota() -> None:
    jobs = [
        a_job(f"owed-{k}", 0, requested_gpus=2, guaranteed=True, submit_s=float(k))
        for k in range(3)
    ]
    snapshot = a_round(jobs, [rates(0, 0, {2: 20.0})])

    within = decided(Morphling(), with_quota(snapshot, "t", 4))

    assert within == {"owed-0": (0, 2), "owed-1": (0, 2), "owed-2": None}
    assert decided(Morphling(), snapshot)["owed-2"] == (0, 2)


def test_morphling_charges_a_quota_the_least_demand_not_the_request() -> None:
    jobs = [
        a_job(f"owed-{k}", 0, requested_gpus=4, guaranteed=True, submit_s=float(k))
        for k in range(2)
    ]
    snapshot = with_quota(a_round(jobs, [rates(0, 0, {2: 20.0, 4: 20.0})]), "t", 4)

    assert decided(Morphling(), snapshot) == {"owed-0": (0, 2), "owed-1": (0, 2)}
    assert decided(AntMan(), snapshot) == {"owed-0": (0, 4), "owed-1": None}


TWO_PLANS = [
    rates(0, 0, {2: 20.0, 4: 30.0}, degree=1),
    rates(0, 0, {2: 10.0, 4: 60.0, 8: 110.0}, degree=2),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("morphling", (8, 2)),  # resources and plan
        ("morphling-r", (4, 1)),  # the plan that is best as requested, at any count
        ("morphling-e", (2, 1)),  # the requested count, at its best plan
        ("morphling-n", (2, 1)),
    ],
)
def test_morphlings_variants_fix_what_their_names_say(name: str, expected: tuple[int, int]) -> None:
    view = seen(a_round([a_job("j", 0, requested_gpus=2)], TWO_PLANS), Policy())

    (column,) = published(name).choose(view).tolist()

    cell = int(view.draft.cell[column])
    found = int(view.draft.cells.gpus[cell]), int(view.draft.cells.pipeline_degree[cell])
    assert found == expected


def test_morphling_r_stays_on_the_plan_that_a_job_runs_by() -> None:
    job = a_job("j", 0, requested_gpus=2, state=RUNNING, cell=(0, 2, 2))
    view = seen(a_round([job], TWO_PLANS), Policy())

    (column,) = published("morphling-r").choose(view).tolist()

    assert int(view.draft.gpus[column]) == 8


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), share=st.floats(0.1, 0.9))
def test_morphling_never_leaves_a_guaranteed_job_below_its_request(seed: int, share: float) -> None:
    plain = a_random_snapshot(seed, jobs=14)
    owed = np.random.default_rng(seed).random(14) < share
    snapshot = replace(plain, jobs=replace(plain.jobs, guaranteed=owed))
    view = seen(snapshot, Policy())

    choice = Morphling().choose(view)

    for job in np.flatnonzero(owed & (choice >= 0)).tolist():
        mine = slice(int(view.draft.job_start[job]), int(view.draft.job_start[job + 1]))
        at_request = (view.draft.gpu_type[mine] == view.draft.gpu_type[choice[job]]) & (
            view.draft.gpus[mine] <= snapshot.jobs.requested_gpus[job]
        )
        assert view.draft.rate[choice[job]] >= view.draft.rate[mine][at_request].max() * (1 - 1e-9)


# --- Synergy and AntMan ----------------------------------------------------------------------------


def test_synergy_skips_what_does_not_fit_and_changes_no_count() -> None:
    jobs = [
        a_job("old", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, submit_s=3.0),
        a_job("big", 0, requested_gpus=8, submit_s=1.0),
        a_job("small", 0, requested_gpus=2, submit_s=2.0),
    ]

    found = decided(Synergy(), a_round(jobs, [rates(0, 0, LINEAR)]))

    assert found == {"old": (0, 4), "big": None, "small": (0, 2)}


def test_antman_shrinks_then_suspends_best_effort_jobs_for_a_guaranteed_one() -> None:
    def a_case(gpus: int) -> dict[str, tuple[int, int] | None]:
        jobs = [
            a_job("first", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, since_s=1.0),
            a_job("last", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, since_s=2.0),
            a_job("owed", 0, requested_gpus=gpus, guaranteed=True),
        ]
        return decided(AntMan(), a_round(jobs, [rates(0, 0, LINEAR)]))

    assert a_case(2) == {"first": (0, 4), "last": (0, 2), "owed": (0, 2)}
    assert a_case(4) == {"first": (0, 4), "last": None, "owed": (0, 4)}
    assert a_case(8) == {"first": None, "last": None, "owed": (0, 8)}


def test_antman_lets_best_effort_jobs_use_what_is_idle_and_no_more_than_they_requested() -> None:
    jobs = [
        a_job("owed", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2, guaranteed=True),
        a_job("shrunk", 0, state=RUNNING, cell=(0, 1, 1), requested_gpus=2),
        a_job("new", 0, requested_gpus=2),
    ]

    found = decided(AntMan(), a_round(jobs, [rates(0, 0, LINEAR)]))

    assert found == {"owed": (0, 2), "shrunk": (0, 2), "new": (0, 2)}


# --- all of them -----------------------------------------------------------------------------------

NAMES = [name for name in names() if name.startswith(MINE)]


def test_the_registry_has_each_of_them_under_its_own_name() -> None:
    assert len(NAMES) == 11
    assert [published(name).name for name in NAMES] == NAMES


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_every_answer_fits_and_none_is_worth_more_than_the_optimum(name: str, seed: int) -> None:
    policy = Policy()
    snapshot = a_random_snapshot(
        seed, jobs=4, groups=((0, 1, 4), (1, 1, 2)), workloads=3, max_gpus=4
    )
    problem, view = state(snapshot, policy, published=True).problem, seen(snapshot, policy)

    choice = carried(view.draft, problem, published(name).choose(view))

    bound = trivial_bound(problem)
    assert violations(problem, answer(problem, choice, bound=bound, solver=name)) == []
    best = brute_force(state(snapshot, policy).problem)
    assert best is not None
    assert objective_of(problem, choice) <= best


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("morphling")])
def test_where_jobs_run_to_completion_a_second_round_keeps_them_all(name: str) -> None:
    snapshot = a_random_snapshot(3, jobs=30)
    view = seen(snapshot, Policy())
    choice = published(name).choose(view)
    runs = choice >= 0
    cells, cell = view.draft.cells, view.draft.cell[np.maximum(choice, 0)]
    jobs = replace(
        snapshot.jobs,
        state=np.where(runs, STATE_CODE[RUNNING], STATE_CODE[JobState.QUEUED]),
        current_type=np.where(runs, cells.gpu_type[cell], -1),
        current_gpus=np.where(runs, cells.gpus[cell], 0),
        current_degree=np.where(runs, cells.pipeline_degree[cell], 0),
    )

    again = published(name).choose(seen(replace(snapshot, jobs=jobs), Policy()))

    assert runs.any()
    assert np.all(again[runs] >= 0)


@pytest.mark.parametrize("name", NAMES)
def test_whole_rounds_of_each_break_no_rule(name: str) -> None:
    snapshot = a_random_snapshot(5, jobs=40)

    outcome = plan_round(
        snapshot, Policy(), Greedy(), FOREVER, scheduler=Scheduler(published=published(name))
    )

    assert outcome.violations == ()
    assert outcome.solution.objective > 0


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_queue_is_an_answer_too(name: str) -> None:
    nodes, estimates = some_nodes((0, 1, 8)), [an_estimate()]
    snapshot = a_snapshot(
        nodes=nodes, jobs=[a_job("held", state=JobState.HELD)], estimates=estimates
    )

    assert published(name).choose(seen(snapshot, Policy())).tolist() == [-1]
    empty = a_snapshot(nodes=nodes, jobs=[a_job("j")], estimates=[])
    assert published(name).choose(seen(empty, Policy())).tolist() == [-1]
