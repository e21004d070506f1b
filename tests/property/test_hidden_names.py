"""Laws of names: what a caller bound to a tenant reads does not depend on the names of others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.db.base.documents import dump_json, reason_from, reason_plain
from tessera.formulation.answer.explanations.records import Explanation
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.texts import (
    HIDDEN_NAME,
    NamingText,
    SeesTenant,
    Text,
    fill,
    join,
    render,
)
from tessera.formulation.job.dependencies import (
    Condition,
    DependencyRecord,
    broken_reason,
    waiting_reason,
)
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.records.explanations import JobExplanation
from tessera.formulation.records.jobs import JobEventRecord
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.convert.explanations import of_explanation
from tessera.service.server.convert.jobs import of_event, of_job, of_reason
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.explaining.explain import explain_job
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.v1 import jobs_pb2
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.driver import with_quotas
from tests.support.job_records import a_job_record
from tests.support.laws import examples

LAW = examples(20)
OPTIONS = RoundOptions(objective="throughput")

WORDS = [
    "job",
    "the",
    "is",
    "a",
    "wait",
    "quota",
    "mine-2",
    "min",
    "{job}",
    "{0}",
    HIDDEN_NAME,
    "GPUs.",
]
"""Names that are words of sentences, or parts or templates of such."""

names = (
    st.sampled_from(WORDS)
    | st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
).filter(lambda name: name not in ("mine", "j"))
pairs = st.lists(names, min_size=2, max_size=2, unique=True)


def sees_mine(tenant: str) -> bool:
    return tenant == "mine"


def sees_all(_tenant: str) -> bool:
    return True


def decide(snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
    return plan_round(snapshot, options, make_solver(), Budget(remaining_s=lambda: math.inf))


def rename(snapshot: Snapshot, new: Mapping[str, str]) -> Snapshot:
    """Return a snapshot in which tenants and jobs have other names."""
    jobs, tenants = snapshot.jobs, snapshot.tenants
    return replace(
        snapshot,
        jobs=replace(
            jobs,
            name=tuple(new.get(name, name) for name in jobs.name),
            tenant=tuple(new.get(name, name) for name in jobs.tenant),
        ),
        tenants=replace(tenants, name=tuple(new.get(name, name) for name in tenants.name)),
    )


def explain(snapshot: Snapshot) -> Explanation:
    """Explain job ``j`` of the tenant ``mine``."""
    outcome = decide(snapshot, OPTIONS)
    return explain_job(snapshot, OPTIONS, snapshot.jobs.name.index("j"), outcome, decide)


def kept_quota() -> Snapshot:
    """Return a cluster on which another tenant, which lends nothing, leaves a job too few GPUs."""
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=4)],
        estimates=[an_estimate(gpus=2)],
        jobs=[a_job("rival", tenant="others"), a_job("j", tenant="mine")],
    )
    return with_quotas(snapshot, {"others": {0: 3}}, keeps=["others"])


def strong_rival() -> Snapshot:
    """Return a cluster of one GPU, which a job of more weight has."""
    return a_snapshot(
        nodes=[a_node("n0", gpus=1)],
        estimates=[an_estimate()],
        jobs=[a_job("rival", tenant="others", weight=3.0), a_job("j", tenant="mine")],
    )


def new_rival() -> Snapshot:
    """Return a cluster on which a running job shrinks for a new one."""
    return a_snapshot(
        nodes=[a_node("n0", gpus=2)],
        estimates=[
            an_estimate(0, gpus=1),
            an_estimate(0, gpus=2, iter_time_s=0.6),
            an_estimate(1, gpus=1),
        ],
        jobs=[
            a_job("j", state=JobState.RUNNING, cell=(0, 2, 1), generation=1, tenant="mine"),
            a_job("rival", 1, weight=2.0, tenant="others"),
        ],
        gangs={0: Gang(members=((0, (0, 1)),))},
    )


def show(explanation: Explanation, sees_tenant: SeesTenant) -> jobs_pb2.ExplainJobResponse:
    record = JobExplanation(
        number=1, created_s=0.0, kind="wait", explanation=explanation, history=()
    )
    return of_explanation("c", "j", record, sees_tenant)


CASES = {
    ReasonCode.QUOTA_SPENT: kept_quota(),
    ReasonCode.OUTPRICED: strong_rival(),
    ReasonCode.GAVE_WAY: new_rival(),
}


@pytest.mark.parametrize("code", CASES)
@LAW
@given(pairs)
def test_an_explanation_is_the_same_whatever_other_tenants_and_their_jobs_are_called(
    code: ReasonCode, pair: list[str]
) -> None:
    tenant, job = pair
    explanation = explain(CASES[code])
    assert explanation.reason.code is code
    renamed_explanation = explain(rename(CASES[code], {"others": tenant, "rival": job}))
    assert show(renamed_explanation, sees_mine) == show(explanation, sees_mine)
    message = show(renamed_explanation, sees_all)
    assert message.reason.next_step == str(renamed_explanation.reason.next_step)
    assert any(name in step.message for name in pair for step in message.steps)
    check_kept(renamed_explanation.reason)


@LAW
@given(pairs, st.sampled_from(JobState), st.sampled_from(Condition))
def test_a_reason_to_wait_names_only_jobs_that_the_caller_sees(
    pair: list[str], state: JobState, condition: Condition
) -> None:
    def reasons(tenant: str, job: str) -> list[Reason]:
        unmet = [
            DependencyRecord(job=name, condition=condition, tenant=owner, met=False, state=state)
            for name, owner in ((job, tenant), ("j", "mine"))
        ]
        return [waiting_reason(unmet, 9), broken_reason(job, tenant, condition)]

    for reason, rival_reason in zip(reasons(*pair), reasons("others", "rival"), strict=True):
        message = of_reason("c", reason, 1, sees_mine)
        assert message == of_reason("c", rival_reason, 1, sees_mine)
        assert HIDDEN_NAME in message.message
        assert pair[1] in of_reason("c", reason, 1, sees_all).message
        check_kept(reason)


@LAW
@given(pairs)
def test_a_job_and_its_history_name_no_job_of_others(pair: list[str]) -> None:
    def show_job(
        pair: Sequence[str], sees_tenant: SeesTenant
    ) -> tuple[jobs_pb2.Job, jobs_pb2.JobEvent]:
        tenant, job = pair
        dependency = DependencyRecord(job=job, condition=Condition.FAILED, tenant=tenant, met=False)
        reason = broken_reason(job, tenant, Condition.FAILED)
        record = a_job_record(state=JobState.REJECTED, dependencies=(dependency,), reason=reason)
        event = JobEventRecord(
            at_s=0.0, event="reject", state=JobState.REJECTED, detail=reason.message
        )
        return of_job(record, sees_tenant), of_event(event, sees_tenant)

    assert show_job(pair, sees_mine) == show_job(("others", "rival"), sees_mine)
    job, event = show_job(pair, sees_all)
    assert job.after[0].job.endswith(f"/{pair[1]}")
    assert job.last_error == job.reason.message == event.detail


def check_kept(reason: Reason) -> None:
    """Check that a stored reason is read as it was, with its names."""
    assert reason_from(json.loads(dump_json(reason_plain(reason)))) == reason


def test_texts_are_joined_and_filled_with_names() -> None:
    name = broken_reason("b", "t", Condition.ENDED).evidence[0][0]
    text: Text = fill("{who} has {share:.1f} of {{all}}", who=join(" and ", ("a", name)), share=0.5)
    assert isinstance(text, NamingText)
    assert str(text) == "a and b has 0.5 of {all}"
    assert render(text, sees_mine) == f"a and {HIDDEN_NAME} has 0.5 of {{all}}"
    assert fill("{a} x {b}", a=2, b="a40") == "2 x a40"
    assert join(", ", ()) == ""
