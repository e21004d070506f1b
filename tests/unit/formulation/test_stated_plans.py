"""Jobs that run by the execution plan that their users state."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.formulation.columns import first_draft
from tessera.formulation.draft import Draft
from tessera.formulation.policy import Policy
from tessera.formulation.promises.stated_plans import stated_plans
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate

PLANS = ("", "best", "stated")


def a_cluster(*jobs: dict[str, Any], **stated: Any) -> Snapshot:
    """Return a cluster in which the stated plan is slower than the best one on the same GPUs."""
    return a_snapshot(
        nodes=[a_node("n0", gpus=4)],
        plans=PLANS,
        estimates=[
            an_estimate(gpus=2, plan=1, iter_time_s=1.0),
            an_estimate(gpus=2, plan=2, **{"iter_time_s": 2.0} | stated),
            an_estimate(gpus=4, plan=1, iter_time_s=0.6),
        ],
        jobs=list(jobs),
    )


def plans_of(draft: Draft, job: int) -> list[str]:
    columns = slice(int(draft.job_start[job]), int(draft.job_start[job + 1]))
    return [PLANS[plan] for plan in draft.cells.plan[draft.cell[columns]].tolist()]


def test_a_job_runs_by_its_stated_plan_even_if_another_one_is_faster() -> None:
    snapshot = a_cluster(a_job("own", stated_plan=2), a_job("free"))
    draft = stated_plans(first_draft(snapshot, Policy()))
    assert plans_of(draft, 0) == ["stated"]
    assert "best" in plans_of(draft, 1)


@pytest.mark.parametrize(("generation", "free"), [(0, False), (1, True)])
def test_a_first_plan_binds_a_job_until_its_first_start(generation: int, free: bool) -> None:
    job = a_job("j", stated_plan=2, stated_plan_first=True, generation=generation)
    draft = stated_plans(first_draft(a_cluster(job), Policy()))
    assert ("best" in plans_of(draft, 0)) is free


def test_jobs_without_stated_plans_keep_the_undominated_columns_alone() -> None:
    assert plans_of(stated_plans(first_draft(a_cluster(a_job("j")), Policy())), 0) == ["best"] * 2


@pytest.mark.parametrize(
    ("iter_time_s", "said"),
    [(float("inf"), "fails to run on every GPU type"), (None, "it has no estimate yet")],
)
def test_a_plan_that_runs_nowhere_is_the_jobs_reason(iter_time_s: float | None, said: str) -> None:
    if iter_time_s is None:
        snapshot = a_snapshot(
            nodes=[a_node("n0", gpus=4)],
            plans=PLANS,
            estimates=[an_estimate(gpus=2, plan=1)],
            jobs=[a_job("j", stated_plan=2)],
        )
    else:
        snapshot = a_cluster(a_job("j", stated_plan=2), iter_time_s=iter_time_s)
    reason = stated_plans(first_draft(snapshot, Policy())).absent[0]
    assert reason.code is ReasonCode.PLAN_UNUSABLE
    assert said in reason.message
