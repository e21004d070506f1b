"""The view that callers bound to tenants have of answers about the jobs of all tenants."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tessera.formulation.base.access import Identity, Role
from tessera.service.server.rpc.visibility import (
    hide_in_nodes,
    hide_in_plan,
    hide_in_round,
)
from tessera.v1 import clusters_pb2, networks_pb2, scheduler_pb2

JOBS = {"mine": "blue", "also-mine": "blue", "theirs": "red", "odd": "the vision team"}
JOB = "clusters/c/jobs/"


def caller(*tenants: str) -> Identity:
    return Identity(
        subject="ana", role=Role.USER, key="token/a", tenants=frozenset(tenants or ("blue",))
    )


OPERATOR = Identity(subject="op", role=Role.OPERATOR, key="token/o")


def tenants_of_jobs(cluster: str, names: Collection[str]) -> dict[str, str]:
    return {name: JOBS[name] for name in names if name in JOBS}


def a_round() -> scheduler_pb2.Round:
    decisions = [scheduler_pb2.Decision(job=f"{JOB}{name}") for name in (*JOBS, "gone")]
    prices = {
        "gpus/a100": 1.0,
        "changes": 0.5,
        "quota/blue": 2.0,
        "held/blue/a100": 2.5,
        "quota/red": 3.0,
        "kept for/red/a100": 4.0,
        "held/the vision team": 5.0,
        "held/the vision team/a100": 5.5,
        "quota/\N{LATIN CAPITAL LETTER U WITH DIAERESIS}ber/a100": 6.0,
        "quota/a/b/a100": 6.5,
        "reserved/a100/0": 7.0,
    }
    return scheduler_pb2.Round(
        decisions=decisions,
        prices=prices,
        used_gpus=dict.fromkeys(prices, 1),
        violations=["theirs has no GPU"],
        failures=["cp-sat: its answer breaks must run: theirs does not run"],
        running=5,
    )


def test_a_round_shows_a_tenant_its_own_decisions_and_rows_and_an_operator_all() -> None:
    message = a_round()
    hide_in_round(caller(), "c", message, tenants_of_jobs)
    assert [d.job for d in message.decisions] == [f"{JOB}mine", f"{JOB}also-mine"]
    own = {"gpus/a100", "changes", "quota/blue", "held/blue/a100", "reserved/a100/0"}
    assert set(message.prices) == set(message.used_gpus) == own
    assert not message.violations
    assert not message.failures
    assert message.running == 5
    assert "theirs" not in str(message)
    hide_in_round(OPERATOR, "c", whole := a_round(), tenants_of_jobs)
    assert whole == a_round()


def test_tenants_with_spaces_and_letters_of_any_language_are_told_apart() -> None:
    message = a_round()
    hide_in_round(caller("the vision team"), "c", message, tenants_of_jobs)
    assert {n for n in message.prices if "/" in n} == {
        "gpus/a100",
        "held/the vision team",
        "held/the vision team/a100",
        "reserved/a100/0",
    }
    assert [d.job for d in message.decisions] == [f"{JOB}odd"]


def test_callers_without_a_tenant_see_no_tenants_row() -> None:
    for identity in (caller(""), replace(caller(), tenants=frozenset())):
        message = a_round()
        hide_in_round(identity, "c", message, tenants_of_jobs)
        assert set(message.prices) == {"gpus/a100", "changes", "reserved/a100/0"}
        assert not message.decisions


def test_a_node_shows_a_tenant_its_own_jobs() -> None:
    jobs = [f"{JOB}{name}" for name in (*JOBS, "gone")]
    nodes = [clusters_pb2.Node(jobs=jobs, free_gpus=1), clusters_pb2.Node()]
    hide_in_nodes(caller(), "c", nodes, tenants_of_jobs)
    assert list(nodes[0].jobs) == [f"{JOB}mine", f"{JOB}also-mine"]
    assert nodes[0].free_gpus == 1
    hide_in_nodes(OPERATOR, "c", nodes, tenants_of_jobs)


def test_a_network_plan_shows_a_tenant_its_own_jobs() -> None:
    def a_plan() -> networks_pb2.NetworkPlan:
        meets = [f"{JOB}theirs", f"{JOB}also-mine"]
        decisions = [
            networks_pb2.NetworkDecision(job=f"{JOB}{name}", contending_jobs=meets)
            for name in ("theirs", "mine", "also-mine")
        ]
        return networks_pb2.NetworkPlan(decisions=decisions, notes=["theirs has no path"])

    plan = a_plan()
    hide_in_plan(caller(), "c", plan, tenants_of_jobs)
    assert [(d.job, list(d.contending_jobs)) for d in plan.decisions] == [
        (f"{JOB}{name}", [f"{JOB}also-mine"]) for name in ("mine", "also-mine")
    ]
    assert not plan.notes
    assert "theirs" not in str(plan)
    hide_in_plan(OPERATOR, "c", whole := a_plan(), tenants_of_jobs)
    assert whole == a_plan()
