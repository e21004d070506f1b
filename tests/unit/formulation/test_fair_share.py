"""Fair shares along the hierarchy of tenants, and quotas and weights at every level."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.explain import FAIR_SHARE_FACTOR
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.fair_share import MAX_HALVINGS, FairShare, fair_shares
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.rates import effective_weight
from tessera.formulation.state.decayed_use import (
    HOST_CODES,
    Stint,
    UseMeter,
    tabulate_uses,
)
from tessera.formulation.state.hierarchy import MAX_DEPTH, lines_of_tenants
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.solvers.base import Budget
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.allowance import Allowance
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.driver import reason_of

GPUS = Policy(fair_share="gpus")

DRF = Policy(fair_share="drf")

DAY_S = 86_400.0

CPU_CORES, HOST_MEMORY = HOST_CODES


# the decay of use


def test_a_stint_counts_by_the_integral_of_its_decay() -> None:
    meter, half_life_s = UseMeter(1000.0), 1000.0
    stint = Stint(tenant="t", gpu_type=1, gpus=3, needs=(24, 2**40), began_s=500.0)
    meter.add(stint, 2000.0)
    ages_s = 5000.0 - np.linspace(500.0, 2000.0, 200_001)  # until 5,000 s
    mean = np.trapezoid(0.5 ** (ages_s / half_life_s), dx=1500.0 / 200_000)
    mean *= np.log(2.0) / half_life_s
    uses = meter.read(5000.0, [])
    assert (uses.tenant, uses.resource.tolist()) == (3 * ("t",), [HOST_MEMORY, CPU_CORES, 1])
    assert uses.amount.tolist() == pytest.approx([2**40 * mean, 24 * mean, 3 * mean], rel=1e-9)


def test_use_does_not_depend_on_how_stints_are_cut_or_on_when_it_is_read() -> None:
    rng, whole, cut = np.random.default_rng(0), UseMeter(700.0), UseMeter(700.0)
    moments = np.sort(rng.uniform(0, 9000, 20))
    stint = Stint(tenant="t", gpu_type=0, gpus=2, needs=(1, 5), began_s=float(moments[0]))
    whole.add(stint, float(moments[-1]))
    for began_s, ended_s in itertools.pairwise(moments):
        cut.add(stint._replace(began_s=float(began_s)), float(ended_s))
        cut.read(float(ended_s) + 50.0, [])
    later = UseMeter(700.0, cut.read(9500.0, []), 9500.0)
    for meter in (cut, later):
        expected = whole.read(12_000.0, []).amount
        assert meter.read(12_000.0, []).amount.tolist() == pytest.approx(expected.tolist())


# shares and targets


def a_cluster(
    used: Mapping[str, float | Mapping[int, float]],
    *jobs: dict[str, Any],
    tenants: Sequence[tuple[str, float, str]] = (),
    cores: int = -1,
    host_bytes: int = -1,
    half_life_s: float = DAY_S,
) -> Snapshot:
    """Return a cluster of 8 a100 and 2 v100, on which tenants ``used`` GPUs, by default a100.

    ``tenants`` have (name, weight, parent). Each of the three nodes has ``cores`` and ``host_bytes``.
    """
    nodes = some_nodes((0, 2, 4), (1, 1, 2))
    snapshot = a_snapshot(
        nodes=[{**node, "cpus": cores, "host_bytes": host_bytes} for node in nodes],
        jobs=jobs,
        estimates=[an_estimate(gpus=1, iter_time_s=1.0)],
    )
    names = [name for name, _, _ in tenants]
    amounts = {
        (name, resource): amount
        for name, use in used.items()
        for resource, amount in (use if isinstance(use, Mapping) else {0: use}).items()
    }
    return replace(
        snapshot,
        tenants=Tenants(
            name=tuple(names),
            weight=np.array([weight for _, weight, _ in tenants]),
            borrow_gpus=np.full(len(names), -1),
            keeps_idle_quota=np.zeros(len(names), np.bool_),
            parent=np.array([names.index(p) if p else -1 for _, _, p in tenants], dtype=np.int64),
        ),
        decayed_use=tabulate_uses(amounts),
        use_half_life_s=half_life_s,
    )


def jobs_of(*tenants: str, **fields: Any) -> list[dict[str, Any]]:
    return [a_job(f"{tenant}-{i}", tenant=tenant, **fields) for i, tenant in enumerate(tenants)]


def halvings(snapshot: Snapshot, policy: Policy = GPUS) -> dict[str, float]:
    return {name: share.halvings for name, share in fair_shares(snapshot, policy).items()}


def test_the_factor_follows_from_use_and_share() -> None:
    snapshot = a_cluster({"a": 5.0, "b": 1.0}, *jobs_of("a", "b"))
    shares = fair_shares(snapshot, GPUS)
    assert (shares["a"].used, shares["a"].target) == (0.5, 0.5)
    assert shares["a"].factor == 1.0  # it used what is its share
    assert shares["b"].factor == pytest.approx(2 ** (4 * (1 - 0.1 / 0.5)))
    assert effective_weight(snapshot, GPUS).tolist() == [s.factor for s in shares.values()]


def test_weights_of_tenants_are_shares_and_no_factors() -> None:
    weights = [("a", 3.0, ""), ("b", 1.0, "")]
    fair = a_cluster({"a": 7.5, "b": 2.5}, *jobs_of("a", "b", weight=5.0), tenants=weights)
    assert [s.target for s in fair_shares(fair, GPUS).values()] == [0.75, 0.25]
    assert effective_weight(fair, GPUS).tolist() == [5.0, 5.0]
    assert effective_weight(fair, Policy()).tolist() == [15.0, 5.0]


def test_only_tenants_whose_jobs_may_run_divide_the_cluster() -> None:
    idle = [
        *jobs_of("held", state=JobState.HELD),
        *jobs_of("blocked", unmet=1),
        *jobs_of("worthless", weight=0.0),
    ]
    snapshot = a_cluster({"gone": 5.0}, *jobs_of("a"), *idle, tenants=[("rich", 9.0, "")])
    assert {name: s.target for name, s in fair_shares(snapshot, GPUS).items()} == {"a": 1.0}


def test_a_tenant_of_weight_0_has_the_factor_0_and_no_factor_is_below_the_least() -> None:
    tenants = [("none", 0.0, ""), ("child", 5.0, "none"), ("a", 1.0, ""), ("b", 99.0, "")]
    snapshot = a_cluster({"a": 10.0}, *jobs_of("none", "child", "a", "b"), tenants=tenants)
    least = 2.0**-MAX_HALVINGS
    assert effective_weight(snapshot, GPUS).tolist()[:3] == [0.0, 0.0, least]
    assert FairShare(used=9e9, target=1e-9, halvings=1e18).factor == least


def test_a_child_has_a_part_of_its_parents_share() -> None:
    tenants = [("lab", 1.0, ""), ("nlp", 3.0, "lab"), ("vision", 1.0, "lab"), ("other", 1.0, "")]
    jobs = jobs_of("nlp", "vision", "other")
    targets = {
        n: s.target for n, s in fair_shares(a_cluster({}, *jobs, tenants=tenants), GPUS).items()
    }
    assert targets == {"nlp": 0.375, "vision": 0.125, "other": 0.5}
    alone = fair_shares(a_cluster({}, *jobs_of("vision", "other"), tenants=tenants), GPUS)
    assert alone["vision"].target == 0.5


def test_the_least_served_sibling_is_served_as_its_parent() -> None:
    tenants = [("lab", 1.0, ""), ("nlp", 1.0, "lab"), ("vision", 1.0, "lab"), ("other", 1.0, "")]
    used = {"nlp": 4.0, "vision": 1.0, "other": 5.0}
    found = halvings(a_cluster(used, *jobs_of("nlp", "vision", "other"), tenants=tenants))
    # The lab and the other tenant used half the cluster each, so nobody of the lab owes the other.
    assert found["other"] == found["vision"] == 0.0
    assert found["nlp"] == pytest.approx(4 * (0.4 - 0.1) / 0.25)
    # If the least served sibling has all that it wants, it does not hold its sibling back.
    running = jobs_of("vision", state=JobState.RUNNING, cell=(0, 1, 1))
    found = halvings(a_cluster(used, *jobs_of("nlp", "other"), *running, tenants=tenants))
    assert found == {"nlp": 0.0, "other": 0.0, "vision": 0.0}


def test_own_jobs_of_a_parent_count_as_a_child_of_weight_1() -> None:
    tenants = [("lab", 1.0, ""), ("nlp", 3.0, "lab")]
    shares = fair_shares(
        a_cluster({"lab": 2.0, "nlp": 6.0}, *jobs_of("lab", "nlp"), tenants=tenants), GPUS
    )
    assert (shares["lab"].used, shares["lab"].target) == (0.2, 0.25)
    assert shares["nlp"].used == pytest.approx(0.6)
    assert shares["nlp"].target == 0.75
    for name in ("lab", "nlp"):
        assert shares[name].halvings == pytest.approx(4 * (0.8 - 1.0))


def test_the_dominant_resource_counts_under_drf_alone() -> None:
    used = {"cores": {0: 0.5, CPU_CORES: 45.0}, "old": {1: 1.0}, "new": {0: 4.0}}
    jobs = jobs_of("cores", "old", "new")
    dominant = fair_shares(a_cluster(used, *jobs, cores=30), DRF)
    assert {name: s.used for name, s in dominant.items()} == {"cores": 0.5, "old": 0.5, "new": 0.5}
    gpus = fair_shares(a_cluster(used, *jobs, cores=30), GPUS)
    assert {name: s.used for name, s in gpus.items()} == {"cores": 0.05, "old": 0.1, "new": 0.4}
    unstated = fair_shares(a_cluster(used, *jobs), DRF)  # cores have no known capacity
    assert unstated["cores"].used == 0.5 / 8


def test_host_memory_may_be_the_dominant_resource_if_all_nodes_state_theirs() -> None:
    used = {
        "memory": {0: 0.5, CPU_CORES: 9.0, HOST_MEMORY: 1.5 * 2**40},
        "cores": {CPU_CORES: 45.0},
    }
    jobs = jobs_of("memory", "cores")
    snapshot = a_cluster(used, *jobs, cores=30, host_bytes=2**40)
    found = fair_shares(snapshot, DRF)
    assert {name: s.used for name, s in found.items()} == {"memory": 0.5, "cores": 0.5}
    gpus = fair_shares(snapshot, GPUS)
    assert {name: s.used for name, s in gpus.items()} == {"memory": 0.05, "cores": 0.0}
    unstated = fair_shares(a_cluster(used, *jobs, cores=30), DRF)
    assert unstated["memory"].used == 0.1  # by its cores


# snapshots and rounds


def test_use_that_was_not_read_or_decayed_otherwise_is_refused() -> None:
    with pytest.raises(InvalidInput, match="half-life of 86400 s, but the state has no use"):
        effective_weight(a_cluster({}, *jobs_of("a"), half_life_s=0.0), GPUS)
    with pytest.raises(InvalidInput, match="the state has a half-life of 60 s"):
        effective_weight(a_cluster({}, *jobs_of("a"), half_life_s=60.0), GPUS)
    assert effective_weight(a_cluster({}, *jobs_of("a"), half_life_s=60.0), Policy()).tolist() == [
        1
    ]


@pytest.mark.parametrize(
    "wrong", [{"fair_share": "cpus"}, {"fair_half_life_s": 0.0}, {"fair_half_life_s": np.inf}]
)
def test_policies_refuse_unknown_measures_and_half_lives(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Policy(**wrong)


def test_a_waiting_job_is_told_by_how_much_its_weight_was_lowered() -> None:
    jobs = [*jobs_of(*(8 * ["b"])), *jobs_of("a")]
    snapshot = a_cluster({"a": 6.0, "b": 1.0}, *jobs)
    outcome = plan_round(snapshot, GPUS, Greedy(), Budget(remaining_s=lambda: float("inf")))
    (waiting,) = [d for d in outcome.decisions if d.gang is None]
    assert snapshot.jobs.tenant[waiting.job] == "a"
    assert dict(reason_of(waiting).evidence)[FAIR_SHARE_FACTOR] == (
        "0.57: the tenant used 60% of the cluster, and 50% is its share"
    )


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
    keeps_idle_quota: tuple[bool, ...] = (False, False, False),
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
            keeps_idle_quota=np.array(keeps_idle_quota),
            parent=np.array([-1, 0, 0]),
        ),
        quotas=Quotas(tenant=np.array([0]), gpu_type=np.array([-1]), gpus=np.array([quota])),
    )


def jobs_of_tenant(tenant: str, count: int, **fields: Any) -> list[dict[str, Any]]:
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
    jobs = [*jobs_of_tenant("nlp", 5), *jobs_of_tenant("vision", 5)]
    assert sum(running(a_lab(*jobs)).values()) == 8
    assert sum(running(a_lab(*jobs, borrow=1)).values()) == 5
    guaranteed = [{**job, "guaranteed": True} for job in jobs]
    assert sum(running(a_lab(*guaranteed)).values()) == 4


def test_a_parent_that_does_not_lend_keeps_its_quota_for_those_below_it() -> None:
    others = jobs_of_tenant("other", 8, weight=100.0)
    vision = jobs_of_tenant("vision", 8, queued_s=1.0)
    assert running(a_lab(*vision, *others))["other"] == 8
    kept = running(a_lab(*vision, *others, keeps_idle_quota=(True, False, False)))
    assert kept == {"vision": 4, "other": 4}


def test_weights_are_multiplied_along_the_line() -> None:
    snapshot = a_lab(
        *jobs_of_tenant("nlp", 1), *jobs_of_tenant("vision", 1), *jobs_of_tenant("other", 1)
    )
    assert effective_weight(snapshot, Policy()).tolist() == [6.0, 3.0, 1.0]


def test_published_schedulers_charge_every_level() -> None:
    allowance = Allowance(a_lab(*jobs_of_tenant("nlp", 1)))
    assert allowance.claim("nlp", 0, 3)
    assert not allowance.claim("vision", 0, 2)
    assert allowance.claim("lab", 0, 1)
    assert allowance.claim("other", 0, 9)
