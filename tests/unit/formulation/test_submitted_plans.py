"""The guarantee of a job that was submitted with an execution plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.cells import build_cells
from tessera.formulation.codec import decode, encode
from tessera.formulation.columns import first_draft
from tessera.formulation.errors import InvalidInput
from tessera.formulation.objectives.fairness import fair_rate
from tessera.formulation.plan_tables import PlanKinds
from tessera.formulation.policy import Policy
from tessera.formulation.promises.guarantee import (
    guaranteed_jobs_are_as_fast_as_requested,
    min_demand,
    request_rate,
)
from tessera.formulation.snapshot import Snapshot
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate

PLANS = ("", "slow", "fast", "absent")
BATCH = 256.0


def a_round(plan: int, gpus: int = 2, gpu_type: int = 0) -> Snapshot:
    """Return a guaranteed job with two plans on 2 GPUs of two types, and one on 1 GPU."""
    job = a_job("j", requested_gpus=gpus, requested_type=gpu_type, submitted_plan=plan)
    return a_snapshot(
        nodes=[a_node("a", 0, 8), a_node("b", 1, 8)],
        jobs=[job | {"guaranteed": True}],
        estimates=[
            an_estimate(0, 0, 1, plan=2, iter_time_s=BATCH / 12.0),
            an_estimate(0, 0, 2, plan=1, iter_time_s=BATCH / 10.0),
            an_estimate(0, 0, 2, plan=2, iter_time_s=BATCH / 20.0),
            an_estimate(0, 1, 2, plan=1, iter_time_s=BATCH / 6.0),
        ],
        plans=PLANS,
    )


@pytest.mark.parametrize(("plan", "rate"), [(1, 10.0), (2, 20.0), (-1, 20.0), (3, 20.0)])
def test_the_guarantee_is_the_rate_of_the_submitted_plan_or_else_of_the_best(
    plan: int, rate: float
) -> None:
    draft = first_draft(a_round(plan), Policy())

    assert request_rate(draft).tolist() == pytest.approx([rate])


def test_the_least_demand_is_that_of_any_plan_as_fast_as_the_submitted_one() -> None:
    slow, fast = (first_draft(a_round(plan), Policy()) for plan in (1, 2))

    assert min_demand(slow)[0].tolist() == [1, 2]
    assert min_demand(fast)[0].tolist() == [2, 2]
    kept = guaranteed_jobs_are_as_fast_as_requested(slow)
    assert kept.rate.tolist() == pytest.approx([12.0, 20.0])


def test_an_unmet_guarantee_names_the_submitted_plan() -> None:
    snapshot = a_round(1)
    nodes = replace(snapshot.nodes, schedulable=np.array([False, True]))
    draft = first_draft(replace(snapshot, nodes=nodes), Policy())

    (reason,) = guaranteed_jobs_are_as_fast_as_requested(draft).absent.values()

    assert reason.message == (
        "the job is guaranteed the 10 samples/s of 2 x a100 with its submitted plan slow, but the"
        " fastest Cell that it may have now gives 6"
    )


def test_a_snapshot_with_plans_is_read_back_and_one_without_has_no_new_fields() -> None:
    plain = a_round(-1)
    kinds = PlanKinds(plan=np.array([1, 2]), kind=("dp", "dp"))
    estimates = replace(plain.estimates, cpus=np.arange(4), host_bytes=np.arange(4) * 2**30)
    full = replace(a_round(1), plan_kinds=kinds, estimates=estimates)

    for name in (b"plan_kinds", b"cpus", b"host_bytes", b"submitted_plan"):
        assert name not in encode(plain)
        assert name in encode(full)
    again = decode(encode(full))
    assert isinstance(again, Snapshot)
    assert again.kinds_of_plans().tolist() == [0, 1, 1, 3]
    assert again.estimates.equals(full.estimates)
    assert build_cells(again).cpus.tolist() == [0, 2, 1, 3]


def test_plans_of_one_count_with_other_cpus_leave_the_fair_rate_as_it_is() -> None:
    def fair(*cells: dict[str, Any]) -> list[float]:
        snapshot = a_snapshot(
            nodes=[a_node("n", 0, 8, cpus=64)], jobs=[a_job("j")], estimates=cells, plans=PLANS
        )
        rate: list[float] = fair_rate(first_draft(snapshot, Policy()), np.array([0.25])).tolist()
        return rate

    fast = [
        an_estimate(0, 0, gpus, plan=2, iter_time_s=BATCH / rate, cpus=8 * gpus)
        for gpus, rate in ((1, 10.0), (4, 30.0))
    ]
    slow = an_estimate(0, 0, 4, plan=1, iter_time_s=BATCH / 20.0, cpus=4)

    assert fair(*fast, slow) == pytest.approx(fair(*fast))


def test_indices_and_needs_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"jobs\.submitted_plan"):
        a_round(4)
    snapshot = a_round(1)
    with pytest.raises(InvalidInput, match=r"estimates\.cpus"):
        replace(snapshot, estimates=replace(snapshot.estimates, cpus=np.full(4, -1)))
