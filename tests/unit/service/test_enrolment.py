"""Enrolment: how often a host may try, and who may renew."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.access import IDENTITY, Identity, Role
from tessera.formulation.errors import NotAllowed, PermissionDenied, TooBusy
from tessera.service.rpc.enrolment import Enrolment, EnrolmentSettings
from tessera.service.rpc.lanes import CALLER, Share
from tessera.v1 import agents_pb2 as pb


class Calls:
    """Threads that count what they are asked to do, and do nothing."""

    def __init__(self) -> None:
        self.works = 0

    async def run(self, *_: Any) -> pb.EnrolResponse:
        self.works += 1
        return pb.EnrolResponse()


def an_enrolment(calls: Calls) -> Enrolment:
    settings = EnrolmentSettings(
        ca_certificate=Path("ca.pem"), ca_key=Path("ca.key"), hours=1.0, port=lambda: 1
    )
    store: Any = object()
    threads: Any = calls
    return Enrolment(store, settings, threads, lambda: 0.0, lambda: 0.0)


async def test_ten_thousand_enrolments_of_one_host_take_few_threads_and_leave_others_alone() -> (
    None
):
    calls = Calls()
    enrolment, outcomes = an_enrolment(calls), Counter[str]()
    CALLER.set(Share(client="10.0.0.1", cluster="c"))
    for _ in range(10_000):
        try:
            await enrolment.enrol(pb.EnrolRequest())
        except TooBusy as error:
            outcomes[str(error).partition(";")[0]] += 1
    assert outcomes == {"enrolments of 10.0.0.1 may not exceed 1,200 a minute": 9_800}
    assert calls.works == 200
    CALLER.set(Share(client="10.0.0.2", cluster="c"))
    await enrolment.enrol(pb.EnrolRequest())


async def test_only_an_agent_with_a_certificate_renews_it() -> None:
    enrolment = an_enrolment(Calls())
    for identity in (
        Identity(subject="root", role=Role.ADMIN, key="token/r"),
        Identity(subject="local", role=Role.ADMIN, key="local", is_verified=False),
    ):
        IDENTITY.set(identity)
        with pytest.raises(PermissionDenied, match="only an agent that calls with its certificate"):
            await enrolment.renew(pb.RenewCertificateRequest())


async def test_a_server_without_an_authority_signs_nothing() -> None:
    threads: Any = Calls()
    enrolment = Enrolment(None, None, threads, lambda: 0.0)
    with pytest.raises(NotAllowed, match="signs no certificates"):
        await enrolment.enrol(pb.EnrolRequest())
    with pytest.raises(NotAllowed, match="signs no certificates"):
        await enrolment.renew(pb.RenewCertificateRequest())
