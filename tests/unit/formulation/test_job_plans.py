"""Plans of jobs: what a runtime can run, stated and submitted plans, and their techniques."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.check import find_placement_violations
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
)
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.job.runtimes import MEGATRON, RESTRICTED_RUNTIMES, RUNTIMES
from tessera.formulation.job.techniques import (
    Technique,
    read_techniques,
    refuse_techniques,
    techniques_of,
)
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.promises.guarantee import (
    guaranteed_jobs_are_as_fast_as_requested,
    min_demand,
    request_rate,
)
from tessera.formulation.round.promises.pins import pinned_gpu_type
from tessera.formulation.round.promises.stated_plans import stated_plans
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.cells import build_cells
from tessera.formulation.state.plan_tables import RefusedPlans, Runtimes
from tessera.formulation.state.runnable_plans import (
    ability_in_words,
    are_refused,
    offer_runnable_plans,
    restriction_in_words,
)
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOptions, RoundOutcome, plan_round
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate, some_nodes

PLANS = ("", "dp2", "tp2", "dp4", "pp2")

DP2, TP2, DP4, PP2 = 1, 2, 3, 4

ESTIMATES = [
    an_estimate(gpus=2, plan=DP2, iter_time_s=1.2),
    an_estimate(gpus=2, plan=TP2, iter_time_s=1.0),
    an_estimate(gpus=4, plan=DP4, iter_time_s=0.8),
    an_estimate(gpus=4, degree=2, plan=PP2, iter_time_s=0.5),
]

TORCHRUN = 0

TORCH: dict[str, Any] = {"runtime": TORCHRUN, "requested_gpus": 2}

FOREVER = Budget(remaining_s=lambda: math.inf)


def a_round(*jobs: dict[str, Any], estimates: Any = ESTIMATES, **more: Any) -> Snapshot:
    """Return a node of 8 GPUs, and a runtime that refuses ``tp2`` and pipelines."""
    free = [job | {"runtime": -1} for job in jobs]
    nodes = some_nodes((0, 1, 8))
    snapshot = a_snapshot(nodes=nodes, jobs=free, estimates=estimates, plans=PLANS, **more)
    return replace(
        snapshot,
        runtimes=Runtimes(name=("torchrun",), pipelines=np.array([False])),
        refused_plans=RefusedPlans.from_rows([{"runtime": TORCHRUN, "plan": TP2}]),
        jobs=replace(snapshot.jobs, runtime=np.array([job["runtime"] for job in jobs])),
    )


def offered(snapshot: Snapshot, job: int = 0) -> set[str]:
    """Return the plans of the Cells that a job is offered."""
    given = offer_runnable_plans(snapshot)
    cells = build_cells(given)
    return {PLANS[plan] for plan in cells.plan[cells.workload == given.jobs.workload[job]].tolist()}


def decide(snapshot: Snapshot) -> RoundOutcome:
    outcome = plan_round(snapshot, RoundOptions(), Portfolio(), FOREVER)
    assert not outcome.violations
    return outcome


def reason_of(snapshot: Snapshot) -> Reason:
    reason = decide(snapshot).decisions[0].reason
    assert reason is not None
    return reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"runtimes": Runtimes.from_rows([])},
        {"refused_plans": RefusedPlans.from_rows([{"runtime": 1, "plan": 0}])},
        {"refused_plans": RefusedPlans.from_rows([{"runtime": 0, "plan": len(PLANS)}])},
    ],
)
def test_a_snapshot_must_have_the_runtimes_and_plans_that_it_names(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        replace(a_round(a_job("torch", **TORCH)), **wrong)


def test_a_plan_that_was_not_recorded_is_refused_if_it_is_a_pipeline() -> None:
    unrecorded = [an_estimate(gpus=2, degree=d, iter_time_s=2.0 / (1 + d)) for d in (0, 1, 2)]
    snapshot = a_round(a_job("torch", **TORCH), estimates=unrecorded)
    cells = build_cells(offer_runnable_plans(snapshot))
    assert sorted(cells.pipeline_degree[cells.workload == 1].tolist()) == [0, 1]
    plan, degree, runtime = np.zeros(2, np.int64), np.array([1, 2]), np.array([-1, -1])
    assert are_refused(snapshot, runtime, plan, degree).tolist() == [False, False]


def test_a_job_whose_runtime_can_run_no_estimate_says_so() -> None:
    reason = reason_of(a_round(a_job("torch", **TORCH), estimates=[ESTIMATES[1], ESTIMATES[3]]))
    assert reason.code is ReasonCode.NO_RUNNABLE_PLAN
    assert (
        reason.message
        == "m/0B/256 has estimates, but none by a plan that the runtime torchrun can run"
    )
    assert "with a plan that torchrun can run" in str(reason.next_step)
    assert reason.evidence == (("workload", "m/0B/256"), ("runtime", "torchrun"))


def test_a_job_whose_only_runnable_plans_fail_says_whose_plans_these_are() -> None:
    fails = [ESTIMATES[0] | {"iter_time_s": math.inf}, ESTIMATES[1]]
    reason = reason_of(a_round(a_job("torch", **TORCH), estimates=fails))
    assert reason.code is ReasonCode.NO_FEASIBLE_CELL
    assert "by a plan that the runtime torchrun can run fits: on 2 x a100, every" in str(
        reason.message
    )


def test_a_stated_plan_that_the_runtime_refuses_is_the_jobs_reason() -> None:
    snapshot = offer_runnable_plans(a_round(a_job("torch", plan=TP2, **TORCH)))
    reason = stated_plans(first_draft(snapshot, Policy())).absent[0]
    assert reason.code is ReasonCode.PLAN_UNUSABLE
    assert "its runtime torchrun cannot run it" in str(reason.message)


def test_a_pinned_job_says_that_its_runtime_has_no_plan_on_the_type() -> None:
    rows = [ESTIMATES[1], an_estimate(gpu_type=1, gpus=2, plan=DP2)]
    job = a_job("torch", requested_gpu_type=0, pinned_gpu_type=True, **TORCH)
    nodes = some_nodes((0, 1, 8), (1, 1, 8))
    snapshot = a_round(job, estimates=rows)
    snapshot = replace(snapshot, nodes=type(snapshot.nodes).from_rows(nodes))
    draft = pinned_gpu_type(first_draft(offer_runnable_plans(snapshot), Policy()))
    assert "has no Cell by a plan that the runtime torchrun can run on this type" in (
        str(draft.absent[0].message)
    )


def test_a_job_of_an_unknown_model_runs_by_the_plan_it_states_unless_its_runtime_refuses() -> None:
    stated: dict[str, Any] = TORCH | {"requested_gpu_type": 0, "unestimated": True}
    jobs = [a_job("u", 1, plan=TP2, **stated), a_job("v", 1, plan=DP2, **stated)]
    refused, runs = decide(a_round(*jobs, workloads=2)).decisions
    assert refused.reason is not None
    assert refused.reason.code is ReasonCode.NO_RUNNABLE_PLAN
    assert (PLANS[runs.cell.plan], runs.rate) == ("dp2", 0.0)


@pytest.mark.parametrize(("plan", "rule"), [(DP2, []), (TP2, ["runnable plan"])])
def test_the_checker_finds_a_plan_that_the_runtime_refuses(plan: int, rule: list[str]) -> None:
    snapshot = a_round(a_job("torch", **TORCH), estimates=ESTIMATES[:2])
    assert violations(snapshot, plan) == rule


def test_the_checker_finds_a_pipeline_of_a_runtime_without_any() -> None:
    snapshot = a_round(a_job("torch", **TORCH), estimates=[an_estimate(gpus=2, degree=2)])
    assert violations(snapshot, 0) == ["runnable plan"]


def violations(snapshot: Snapshot, plan: int) -> list[str]:
    """Return the rules broken by running the only job by ``plan``, if nothing was filtered."""
    free = replace(snapshot, jobs=replace(snapshot.jobs, runtime=np.array([-1])))
    problem = build_problem(free, Policy(objective="throughput"))
    every = problem.cells.plan[problem.cell].tolist()
    if plan not in every:  # a faster one dominates it
        only = free.estimates.at(free.estimates.plan == plan)
        problem = build_problem(replace(free, estimates=only), Policy(objective="throughput"))
        every = problem.cells.plan[problem.cell].tolist()
    choice = np.array([every.index(plan)])
    value = int(problem.value[choice].sum())
    solution = Solution(
        status=SolveStatus.FEASIBLE, choice=choice, objective=value, bound=value, solver="t"
    )
    placement = Placement(gangs={0: Gang(members=((0, (0, 1)),))})
    return [v.rule for v in find_placement_violations(snapshot, problem, solution, placement)]


def a_plan(*blocks: int, tp: int = 1) -> ExecutionPlan:
    """Return a plan whose stages have these layers."""
    ends = np.cumsum(blocks).tolist()
    stages = tuple(
        PlanStage(start=start, end=end, tp=tp)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    return ExecutionPlan(stages=stages, micro_batch=8)


def test_runtimes_without_pipelines_refuse_them_and_restricted_ones_refuse_something() -> None:
    assert set(RESTRICTED_RUNTIMES) == {"torchrun", "deepspeed", "megatron", "jax", "alpa"}
    for name, runtime in RUNTIMES.items():
        assert bool(runtime.refuse_plan(a_plan(5, 5))) is not runtime.pipelines
        uneven = replace(
            a_plan(2, 9, 3, 4, 2, tp=2), precision=Precision.F16, zero=ZeroStage.OPTIMIZER
        )
        assert bool(runtime.refuse_plan(uneven)) is (name in RESTRICTED_RUNTIMES)
        assert runtime.refuse_plan(a_plan(10)) == ""


@pytest.mark.parametrize(
    ("layers", "runs"),
    [((7, 6, 6, 7), True), ((7, 7, 7, 7), True), ((6, 6, 6, 8), True), ((7, 5, 6, 7), False)],
)
def test_megatron_runs_stages_of_equal_blocks_but_for_the_first_and_the_last(
    layers: tuple[int, ...], runs: bool
) -> None:
    assert (RUNTIMES[MEGATRON].refuse_plan(a_plan(*layers)) == "") is runs


def test_techniques_restrict_like_a_runtime_and_are_named() -> None:
    snapshot = a_round(a_job("j", **TORCH))
    both = replace(snapshot, runtimes=replace(snapshot.runtimes, techniques=("dp, zero1",)))
    alone = replace(both, runtimes=replace(both.runtimes, name=("",)))
    assert offered(alone) == offered(snapshot)
    assert restriction_in_words(snapshot, 0) == " by a plan that the runtime torchrun can run"
    assert restriction_in_words(both, 0) == (
        " by a plan that the runtime torchrun can run with no technique but dp, zero1"
    )
    assert restriction_in_words(alone, 0) == " by a plan with no technique but dp, zero1"
    assert ability_in_words(alone, 0) == "a program with the techniques dp, zero1"
    assert ability_in_words(both, 0) == "its runtime torchrun with the techniques dp, zero1"


TWO_PLANS = ("", "best", "stated")


def a_cluster_of_two_plans(*jobs: dict[str, Any], **stated: Any) -> Snapshot:
    """Return a cluster in which the stated plan is slower than the best one on the same GPUs."""
    return a_snapshot(
        nodes=[a_node("n0", gpus=4)],
        plans=TWO_PLANS,
        estimates=[
            an_estimate(gpus=2, plan=1, iter_time_s=1.0),
            an_estimate(gpus=2, plan=2, **{"iter_time_s": 2.0} | stated),
            an_estimate(gpus=4, plan=1, iter_time_s=0.6),
        ],
        jobs=list(jobs),
    )


def plans_of(draft: Draft, job: int) -> list[str]:
    columns = slice(int(draft.job_start[job]), int(draft.job_start[job + 1]))
    return [TWO_PLANS[plan] for plan in draft.cells.plan[draft.cell[columns]].tolist()]


def test_a_job_runs_by_its_stated_plan_even_if_another_one_is_faster() -> None:
    snapshot = a_cluster_of_two_plans(a_job("own", plan=2), a_job("free"))
    draft = stated_plans(first_draft(snapshot, Policy()))
    assert plans_of(draft, 0) == ["stated"]
    assert "best" in plans_of(draft, 1)


@pytest.mark.parametrize(("generation", "free"), [(0, False), (1, True)])
def test_a_first_plan_binds_a_job_until_its_first_start(generation: int, free: bool) -> None:
    job = a_job("j", plan=2, plan_first=True, generation=generation)
    draft = stated_plans(first_draft(a_cluster_of_two_plans(job), Policy()))
    assert ("best" in plans_of(draft, 0)) is free


@pytest.mark.parametrize(
    ("iter_time_s", "said"),
    [(float("inf"), "fails to run on every GPU type"), (None, "it has no estimate yet")],
)
def test_a_plan_that_runs_nowhere_is_the_jobs_reason(iter_time_s: float | None, said: str) -> None:
    if iter_time_s is None:
        snapshot = a_snapshot(
            nodes=[a_node("n0", gpus=4)],
            plans=TWO_PLANS,
            estimates=[an_estimate(gpus=2, plan=1)],
            jobs=[a_job("j", plan=2)],
        )
    else:
        snapshot = a_cluster_of_two_plans(a_job("j", plan=2), iter_time_s=iter_time_s)
    reason = stated_plans(first_draft(snapshot, Policy())).absent[0]
    assert reason.code is ReasonCode.PLAN_UNUSABLE
    assert said in str(reason.message)


PLANS_OF_REQUEST = ("", "slow", "fast", "absent")

BATCH = 256.0


def a_guaranteed_round(plan: int, gpus: int = 2, gpu_type: int = 0) -> Snapshot:
    """Return a guaranteed job with two plans on 2 GPUs of two types, and one on 1 GPU."""
    job = a_job("j", requested_gpus=gpus, requested_gpu_type=gpu_type, submitted_plan=plan)
    return a_snapshot(
        nodes=[a_node("a", 0, 8), a_node("b", 1, 8)],
        jobs=[job | {"guaranteed": True}],
        estimates=[
            an_estimate(0, 0, 1, plan=2, iter_time_s=BATCH / 12.0),
            an_estimate(0, 0, 2, plan=1, iter_time_s=BATCH / 10.0),
            an_estimate(0, 0, 2, plan=2, iter_time_s=BATCH / 20.0),
            an_estimate(0, 1, 2, plan=1, iter_time_s=BATCH / 6.0),
        ],
        plans=PLANS_OF_REQUEST,
    )


@pytest.mark.parametrize(("plan", "rate"), [(1, 10.0), (2, 20.0), (-1, 20.0), (3, 20.0)])
def test_the_guarantee_is_the_rate_of_the_submitted_plan_or_else_of_the_best(
    plan: int, rate: float
) -> None:
    draft = first_draft(a_guaranteed_round(plan), Policy())

    assert request_rate(draft).tolist() == pytest.approx([rate])


def test_the_least_demand_is_that_of_any_plan_as_fast_as_the_submitted_one() -> None:
    slow, fast = (first_draft(a_guaranteed_round(plan), Policy()) for plan in (1, 2))

    assert min_demand(slow)[0].tolist() == [1, 2]
    assert min_demand(fast)[0].tolist() == [2, 2]
    kept = guaranteed_jobs_are_as_fast_as_requested(slow)
    assert kept.rate.tolist() == pytest.approx([12.0, 20.0])


def test_an_unmet_guarantee_names_the_submitted_plan() -> None:
    snapshot = a_guaranteed_round(1)
    nodes = replace(snapshot.nodes, schedulable=np.array([False, True]))
    draft = first_draft(replace(snapshot, nodes=nodes), Policy())

    (reason,) = guaranteed_jobs_are_as_fast_as_requested(draft).absent.values()

    assert reason.message == (
        "the job is guaranteed the 10 samples/s of 2 x a100 with its submitted plan slow, but the"
        " fastest Cell that it may have now gives 6"
    )


def test_indices_and_needs_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"jobs\.submitted_plan"):
        a_guaranteed_round(4)
    snapshot = a_guaranteed_round(1)
    with pytest.raises(InvalidInput, match=r"estimates\.cpus"):
        replace(snapshot, estimates=replace(snapshot.estimates, cpus=np.full(4, -1)))


def test_a_plan_uses_the_techniques_of_its_degrees_and_switches() -> None:
    stages = (PlanStage(start=0, end=2, dp=2, tp=2), PlanStage(start=2, end=4, dp=2, tp=2))
    pipeline = ExecutionPlan(stages=stages, micro_batch=4, accumulation=8)
    assert techniques_of(pipeline) == {"dp", "tp", "pp"}
    alone = ExecutionPlan(
        stages=(PlanStage(start=0, end=4),),
        micro_batch=2,
        accumulation=4,
        zero=ZeroStage.GRADIENTS,
        offload=Offload.OPTIMIZER,
        recomputation=Recomputation.FULL,
    )
    assert techniques_of(alone) == {"zero2", "offload", "checkpointing", "accumulation"}


def test_a_plan_is_refused_if_it_uses_a_technique_that_is_not_named() -> None:
    plan = ExecutionPlan(
        stages=(PlanStage(start=0, end=4, dp=2, tp=2),), micro_batch=4, zero=ZeroStage.PARAMETERS
    )
    assert refuse_techniques(plan, ()) == ""
    words = read_techniques("techniques", ["ZeRO3", " dp", "dp"])
    assert words == (Technique.DATA_PARALLELISM, Technique.ZERO_3)
    with pytest.raises(InvalidInput, match="has 'fsdp', but techniques are dp, tp, pp"):
        read_techniques("techniques", ["fsdp"])
    assert refuse_techniques(plan, read_techniques("t", ["dp", "tp", "zero3", "pp"])) == ""
    problem = refuse_techniques(plan, read_techniques("t", ["dp", "zero1"]))
    assert problem == "uses tp, zero3, and the job's techniques are dp, zero1"


def test_a_complete_profile_still_says_that_no_other_shape_runs() -> None:
    rows = [ESTIMATES[0], ESTIMATES[1] | {"complete": True}]
    given = offer_runnable_plans(a_round(a_job("torch", **TORCH), estimates=rows))
    own = given.estimates.workload == given.jobs.workload[0]
    assert given.estimates.complete[own].tolist() == [True]
