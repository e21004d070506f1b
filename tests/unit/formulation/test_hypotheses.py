"""Hypothetical changes: what they do to a snapshot, and which contradict each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.answer.hypotheses import (
    Hypothesis,
    append_jobs,
    apply_hypotheses,
    without_last_jobs,
)
from tessera.formulation.base.errors import InvalidInput, NotFound
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.last_round import PlannedNodes, PlannedStarts, ScheduleSegments
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

POLICY = Policy(objective="throughput")


def two_jobs(**job: Any) -> Snapshot:
    """Return a cluster of two nodes of four GPUs, and the jobs a and b of tenant t."""
    return a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        estimates=[an_estimate(0, 0, 4, 1)],
        jobs=[a_job("a", requested_gpus=4, **job), a_job("b", requested_gpus=4)],
    )


def a_change(kind: ChangeKind, job: str = "", **values: Any) -> Hypothesis:
    return Hypothesis(change=Change(kind=kind, **values), job=job, field=values.pop("at", "x"))


def after(snapshot: Snapshot, *hypotheses: Hypothesis) -> Snapshot:
    return apply_hypotheses(snapshot, POLICY, hypotheses)[0]


def test_nodes_without_a_size_are_like_the_largest_of_their_type() -> None:
    added = a_change(ChangeKind.ADD_GPUS, subject="a100", amount=2)
    assert after(two_jobs(), added).nodes.gpus.tolist() == [4, 4, 4, 4]
    sized = a_change(ChangeKind.ADD_GPUS, subject="a100", amount=16, size=8)
    assert after(two_jobs(), sized).nodes.gpus.tolist() == [4, 4, 8, 8]


def test_a_quota_of_a_tenant_without_settings_is_added() -> None:
    changed = after(two_jobs(), a_change(ChangeKind.QUOTA, subject="t/a100", amount=4))
    assert changed.tenants.name == ("t",)
    assert changed.quotas.gpus.tolist() == [4]
    assert changed.quotas.gpu_type.tolist() == [0]
    again = after(changed, a_change(ChangeKind.QUOTA, subject="t/a100", amount=2))
    assert again.quotas.gpus.tolist() == [2]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"kind": ChangeKind.DEADLINE, "amount": 5000.0}, False),
        ({"kind": ChangeKind.DEADLINE, "amount": math.inf}, False),
        ({"kind": ChangeKind.DEADLINE, "amount": 20_000.0}, True),
        ({"kind": ChangeKind.MAX_GPUS, "amount": 4}, False),
        ({"kind": ChangeKind.WEIGHT, "amount": 4.0}, True),
    ],
)
def test_a_promise_is_withdrawn_from_a_job_that_asks_for_more(
    change: dict[str, Any], kept: bool
) -> None:
    promised = two_jobs(deadline_s=10_000.0, admitted=True)
    segments = ScheduleSegments.from_rows(
        [
            {
                "job": 0,
                "start_s": 1000.0,
                "end_s": 2000.0,
                "gpu_type": 0,
                "gpus": 4,
                "pipeline_degree": 1,
                "plan": 0,
            }
        ]
    )
    changed = after(replace(promised, schedule_segments=segments), a_change(job="a", **change))
    assert bool(changed.jobs.admitted[0]) is kept
    assert len(changed.schedule_segments) == int(kept)


def with_starts(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with planned starts of b and a, in this order, and promised ones of all."""
    starts = [
        {
            "job": job,
            "start_s": 2000.0,
            "end_s": 3000.0,
            "gpu_type": 0,
            "gpus": 4,
            "pipeline_degree": 1,
            "plan": 0,
        }
        for job in (1, 0)
    ]
    nodes = [{"start": 0, "node": 1, "gpus": 4}, {"start": 1, "node": 0, "gpus": 4}]
    return replace(
        snapshot,
        jobs=replace(snapshot.jobs, start_by_s=np.full(len(snapshot.jobs), 2000.0)),
        planned_starts=PlannedStarts.from_rows(starts),
        planned_nodes=PlannedNodes.from_rows(nodes),
    )


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        (a_change(ChangeKind.WEIGHT, "b", amount=4.0), [(1, 1), (0, 0)]),
        (a_change(ChangeKind.MIN_GPUS, "b", amount=2), [(0, 0)]),
        (a_change(ChangeKind.PRIORITY, "b", amount=2), [(0, 0)]),
        (a_change(ChangeKind.PRIORITY, "a", amount=2), [(1, 1)]),
        (a_change(ChangeKind.END, subject="b"), [(0, 0)]),
    ],
)
def test_a_start_is_withdrawn_from_a_job_that_ends_or_is_served_later_or_asks_for_more(
    change: Hypothesis, starts: list[tuple[int, int]]
) -> None:
    """``starts`` has the jobs and the nodes of the planned starts that are left."""
    snapshot = after(with_starts(two_jobs()), change)
    jobs = snapshot.planned_starts.job[snapshot.planned_nodes.start].tolist()
    assert list(zip(jobs, snapshot.planned_nodes.node.tolist(), strict=True)) == starts
    jobs_with_promise = np.flatnonzero(np.isfinite(snapshot.jobs.start_by_s)).tolist()
    assert jobs_with_promise == sorted(job for job, _ in starts)


def test_the_round_without_an_added_job_has_the_starts_of_the_others() -> None:
    snapshot = without_last_jobs(with_starts(two_jobs()), 1)
    assert snapshot.planned_starts.job.tolist() == [0]
    assert (snapshot.planned_nodes.start.tolist(), snapshot.planned_nodes.node.tolist()) == (
        [0],
        [0],
    )


def test_an_added_job_has_a_name_of_its_own() -> None:
    snapshot = two_jobs()
    with pytest.raises(InvalidInput, match="adds job a, which exists"):
        append_jobs(snapshot, snapshot.jobs)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (
            a_change(ChangeKind.LOSE, subject="node-0"),
            a_change(ChangeKind.LOSE, subject="node-0"),
            "loses node node-0",
        ),
        (
            a_change(ChangeKind.QUOTA, subject="t", amount=1),
            a_change(ChangeKind.QUOTA, subject="t", amount=2),
            "sets the quota of tenant t",
        ),
        (
            a_change(ChangeKind.PRIORITY, "b", amount=2),
            a_change(ChangeKind.END, subject="b"),
            "removes; leave out one",
        ),
        (
            a_change(ChangeKind.END, subject="b"),
            a_change(ChangeKind.END, subject="b"),
            "removes job b",
        ),
    ],
)
def test_changes_that_contradict_each_other_are_refused(
    first: Hypothesis, second: Hypothesis, why: str
) -> None:
    snapshot = two_jobs()
    names = dict(zip(("node-0", "node-1"), snapshot.nodes.name, strict=True))
    both = [
        replace(
            one,
            change=replace(one.change, subject=names.get(one.change.subject, one.change.subject)),
            field=field,
        )
        for one, field in ((first, "one"), (second, "two"))
    ]
    with pytest.raises(InvalidInput, match=why.replace("node-0", names["node-0"])) as caught:
        after(snapshot, *both)
    assert {"one", "two"} <= {caught.value.field, *str(caught.value).replace(",", "").split()}


@pytest.mark.parametrize("amount", [999.0, 1000.0, np.nan])
def test_a_deadline_must_lie_in_the_future(amount: float) -> None:
    with pytest.raises(InvalidInput, match="has passed"):
        after(two_jobs(), a_change(ChangeKind.DEADLINE, "a", amount=amount))


@pytest.mark.parametrize(
    "change",
    [
        a_change(ChangeKind.WEIGHT, "none", amount=2.0),
        a_change(ChangeKind.END, subject="none"),
        a_change(ChangeKind.LOSE, subject="none"),
        a_change(ChangeKind.TENANT_WEIGHT, subject="none", amount=2.0),
        a_change(ChangeKind.QUOTA, subject="t/none", amount=2),
        a_change(ChangeKind.ADD_GPUS, subject="none", amount=1),
    ],
)
def test_what_does_not_exist_is_not_found_with_what_to_do(change: Hypothesis) -> None:
    with pytest.raises(NotFound, match=r"none.*does not exist; x needs"):
        after(two_jobs(), change)
