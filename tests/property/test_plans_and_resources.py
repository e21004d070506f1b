"""Laws of plans and resources, and of small rounds whose plans can all be listed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.papers.bench_motivation import (
    NORMALISED_POLICY,
    POLICIES,
    RAW_POLICY,
    ROUNDING,
)
from tessera.benchmarks.papers.opening_cases import (
    OpeningCase,
    OpeningJob,
    OpeningScene,
    decide_openings,
)
from tessera.benchmarks.rounds.bench_plan_fuzz import OBJECTIVE, find_faults, without_hosts
from tessera.benchmarks.rounds.plan_oracle import best_throughput, draw_plan_round
from tessera.formulation.policy import Policy
from tessera.formulation.promises.guarantee import request_rate
from tessera.formulation.statement import build_problem
from tessera.formulation.values import Workload
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.packing import host_capacity
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.laws import examples
from tests.support.worlds import a_profile


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_the_ilp_finds_the_best_plans_and_resources_of_small_rounds(seed: int) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    problem = build_problem(snapshot, Policy(objective=OBJECTIVE))

    assert (
        find_faults(snapshot, problem, best_throughput(snapshot, problem.must_run), "portfolio")
        == []
    )


def test_an_answer_that_ignores_cpus_and_memory_counts_as_wrong() -> None:
    wrong = 0
    for seed in range(40):
        snapshot = draw_plan_round(np.random.default_rng(seed))
        snapshot = replace(
            snapshot, jobs=replace(snapshot.jobs, guaranteed=np.zeros(len(snapshot.jobs), np.bool_))
        )
        blind = build_problem(without_hosts(snapshot), Policy(objective=OBJECTIVE))
        best = best_throughput(snapshot, blind.must_run)
        wrong += find_faults(snapshot, blind, best, "portfolio") == ["wrong"]
    assert wrong >= 5


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(
        ("morphling", "morphling-r", "morphling-e", "morphling-n", "synergy", "antman")
    ),
)
def test_schedulers_that_count_resources_never_give_a_pool_more_than_it_has(
    seed: int, name: str
) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    view = make_view(snapshot, Policy())

    choice = make_scheduler(name).choose(view)

    runs = np.flatnonzero(choice >= 0)
    draft, column = view.draft, choice[runs]
    assert np.array_equal(draft.job[column], runs)
    hosts = host_capacity(view)
    for kind, gpus in enumerate(view.capacity.tolist()):
        used = draft.demand.at(column[draft.gpu_type[column] == kind])
        assert used.gpus.sum() <= gpus
        assert used.cpus.sum() <= hosts[kind][0]
        assert used.host_bytes.sum() <= hosts[kind][1]


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_morphling_gives_guaranteed_jobs_at_least_the_speed_of_their_submitted_plan(
    seed: int,
) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    typed = np.maximum(snapshot.jobs.requested_type, 0)
    snapshot = replace(snapshot, jobs=replace(snapshot.jobs, requested_type=typed))
    view = make_view(snapshot, Policy())
    owed = request_rate(view.draft)

    choice = make_scheduler("morphling").choose(view)

    jobs = np.flatnonzero((choice >= 0) & snapshot.jobs.guaranteed & ~np.isnan(owed))
    on_type = view.draft.gpu_type[choice[jobs]] == typed[jobs]
    jobs = jobs[on_type]
    assert (view.draft.rate[choice[jobs]] >= owed[jobs] * (1 - 1e-9)).all()


COUNTS = (1, 2, 4)

RATES = st.floats(min_value=1.0, max_value=100.0)


@st.composite
def scenes(draw: st.DrawFn) -> OpeningScene:
    """Draw up to four jobs with any rates, some without some Cells, on one node each of one or two types."""
    kinds = draw(st.sampled_from([("a100",), ("a100", "v100")]))
    jobs, records = [], []
    for i in range(draw(st.integers(1, 4))):
        work = Workload(model=f"m{i}", params="1B", global_batch=64)
        requested_gpus = draw(st.sampled_from(COUNTS))
        kind = draw(st.sampled_from(kinds))
        jobs.append(OpeningJob(workload=work, gpus=requested_gpus, gpu_type=kind))
        for on in kinds:
            for gpus in COUNTS:
                if (on, gpus) == (kind, requested_gpus) or draw(st.booleans()):
                    rate = draw(RATES)
                    records.append(a_profile(gpus, 64 / rate, gpu_type=on, workload=work))
    opening = OpeningCase(
        name="drawn", nodes=tuple((k, 4) for k in kinds), jobs=tuple(jobs), plans=()
    )
    return OpeningScene.of(opening, records)


@examples(25)
@given(scenes())
def test_tessera_reaches_the_best_total_of_all_plans(scene: OpeningScene) -> None:
    raw = decide_openings(scene, RAW_POLICY, "estimates", None, 0)
    normalised = decide_openings(scene, NORMALISED_POLICY, "estimates", None, 0)
    assert scene.total(raw) >= max(map(scene.total, scene.plans())) * (1 - ROUNDING)
    assert scene.normalised(normalised) >= max(map(scene.normalised, scene.plans())) * (
        1 - ROUNDING
    )


@examples(8)
@given(scenes())
def test_every_policy_starts_one_of_the_enumerated_plans(scene: OpeningScene) -> None:
    plans = set(scene.plans())
    for policy in POLICIES:
        assert decide_openings(scene, policy, "estimates", None, 0) in plans
