"""By default rounds keep the deadlines that were promised, and promise no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.driver import decide_round, decision_kinds, the_next_round

NOW_S = 1200.0
AHEAD = Policy(deadlines="look-ahead")
DEFAULT = Policy()
IGNORING = Policy(deadlines="ignore")


def a_dated_job(name: str, work_s: float, due_s: float, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds, due in ``due_s``. A GPU trains one sample/s."""
    length = work_s / 256
    fields = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, **(fields | more))


def a_cluster(*jobs: dict[str, Any]) -> Snapshot:
    """Return a node of four GPUs, on which 1, 2 or 4 GPUs train 1, 2 or 4 samples/s."""
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
    snapshot = a_snapshot(nodes=[a_node("n0", gpus=4)], jobs=jobs, estimates=estimates)
    return replace(snapshot, now_s=NOW_S)


def a_promised_round(due_s: float = 1300.0) -> tuple[Snapshot, RoundOutcome]:
    """Return the snapshot and outcome of a round that promised a 20-minute job its deadline."""
    first = a_cluster(a_dated_job("old", 4800, due_s))
    outcome = decide_round(first, AHEAD)
    assert outcome.decisions[0].admitted
    return first, outcome


HEAVY = a_job("new", weight=99.0, generation=0)


def snapshot_after(first: Snapshot, outcome: RoundOutcome, *arrivals: dict[str, Any]) -> Snapshot:
    """Return the snapshot of the round 30 s later, with the promise and its certificate."""
    second = the_next_round(first, outcome, 30.0, arrivals)
    jobs = replace(second.jobs, admitted=np.array([name == "old" for name in second.jobs.name]))
    return replace(second, jobs=jobs, legs=outcome.legs_after(first))


def test_a_promised_deadline_is_kept_by_a_round_that_follows_the_default_policy() -> None:
    second = snapshot_after(*a_promised_round(), HEAVY)
    outcome = decide_round(second, DEFAULT)
    assert decision_kinds(second, outcome)["old"] is DecisionKind.KEEP
    assert outcome.decisions[0].admitted
    assert outcome.given_up == frozenset()
    assert decision_kinds(second, decide_round(second, IGNORING))["old"] is not DecisionKind.KEEP


def test_a_promised_deadline_is_kept_in_every_round_until_the_job_ends_in_time() -> None:
    first, outcome = a_promised_round()
    snapshot = snapshot_after(first, outcome, HEAVY)
    while "old" in snapshot.jobs.name:
        assert snapshot.now_s < NOW_S + 1300.0
        outcome = decide_round(snapshot, DEFAULT)
        assert outcome.given_up == frozenset()
        snapshot = snapshot_after(snapshot, outcome)


def test_a_promise_that_was_made_round_by_round_is_kept_too() -> None:
    first = a_cluster(a_dated_job("old", 4800, 1300.0))
    outcome = decide_round(first, Policy(deadlines="myopic"))
    assert outcome.decisions[0].admitted
    second = snapshot_after(first, outcome, HEAVY)
    assert len(second.legs) == 0
    assert decision_kinds(second, decide_round(second, DEFAULT))["old"] is DecisionKind.KEEP


@pytest.mark.parametrize("due_s", [100.0, 1300.0, 1e6])
def test_a_deadline_that_was_never_promised_changes_nothing(due_s: float) -> None:
    jobs = [a_dated_job("a", 4800, due_s), a_job("b", weight=0.5)]
    dated, plain = a_cluster(*jobs), a_cluster(jobs[0] | {"deadline_s": np.inf}, jobs[1])
    outcome, expected = decide_round(dated, DEFAULT), decide_round(plain, IGNORING)
    assert [d.kind for d in outcome.decisions] == [d.kind for d in expected.decisions]
    assert not any(d.admitted for d in outcome.decisions)


def test_a_new_deadline_is_neither_promised_nor_refused_next_to_a_promised_one() -> None:
    hopeless = a_dated_job("new", 4800, 60.0)
    second = snapshot_after(*a_promised_round(), hopeless | {"deadline_s": NOW_S + 60.0})
    outcome = decide_round(second, DEFAULT)
    new = outcome.decisions[second.jobs.name.index("new")]
    assert (new.kind, new.admitted) == (DecisionKind.WAIT, False)  # not rejected
    assert new.reason is not None
    assert not new.reason.code.startswith("DEADLINE")


def test_a_promise_that_lost_nodes_prevent_is_waived_with_a_reason() -> None:
    first, outcome = a_promised_round()
    second = snapshot_after(first, outcome, HEAVY)
    late = replace(second, now_s=NOW_S + 5000.0)
    late_outcome = decide_round(late, DEFAULT)
    assert late_outcome.given_up == {second.jobs.name.index("old")}
