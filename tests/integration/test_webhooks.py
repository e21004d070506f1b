"""Webhooks on PostgreSQL: what arrives where, in which order, and what happens if it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from grpc import StatusCode

from tessera.client import ChannelSettings
from tessera.db.base.webhooks import (
    add_webhook,
    claim_webhook,
    delete_webhook,
    get_webhook,
    list_webhooks,
    note_delivery,
    note_failure,
    revive_webhook,
)
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.access import Role
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import AlreadyExists, LimitReached, NotFound
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.webhooks import (
    MAX_FAILURES,
    MAX_WEBHOOKS,
    WebhookEvent,
    WebhookRecord,
    WebhookSpec,
    sign_body,
)
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.webhooks.addresses import read_networks
from tessera.service.server.webhooks.deliverer import WebhookDeliverer
from tessera.service.server.webhooks.sending import Sender, SendingOptions
from tessera.v1 import jobs_pb2, webhooks_pb2
from tests.support.api import INVALID
from tests.support.hook_target import HookTarget, hook_target
from tests.support.patience import PATIENCE_S
from tests.support.secured_server import (
    FOREIGN,
    OWN,
    PLACE,
    SecuredServer,
    fill,
    requests_for,
    secured_server,
)
from tests.support.stored_cluster import (
    C,
    a_segment,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    fail,
    run,
    segments_of,
    start,
    submit,
    wait,
)

A0 = "a100-0"
KEY = b"k" * 32


@pytest.fixture
def target() -> Iterator[HookTarget]:
    """Return a user's server."""
    with hook_target() as found:
        yield found


@pytest.fixture
def hooks(database: Database) -> Store:
    """Return the store of webhooks."""
    return Store(database)


@pytest.fixture
def deliverer(hooks: Store) -> WebhookDeliverer:
    """Return a replica's deliverer, which works only when the test lets it."""
    options = SendingOptions(plain_http=True, networks=read_networks("n", "127.0.0.0/8"))
    clock = SystemClock()
    return WebhookDeliverer(hooks, Sender(options, clock.wall_s), Calls(1, "test"), clock, KEY)


def register(store: Store, target: HookTarget, name: str = "h", **more: Any) -> None:
    spec = WebhookSpec(**{"name": name, "url": target.url, "salt": name} | more)
    store.change(add_webhook, C, spec)


def delete(store: Store, name: str, tenant: str) -> None:
    store.change(delete_webhook, C, name, [tenant])


def record(hooks: Store, name: str = "h") -> WebhookRecord:
    return hooks.read(get_webhook, C, name, None)


def deliver_all(deliverer: WebhookDeliverer) -> None:
    while deliverer.take_turn():
        pass


def taken(target: HookTarget) -> list[dict[str, Any]]:
    return [json.loads(delivery.body) for delivery in target.taken]


def reported(target: HookTarget) -> list[tuple[str, str]]:
    return [(body["job"], body["event"]) for body in taken(target)]


def test_the_events_of_jobs_arrive_in_order(
    lab: Store, hooks: Store, deliverer: WebhookDeliverer, target: HookTarget
) -> None:
    register(lab, target)
    submit(lab, a_spec("a", max_retries=0), a_spec("b"), a_spec("c"))
    run(lab, a=[(A0, [0])], b=[(A0, [1])])
    fail(lab, "a", "out of memory")
    agents_report(lab, phase="succeeded")
    apply_event(lab, "c", JobEvent.CANCEL)
    assert record(hooks).pending == 5
    deliver_all(deliverer)
    assert sorted(reported(target)[:2]) == [("a", "started"), ("b", "started")]
    assert reported(target)[2:] == [("a", "failed"), ("b", "finished"), ("c", "cancelled")]
    failed = taken(target)[2]
    assert failed["error"] == "on a100-0: out of memory"
    assert failed["cluster"] == C
    assert failed["time"].endswith("Z")
    found = record(hooks)
    assert (found.delivered, found.pending, found.failures) == (5, 0, 0)


def test_only_events_that_a_webhook_asks_for_are_stored(
    lab: Store, hooks: Store, deliverer: WebhookDeliverer, target: HookTarget
) -> None:
    register(lab, target, "nlp", tenant="nlp", labels={"team": "x"})
    register(lab, target, "ends", all_tenants=True, events=(WebhookEvent.CANCELLED,))
    submit(
        lab,
        a_spec("mine", tenant="nlp", labels={"team": "x", "more": "y"}),
        a_spec("unlabelled", tenant="nlp"),
        a_spec("theirs", tenant="vision", labels={"team": "x"}),
    )
    run(lab, mine=[(A0, [0])], unlabelled=[(A0, [1])], theirs=[(A0, [2])])
    apply_event(lab, "theirs", JobEvent.CANCEL)
    assert (record(hooks, "nlp").pending, record(hooks, "ends").pending) == (1, 1)
    deliver_all(deliverer)
    assert sorted(reported(target)) == [("mine", "started"), ("theirs", "cancelled")]


def test_reasons_of_rounds_are_not_sent_since_they_may_name_other_tenants(
    lab: Store, deliverer: WebhookDeliverer, target: HookTarget
) -> None:
    register(lab, target)
    submit(lab, a_spec("a"))
    run(lab, a=[(A0, [0])])
    snapshot = lab.snapshot(C)
    commit(lab, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND))
    deliver_all(deliverer)
    assert reported(target) == [("a", "started"), ("a", "suspended")]
    assert b"no GPU is free" not in target.taken[1].body


def test_a_promise_that_lapses_is_reported(
    lab: Store, deliverer: WebhookDeliverer, target: HookTarget
) -> None:
    register(lab, target, events=(WebhookEvent.DEADLINE_LAPSED,))
    submit(lab, a_spec("a", deadline_s=4e9))
    snapshot = lab.snapshot(C)
    begun = start(snapshot, "a", [(A0, [0])])._replace(admitted=True)
    commit(lab, snapshot, begun, schedule_segments=segments_of(snapshot, a=[a_segment()]))
    agents_report(lab)
    snapshot = lab.snapshot(C)
    commit(lab, snapshot, start(snapshot, "a", [(A0, [0])], DecisionKind.KEEP))
    deliver_all(deliverer)
    assert reported(target) == [("a", "deadline_lapsed")]


def test_failed_deliveries_are_tried_again_until_the_webhook_is_dead(
    lab: Store,
    database: Database,
    hooks: Store,
    deliverer: WebhookDeliverer,
    target: HookTarget,
) -> None:
    register(lab, target)
    submit(lab, a_spec("a"), a_spec("b"))
    apply_event(lab, "a", JobEvent.CANCEL)
    target.status = 503
    for _ in range(MAX_FAILURES):
        assert not record(hooks).disabled
        deliver_all(deliverer)  # once: it waits longer and longer
        execute(database, "UPDATE webhooks SET retry_at = now() WHERE retry_at > now()")
    found = record(hooks)
    assert (found.disabled, found.failures, found.pending) == (True, MAX_FAILURES, 1)
    assert "answered 503" in found.last_error
    assert len(target.taken) == MAX_FAILURES
    apply_event(lab, "b", JobEvent.CANCEL)  # a dead webhook gets nothing new
    target.status = 200
    lab.change(revive_webhook, C, "h")
    deliver_all(deliverer)
    assert reported(target)[MAX_FAILURES:] == [("a", "cancelled")]
    assert not record(hooks).disabled


def test_a_webhook_that_fails_does_not_delay_others(
    lab: Store, deliverer: WebhookDeliverer, target: HookTarget
) -> None:
    with hook_target() as broken:
        broken.status = 500
        register(lab, broken, "broken")
        register(lab, target, "works")
        submit(lab, a_spec("a"))
        apply_event(lab, "a", JobEvent.CANCEL)
        deliver_all(deliverer)
        assert len(broken.taken) == 1
    assert reported(target) == [("a", "cancelled")]


def test_replicas_deliver_each_event_once_and_in_order(
    lab: Store, deliverer: WebhookDeliverer, target: HookTarget
) -> None:
    register(lab, target)
    names = [f"j{i:02}" for i in range(20)]
    submit(lab, *map(a_spec, names))
    for name in names:
        apply_event(lab, name, JobEvent.CANCEL)
    with ThreadPoolExecutor(4) as replicas:
        list(replicas.map(deliver_all, [deliverer] * 4))
    assert [job for job, _ in reported(target)] == names


def test_another_replica_goes_on_after_one_that_died(
    lab: Store,
    database: Database,
    hooks: Store,
    deliverer: WebhookDeliverer,
    target: HookTarget,
) -> None:
    register(lab, target)
    submit(lab, a_spec("a"))
    apply_event(lab, "a", JobEvent.CANCEL)
    dead = hooks.update(claim_webhook)
    assert dead is not None
    assert not deliverer.take_turn()
    execute(database, "UPDATE webhooks SET claimed_until = now() - interval '1 s'")
    deliver_all(deliverer)
    assert reported(target) == [("a", "cancelled")]
    assert not hooks.update(note_delivery, dead, dead.deliveries[0].number)
    hooks.update(note_failure, dead, "late")  # its claim is over, so this changes nothing
    assert record(hooks).failures == 0


def test_webhooks_are_limited_and_belong_to_tenants(
    lab: Store, hooks: Store, target: HookTarget
) -> None:
    for i in range(MAX_WEBHOOKS):
        register(lab, target, f"h{i}", tenant="nlp")
    with pytest.raises(LimitReached):
        register(lab, target, "more", tenant="nlp")
    with pytest.raises(AlreadyExists):
        register(lab, target, "h1", tenant="vision")
    register(lab, target, "all", all_tenants=True)
    assert hooks.read(list_webhooks, C, "", 100, ["vision"]) == []
    assert len(hooks.read(list_webhooks, C, "", 100, ["nlp"])) == MAX_WEBHOOKS
    for hidden in ("h1", "all"):
        with pytest.raises(NotFound):
            hooks.read(get_webhook, C, hidden, ["vision"])
        with pytest.raises(NotFound):
            delete(lab, hidden, "vision")
    delete(lab, "h1", "nlp")


async def test_webhooks_arrays_and_dependencies_belong_to_tenants(
    tmp_path: Path, database: Database
) -> None:
    key_file = tmp_path / "webhooks.key"
    key_file.write_text(64 * "k")
    key_file.chmod(0o600)
    allowed = {"webhook_networks": "127.0.0.0/8", "webhook_plain_http": True}
    with hook_target() as target:
        async with secured_server(
            tmp_path, database, webhook_key_file=str(key_file), **allowed
        ) as server:
            await use_as_tenants(server, target)


async def use_as_tenants(server: SecuredServer, target: HookTarget) -> None:
    """Register, test and use a webhook as one tenant, and look for it as another one."""
    await fill(server, server.user(server.add_token("ada", Role.ADMIN)))
    own, foreign = (
        server.user(server.add_token(name, Role.USER, tenants=[name])) for name in (OWN, FOREIGN)
    )
    samples = requests_for()

    async def call(who: ChannelSettings, method: str, request: Message) -> Any:
        return await server.call(who, f"/tessera.v1.{method}", request)

    async def refused(who: ChannelSettings, method: str, request: Message) -> StatusCode:
        return (await server.outcome(who, f"/tessera.v1.{method}", request))[0]

    create = webhooks_pb2.CreateWebhookRequest(
        parent=PLACE,
        webhook_id="h",
        webhook=webhooks_pb2.Webhook(url=target.url, tenant=OWN, events=["cancelled"]),
        request_id="once",
    )
    created = await call(own, "Webhooks/CreateWebhook", create)
    assert created.secret.startswith("tessera_hook_")
    assert await call(own, "Webhooks/CreateWebhook", create) == created
    named = webhooks_pb2.TestWebhookRequest(name=created.name)
    assert (await call(own, "Webhooks/TestWebhook", named)).delivered
    listing = webhooks_pb2.ListWebhooksRequest(parent=PLACE)
    (shown,) = (await call(own, "Webhooks/ListWebhooks", listing)).webhooks
    assert (shown.secret, shown.url) == ("", target.url)
    # Another tenant sees nothing of it, and cannot use the first one's name.
    assert not (await call(foreign, "Webhooks/ListWebhooks", listing)).webhooks
    assert await refused(foreign, "Webhooks/TestWebhook", named) is StatusCode.NOT_FOUND
    assert await refused(foreign, "Webhooks/CreateWebhook", create) is StatusCode.NOT_FOUND
    create.webhook.tenant, create.webhook.all_tenants = "", True
    assert await refused(own, "Webhooks/CreateWebhook", create) is StatusCode.FAILED_PRECONDITION
    # The server itself delivers what happens.
    cancel = jobs_pb2.CancelJobRequest(name=f"{PLACE}/jobs/ours-1")
    await call(own, "Jobs/CancelJob", cancel)
    await call(foreign, "Jobs/CancelJob", jobs_pb2.CancelJobRequest(name=f"{PLACE}/jobs/theirs-1"))
    async with asyncio.timeout(PATIENCE_S):
        while len(target.taken) < 2:
            await asyncio.sleep(0.01)
    body, header = target.taken[1].body, target.taken[1].headers["Tessera-Signature"]
    assert json.loads(body)["job"] == "ours-1"
    assert header == sign_body(created.secret, body, int(header[2:].partition(",")[0]))
    # Arrays and dependencies.
    submit = samples["/tessera.v1.Jobs/SubmitJob"]
    assert isinstance(submit, jobs_pb2.SubmitJobRequest)
    submit.job.tenant, submit.job_id = OWN, "mine"
    submit.job.after.append(jobs_pb2.Dependency(job=f"{PLACE}/jobs/theirs-2"))
    assert await refused(own, "Jobs/SubmitJob", submit) is INVALID
    del submit.job.after[:]
    submit.ClearField("parent")
    submit.array.CopyFrom(jobs_pb2.ArrayIndices(last=1))
    await call(own, "Jobs/SubmitJobs", jobs_pb2.SubmitJobsRequest(parent=PLACE, requests=[submit]))
    asked = jobs_pb2.GetArrayRequest(name=f"{PLACE}/arrays/mine")
    assert (await call(own, "Jobs/GetArray", asked)).size == 2
    assert await refused(foreign, "Jobs/GetArray", asked) is StatusCode.NOT_FOUND
    change = jobs_pb2.ChangeArrayRequest(name=asked.name, change=jobs_pb2.ChangeArrayRequest.CANCEL)
    assert await refused(foreign, "Jobs/ChangeArray", change) is StatusCode.NOT_FOUND
    assert dict((await call(own, "Jobs/GetArray", asked)).states) == {"QUEUED": 2}
