"""The hierarchy of tenants: circles and depth, and quotas and weights at every level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.hierarchy import MAX_DEPTH, lines_of_tenants
from tessera.formulation.policy import Policy
from tessera.formulation.rates import effective_weight
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tenants import Quotas, Tenants
from tessera.solvers.base import Budget
from tessera.solvers.cpsat import CpSat
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.allowance import Allowance
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes


def test_a_line_has_the_tenant_and_all_above_it() -> None:
    lines = lines_of_tenants({"lab": "", "nlp": "lab", "chat": "nlp", "other": ""})
    assert lines["chat"] == ("chat", "nlp", "lab")
    assert lines["other"] == ("other",)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ({"a": "a"}, "circle, a > a"),
        ({"a": "b", "b": "c", "c": "a"}, "circle, a > c > b > a"),
        ({"a": "z"}, "the parent of a, z, has no settings"),
        (
            {f"t{i}": f"t{i - 1}" if i else "" for i in range(MAX_DEPTH + 1)},
            f"t{MAX_DEPTH} is on level {MAX_DEPTH + 1}",
        ),
    ],
)
def test_circles_missing_parents_and_too_many_levels_are_refused(
    parents: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        lines_of_tenants(parents)


def a_lab(
    *jobs: dict[str, Any],
    lends: tuple[bool, ...] = (True, True, True),
    borrow: int = -1,
    quota: int = 4,
) -> Snapshot:
    """Return a lab with a quota and its children nlp and vision, on a cluster of eight GPUs."""
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        jobs=jobs,
        estimates=[an_estimate(gpus=1, iter_time_s=1.0)],
        batch=1,
    )
    return replace(
        snapshot,
        tenants=Tenants(
            name=("lab", "nlp", "vision"),
            weight=np.array([3.0, 2.0, 1.0]),
            borrow_gpus=np.array([borrow, -1, -1]),
            lends=np.array(lends),
            parent=np.array([-1, 0, 0]),
        ),
        quotas=Quotas(tenant=np.array([0]), gpu_type=np.array([-1]), gpus=np.array([quota])),
    )


def jobs_of(tenant: str, count: int, **fields: Any) -> list[dict[str, Any]]:
    return [a_job(f"{tenant}-{i}", tenant=tenant, **fields) for i in range(count)]


def running(snapshot: Snapshot) -> dict[str, int]:
    """Return the number of jobs that a round runs, by tenant."""
    outcome = plan_round(
        snapshot,
        Policy(),
        CpSat(),
        Budget(remaining_s=lambda: float("inf"), work={CpSat.name: 0.5}),
    )
    assert not outcome.violations
    found: dict[str, int] = {}
    for job in outcome.placed.placement.gangs:
        tenant = snapshot.jobs.tenant[job]
        found[tenant] = found.get(tenant, 0) + 1
    return found


def test_what_children_use_counts_in_their_parents_limit() -> None:
    jobs = [*jobs_of("nlp", 5), *jobs_of("vision", 5)]
    assert sum(running(a_lab(*jobs)).values()) == 8
    assert sum(running(a_lab(*jobs, borrow=1)).values()) == 5
    guaranteed = [{**job, "guaranteed": True} for job in jobs]
    assert sum(running(a_lab(*guaranteed)).values()) == 4


def test_a_parent_that_does_not_lend_keeps_its_quota_for_those_below_it() -> None:
    others = jobs_of("other", 8, weight=100.0)
    assert running(a_lab(*jobs_of("vision", 8), *others))["other"] == 8
    kept = running(a_lab(*jobs_of("vision", 8), *others, lends=(False, True, True)))
    assert kept == {"vision": 4, "other": 4}


def test_weights_are_multiplied_along_the_line() -> None:
    snapshot = a_lab(*jobs_of("nlp", 1), *jobs_of("vision", 1), *jobs_of("other", 1))
    assert effective_weight(snapshot, Policy()).tolist() == [6.0, 3.0, 1.0]


def test_published_schedulers_charge_every_level() -> None:
    allowance = Allowance(a_lab(*jobs_of("nlp", 1)))
    assert allowance.claim("nlp", 0, 3)
    assert not allowance.claim("vision", 0, 2)
    assert allowance.claim("lab", 0, 1)
    assert allowance.claim("other", 0, 9)
