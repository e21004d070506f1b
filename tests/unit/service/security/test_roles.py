"""Rules of methods: each has one, and no role has more than it needs."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from tessera.formulation.base.access import Role
from tessera.service.server.convert.names import find_cluster
from tessera.service.server.security.roles import RULES, find_target, short_method
from tessera.v1 import (
    access_pb2,
    agents_pb2,
    clusters_pb2,
    jobs_pb2,
)
from tests.support.methods import all_methods

ABLE = ["viewer", "user", "operator", "admin"]


def test_every_method_of_every_service_has_one_rule_and_no_rule_is_left_over() -> None:
    assert set(RULES) == set(all_methods())


def test_whatever_a_role_may_do_the_higher_ones_may_do() -> None:
    for method, rule in RULES.items():
        people = [role for role in ABLE if role in rule.roles]
        assert people == ABLE[len(ABLE) - len(people) :], method


def test_agents_can_do_what_agents_need_and_anyone_may_only_enrol_log_in_and_check_health() -> None:
    assert {short_method(method) for method, rule in RULES.items() if Role.AGENT in rule.roles} == {
        "Access.GetCaller",
        "Access.GetLogin",
        "Agents.Sync",
        "Agents.Enrol",
        "Agents.RenewCertificate",
        "Estimates.AddProfiles",
        "Estimates.GetProfiling",
        "Health.Check",
        "Health.Watch",
        "ServerReflection.ServerReflectionInfo",
    }
    assert {short_method(method) for method, rule in RULES.items() if rule.is_open} == {
        "Access.GetLogin",
        "Agents.Enrol",
        "Health.Check",
        "Health.Watch",
    }


def test_methods_that_only_read_are_the_ones_whose_names_say_so() -> None:
    reading = (
        "Get",
        "List",
        "Read",
        "Watch",
        "Replay",
        "Verify",
        "Check",
        "Explain",
        "WhatIf",
        "ServerReflection",
    )
    for method, rule in RULES.items():
        name = method.rpartition("/")[2]
        assert rule.changes != name.startswith(reading), method


def test_viewers_change_nothing_and_users_only_jobs_and_their_estimates() -> None:
    changed = {
        role: {
            short_method(m)
            for m, r in RULES.items()
            if r.changes and role in r.roles and not r.is_open
        }
        for role in (Role.VIEWER, Role.USER)
    }
    assert changed[Role.VIEWER] == set()
    assert changed[Role.USER] == {
        "Estimates.EstimateCells",
        "Jobs.SubmitJob",
        "Jobs.SubmitJobs",
        "Jobs.UpdateJob",
        "Jobs.CancelJob",
        "Jobs.HoldJob",
        "Jobs.ReleaseJob",
        "Jobs.ChangeArray",
        "Webhooks.CreateWebhook",
        "Webhooks.DeleteWebhook",
        "Webhooks.TestWebhook",
    }


@pytest.mark.parametrize(
    ("request_", "target", "cluster"),
    [
        (jobs_pb2.GetJobRequest(name="clusters/a/jobs/b"), "clusters/a/jobs/b", "a"),
        (jobs_pb2.SubmitJobRequest(parent="clusters/a"), "clusters/a", "a"),
        (
            jobs_pb2.SubmitJobRequest(
                parent="clusters/a", job=jobs_pb2.Job(name="clusters/z/jobs/b")
            ),
            "clusters/a",
            "a",
        ),
        (
            jobs_pb2.UpdateJobRequest(job=jobs_pb2.Job(name="clusters/a/jobs/b")),
            "clusters/a/jobs/b",
            "a",
        ),
        (
            clusters_pb2.DeleteNodesRequest(
                parent="clusters/a", names=["clusters/a/nodes/m", "clusters/a/nodes/n"]
            ),
            "clusters/a/nodes/m and 1 more",
            "a",
        ),
        (access_pb2.RevokeTokenRequest(name="ana"), "ana", ""),
        (agents_pb2.EnrolRequest(parent="clusters/a"), "clusters/a", "a"),
        (clusters_pb2.ListClustersRequest(), "", ""),
    ],
)
def test_the_target_and_the_cluster_of_a_request_are_what_it_names(
    request_: Message, target: str, cluster: str
) -> None:
    assert find_target(request_) == target
    assert find_cluster(request_) == cluster
    assert find_target(None) == ""  # a stream of requests
