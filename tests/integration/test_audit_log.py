"""The audit log, and the log of requests."""

from __future__ import annotations

import contextvars
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import grpc
import grpc.aio
import pytest
import sqlalchemy as sa

from tessera.db.access import audit_log
from tessera.db.access.audit_log import MAX_TEXT, add_refusals
from tessera.db.access.enrolment import (
    add_certificate,
    create_join_token,
    enrol,
    list_certificates,
    revoke_agent,
    revoke_join_token,
)
from tessera.db.access.tokens import create_token, find_token, list_tokens, revoke_token
from tessera.db.clusters import network
from tessera.db.clusters.deletion import delete_cluster
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.reads import get_job
from tessera.db.store.round_store import RoundStore
from tessera.db.store.store import Connection, Store
from tessera.db.upkeep import prune
from tessera.db.upkeep.purge import purge_batch
from tessera.formulation.answer.network.outcome import NetworkDecision, NetworkOutcome
from tessera.formulation.base.access import AuditedCall
from tessera.formulation.base.errors import (
    DeadlineTooShort,
    InvalidInput,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    RoundSuperseded,
)
from tessera.formulation.base.logs import JSON, begin_ids, current_ids, make_handler
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.access import AuditFilter, AuditRecord, Refusal
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.rounds import NetworkCommit
from tessera.formulation.records.store import Request, Retention
from tessera.formulation.state.topologies.described import decode_topology
from tessera.service.server.rounds import worker
from tessera.service.server.rounds.background import run_in_process
from tessera.service.server.rounds.loop import RoundLoop
from tessera.v1 import jobs_pb2, jobs_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.support.access import (
    a_certificate,
    a_join_token,
    a_token,
    add_audit_entries,
    audit,
    show,
)
from tests.support.agents import until
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details
from tests.support.running_server import a_cluster, channel_to, settings
from tests.support.stored_cluster import (
    C,
    a_round,
    a_spec,
    apply_event,
    execute,
    run,
    submit,
    wait,
)

NETWORK = decode_topology(
    '{"kind":"clos","hosts":2,"host":"a100","tors":1,"aggregations":1,"tor_bytes_per_s":25e9}'
)
JOBS = f"clusters/{C}/jobs"


def a_refusal(**overrides: Any) -> Refusal:
    fields: dict[str, Any] = {
        "subject": "",
        "role": "",
        "proof": "",
        "method": "Jobs.SubmitJob",
        "target": f"{JOBS}/a",
        "peer": "10.0.0.9:1",
        "request_id": "",
        "outcome": "UNAUTHENTICATED",
        "detail": "the token has expired",
        "count": 1,
    }
    return Refusal(**fields | overrides)


def entries(access: Store, **chosen: Any) -> list[AuditRecord]:
    return access.read(audit_log.list_entries, AuditFilter(**chosen), 0, 100)


def targets(access: Store, **chosen: Any) -> list[str]:
    return [entry.target for entry in entries(access, **chosen)]


def test_a_change_adds_one_entry_with_all_that_is_known_of_its_call(
    access: Store, lab: Store
) -> None:
    with audit(f"{JOBS}/a") as call:
        submit(lab, a_spec("a"))
    (entry,) = entries(access)
    stored = {name: getattr(entry, name) for name in AuditedCall.__slots__}
    assert AuditedCall(**stored) == call
    assert (entry.outcome, entry.detail, entry.count) == ("OK", "", 1)
    assert lab.read(get_job, C, "a").created_s <= entry.time_s
    with audit(f"{JOBS}/b"):  # for which a thread works
        context = contextvars.copy_context()
    context.run(submit, lab, a_spec("b"))
    submit(lab, a_spec("c"))
    assert targets(access) == [f"{JOBS}/b", f"{JOBS}/a"]


def test_what_is_not_audited_fails_or_is_only_validated_adds_no_entry(
    access: Store, lab: Store, database: Database
) -> None:
    submit(lab, a_spec("a"))  # for no call
    access.change(create_token, a_token("ana"), "root")

    def break_at_commit(connection: Connection) -> bytes:
        """Let the deferred trigger refuse at the commit, after the entry was added."""
        statement = """
            INSERT INTO allocations (node_id, gpu, job_id, generation, hold)
            SELECT g.node_id, g.gpu, j.id, 1, 'held' FROM gpus g, jobs j WHERE j.name = 'a' LIMIT 1;
            UPDATE jobs SET state = 'held' WHERE name = 'a'
        """
        connection.execute(sa.text(statement))
        return b""

    with audit("failing"):
        with pytest.raises(NotFound):
            apply_event(lab, "missing", JobEvent.CANCEL)
        with pytest.raises(NotAuthenticated):
            access.change(enrol, show(a_join_token()), a_certificate())
        with pytest.raises(InvalidInput, match="cannot own GPUs"):
            lab.write(None, break_at_commit)
        lab.write(
            None, lambda w: str(submit_jobs(w, C, [a_spec("b")])).encode(), validate_only=True
        )
    assert entries(access) == []


def test_a_repeated_request_adds_no_second_entry(access: Store, lab: Store) -> None:
    request = Request(id="r", method="m", digest="d")
    for _ in range(3):
        with audit(f"{JOBS}/a"):
            assert lab.write(request, lambda w: str(submit_jobs(w, C, [])).encode()) == b"[]"
    assert targets(access) == [f"{JOBS}/a"]


def test_a_committed_round_adds_one_entry_also_when_it_is_repeated(
    access: Store, lab: Store
) -> None:
    submit(lab, a_spec("a"))
    snapshot = lab.snapshot(C)
    request = Request(id="r", method="Schedule", digest="d")
    decided = a_round(snapshot, wait(snapshot, "a"), request=request)
    with audit(f"clusters/{C}", method="Scheduler.Schedule"):
        with pytest.raises(DeadlineTooShort):
            lab.commit(decided, lambda: False)
        assert entries(access) == []
        first = lab.commit(decided)
        assert lab.commit(decided) == first
        with pytest.raises(RoundSuperseded):
            lab.commit(a_round(snapshot, wait(snapshot, "a")))
        lab.begin_round(C, request)
    assert [entry.method for entry in entries(access)] == ["Scheduler.Schedule"]


def test_a_network_plan_adds_an_entry_if_it_changes_something(access: Store, lab: Store) -> None:
    lab.change(network.set_topology, C, NETWORK, None)
    submit(lab, a_spec("a"))
    run(lab, a=[("a100-0", [0])])
    decision = NetworkDecision(
        job="a",
        generation=1,
        rank=0,
        level=0,
        tag=-1,
        priority=1.0,
        intensity=1.0,
        contending_jobs=(),
        note="",
        routes=(),
    )
    outcome = NetworkOutcome(levels=1, decisions=(decision,), notes=(), violations=())
    plan = NetworkCommit(snapshot=lab.snapshot(C), outcome=outcome, cause="call", seconds=0.0)
    with audit(f"clusters/{C}/networkPlans"):
        assert lab.update(network.commit_plan, plan) is not None
        assert lab.update(network.commit_plan, plan) is None
    run(lab)
    with audit("late"), pytest.raises(RoundSuperseded):
        lab.update(network.commit_plan, plan)
    assert targets(access) == [f"clusters/{C}/networkPlans"]


def test_an_agent_that_registers_adds_an_entry(access: Store, lab: Store) -> None:
    with audit(f"clusters/{C}/agents/x", role="agent"):
        lab.hello(C, "x", "first", [NodeSpec(name="n", gpu_type="a100", gpus=1)])
        with pytest.raises(InvalidInput):
            lab.hello(C, "x", "first", [NodeSpec(name="n", gpu_type="none", gpus=1)])
    assert [entry.role for entry in entries(access)] == ["agent"]


def test_every_change_of_identities_adds_an_entry(access: Store, lab: Store) -> None:
    token, twice = a_token("ana"), a_join_token(uses=2)
    first = a_certificate()
    changes: list[Callable[[], object]] = [
        lambda: access.change(create_token, token, "root"),
        lambda: access.change(revoke_token, "ana"),
        lambda: access.change(create_join_token, twice, "ops"),
        lambda: access.change(enrol, show(twice), first),
        lambda: access.change(add_certificate, a_certificate(), first.serial),
        lambda: access.change(revoke_join_token, C, twice.id),
        lambda: access.change(revoke_agent, C, first.agent),
    ]
    for number, change in enumerate(changes):
        with audit(str(number)):
            change()
    assert targets(access) == [str(number) for number in reversed(range(len(changes)))]
    reads: list[Callable[[], object]] = [
        lambda: access.read(find_token, token.id),
        lambda: access.read(list_tokens, with_ended=True),
        lambda: access.read(list_certificates, C),
        lambda: access.update(add_refusals, []),
        lambda: lab.prune_batch(C, Retention(audit_s=1e9)),
    ]
    with audit("read"):
        for read in reads:
            read()
    assert len(entries(access)) == len(changes)


def test_entries_of_a_deleted_cluster_stay(access: Store, lab: Store) -> None:
    with audit(f"{JOBS}/a"):
        submit(lab, a_spec("a"))
    apply_event(lab, "a", JobEvent.CANCEL)
    with audit(f"clusters/{C}"):
        lab.change(delete_cluster, C, None, lab.silence_s, force=True)
    while lab.update(purge_batch):
        pass
    assert targets(access) == [f"clusters/{C}", f"{JOBS}/a"]


def test_entries_can_only_be_added(access: Store, database: Database) -> None:
    access.update(add_refusals, [a_refusal()])
    before = entries(access)
    for statement in (
        "UPDATE audit_log SET subject = 'eve'",
        "UPDATE audit_log SET subject = 'eve' WHERE false",
        "DELETE FROM audit_log",
        "TRUNCATE audit_log",
        "SET LOCAL tessera.pruning = 'on'; UPDATE audit_log SET count = 2",
        "SET LOCAL tessera.pruning = 'on'; TRUNCATE audit_log",
        "SET LOCAL tessera.pruning = 'off'; DELETE FROM audit_log",
        "INSERT INTO audit_log OVERRIDING SYSTEM VALUE SELECT * FROM audit_log"
        " ON CONFLICT (number) DO UPDATE SET subject = 'eve'",
    ):
        with pytest.raises(InvalidInput, match="entries of the audit log can only be added"):
            execute(database, statement)
        assert entries(access) == before
    # The permission to prune ends with its transaction.
    with database.engine.connect() as connection:
        connection.execute(sa.text("SET LOCAL tessera.pruning = 'on'"))
        connection.execute(sa.text("DELETE FROM audit_log"))
        connection.rollback()
        with pytest.raises(sa.exc.IntegrityError, match="can only be added"):
            connection.execute(sa.text("DELETE FROM audit_log"))
    assert entries(access) == before


def test_texts_that_a_stranger_chose_are_stored_in_a_bounded_form(access: Store) -> None:
    access.update(
        add_refusals, [a_refusal(target="clusters/\0" + "\N{SNOWMAN}" * 100_000, detail="'; --")]
    )
    (entry,) = entries(access)
    assert entry.target.startswith("clusters/\N{REPLACEMENT CHARACTER}\N{SNOWMAN}")
    assert len(entry.target) == MAX_TEXT
    assert entry.detail == "'; --"
    assert targets(access, target="clusters/\0") == []
    assert targets(access, target=entry.target) == [entry.target]


def test_entries_are_listed_newest_first_in_pages(access: Store) -> None:
    access.update(add_refusals, [a_refusal(target=str(i)) for i in range(7)])
    seen, before = [], 0
    while page := access.read(audit_log.list_entries, AuditFilter(), before, 3):
        seen += [entry.target for entry in page]
        before = page[-1].number
    assert seen == ["6", "5", "4", "3", "2", "1", "0"]


def test_entries_are_chosen_by_subject_method_outcome_and_resource(access: Store) -> None:
    names = (
        JOBS,
        f"{JOBS}/a",
        f"{JOBS}/ab",
        f"{JOBS}/a/history",
        f"{JOBS}/a and 2 more",
        f"{JOBS}/a-1",
        f"clusters/{C}",
        f"clusters/{C}2/jobs/a",
    )
    access.update(add_refusals, [a_refusal(target=name) for name in names])
    access.update(
        add_refusals, [a_refusal(subject="ana", method="M", outcome="NOT_FOUND", target="x")]
    )
    assert set(targets(access, target=f"{JOBS}/a")) == {names[1], names[3], names[4]}
    assert set(targets(access, target=f"clusters/{C}")) == set(names[:-1])
    assert targets(access, target="%") == []
    for chosen in ({"subject": "ana"}, {"method": "M"}, {"outcome": "NOT_FOUND"}):
        assert targets(access, **chosen) == ["x"]
        assert targets(access, target="y", **chosen) == []


def test_entries_are_chosen_by_time(access: Store, database: Database) -> None:
    for days in (3, 2, 1):
        add_audit_entries(database, days)
    old, middle, new = sorted(entry.time_s for entry in entries(access))
    assert [e.time_s for e in entries(access, since_s=middle)] == [new, middle]
    assert [e.time_s for e in entries(access, until_s=middle)] == [old]
    assert [e.time_s for e in entries(access, since_s=old + 1, until_s=new)] == [middle]


def test_old_entries_are_pruned_in_bounded_batches(
    access: Store, lab: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "BATCH_ROWS", 2)
    add_audit_entries(database, 400, 5)
    access.update(add_refusals, [a_refusal()])

    def prune_entries(keep_s: float) -> int:
        return lab.prune_batch(C, Retention(audit_s=keep_s, jobs_s=0.0))["audit_log"]

    assert prune_entries(401 * 86_400.0) == lab.prune(0.0, 0)["audit_log"] == 0
    assert lab.count_old(0.0, 0, 365 * 86_400.0)["audit_log"] == 5
    assert [prune_entries(365 * 86_400.0) for _ in range(4)] == [2, 2, 1, 0]
    assert prune_entries(float("inf")) == 0
    assert len(entries(access)) == 1


log = logging.getLogger(__name__)
MISSING = jobs_pb2.GetJobRequest(name="clusters/c/jobs/none")
HOSTILE_IDS = ("", "a b", "x" * 129, "é", "a\tb")


class LogReader:
    """A log in JSON that a test reads."""

    def __init__(self) -> None:
        self.handler = make_handler(JSON)
        assert isinstance(self.handler, logging.StreamHandler)
        self._stream = io.StringIO()
        self.handler.setStream(self._stream)

    def records(self, **facts: Any) -> list[dict[str, Any]]:
        """Return the records with these facts."""
        records = [json.loads(line) for line in self._stream.getvalue().splitlines()]
        return [record for record in records if facts.items() <= record.items()]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[LogReader]:
    caplog.set_level(logging.INFO)
    reader = LogReader()
    logging.root.addHandler(reader.handler)
    yield reader
    logging.root.removeHandler(reader.handler)


async def refused(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await jobs_pb2_grpc.JobsStub(channel).GetJob(MISSING, metadata=metadata)
    return error.value


def scheduling(
    channel: grpc.aio.Channel, request_id: str = ""
) -> grpc.aio.UnaryUnaryCall[scheduler_pb2.ScheduleRequest, scheduler_pb2.Round]:
    request = scheduler_pb2.ScheduleRequest(parent="clusters/c", request_id=request_id)
    return scheduler_pb2_grpc.SchedulerStub(channel).Schedule(request, timeout=PATIENCE_S)


async def test_a_call_has_the_id_of_its_caller_in_its_records_and_in_its_error(
    database: Database, store: Store, logged: LogReader
) -> None:
    a_cluster(store)
    async with channel_to(settings(database)) as channel:
        info, _ = error_details(await refused(channel, ("x-request-id", "lab-17")))
    assert info.metadata["request_id"] == "lab-17"
    (record,) = logged.records(request_id="lab-17")
    facts = ("event", "level", "method", "cluster", "code")
    assert [record[key] for key in facts] == [
        "rpc_refused",
        "INFO",
        "Jobs.GetJob",
        "c",
        "NOT_FOUND",
    ]
    assert "clusters/c/jobs/none" in record["error"]


async def test_a_call_without_a_usable_id_gets_one(
    database: Database, store: Store, logged: LogReader
) -> None:
    a_cluster(store)
    async with channel_to(settings(database)) as channel:
        errors = [await refused(channel)]
        for text in HOSTILE_IDS:
            if text.isascii() and text.isprintable():  # others cannot be sent
                errors.append(await refused(channel, ("x-request-id", text)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await scheduling(channel, "a\n2026 ERROR forged")
    ids = {error_details(refusal)[0].metadata["request_id"] for refusal in (*errors, error.value)}
    assert len(ids) == len(errors) + 1
    assert {record["request_id"] for record in logged.records(event="rpc_refused")} == ids
    assert all(len(request_id) == 32 for request_id in ids)


async def test_all_records_of_a_round_have_its_number_and_the_id_of_its_request(
    database: Database, store: Store, logged: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store)
    plan = RoundLoop._plan

    def plan_aloud(*arguments: Any) -> Any:  # in a thread of a lane
        log.warning("solving", extra={"event": "solving"})
        return plan(*arguments)

    monkeypatch.setattr(RoundLoop, "_plan", plan_aloud)
    async with channel_to(settings(database)) as channel:
        committed = await scheduling(channel, "r-1")
    ids = {"request_id": "r-1", "method": "Scheduler.Schedule", "cluster": "c", "round": 1}
    assert committed.name == "clusters/c/rounds/1"
    assert [r["event"] for r in logged.records(**ids)] == ["solving", "round_committed"]
    (record,) = logged.records(event="round_committed")
    assert (record["started"], record["waiting"], record["gap"]) == (0, 1, 0.0)
    assert {"load_s", "solve_s", "place_s", "check_s"} <= record.keys()


async def test_a_round_that_fails_names_itself_to_the_caller(
    database: Database, store: Store, logged: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotAllowed("not today")

    async with channel_to(settings(database)) as channel:
        await scheduling(channel)
        monkeypatch.setattr(RoundStore, "commit", refuse)
        with pytest.raises(grpc.aio.AioRpcError, match="not today") as error:
            await scheduling(channel, "r-2")
    info, _ = error_details(error.value)
    assert dict(info.metadata) == {"request_id": "r-2", "round": "2"}
    assert [r["event"] for r in logged.records(request_id="r-2", round=2)] == ["rpc_refused"]


async def test_an_error_that_nobody_expected_leads_the_operator_to_its_traceback(
    database: Database, store: Store, logged: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store)

    def stumble(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("the implementation's own business")

    monkeypatch.setattr("tessera.service.server.rpc.jobs.get_job", stumble)
    async with channel_to(settings(database)) as channel:
        error = await refused(channel)
    info, _ = error_details(error)
    assert (error.code(), info.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    request_id = info.metadata["request_id"]
    assert error.details() == (
        "internal error in /tessera.v1.Jobs/GetJob; the server's log has the cause, with"
        f" request_id {request_id}"
    )
    (record,) = logged.records(event="rpc_failed", request_id=request_id)
    assert "ZeroDivisionError: the implementation's own business" in record["traceback"]


async def test_a_periodic_round_has_its_cluster_and_number_and_no_request(
    database: Database, store: Store, logged: LogReader
) -> None:
    a_cluster(store)
    async with channel_to(settings(database, period_s=300.0)):
        await until(lambda: bool(logged.records(event="round_committed")))
    (record,) = logged.records(event="round_committed")
    assert (record["cluster"], record["round"]) == ("c", 1)
    assert not record.keys() & {"request_id", "method"}


def log_aloud(order: str) -> str:
    """Log in a process of its own."""
    log.warning("a solver failed", extra={"event": "solver_failed", "error": order})
    return order


def test_a_process_that_works_for_a_request_logs_its_ids_in_the_same_form(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.Logger("root", logging.WARNING)
    root.addHandler(make_handler(JSON))
    monkeypatch.setattr(logging, "root", root)

    def work() -> str | None:
        begin_ids(request_id="r-3", round=7)
        return run_in_process(log_aloud, "a\nb", lambda: False, name="test")

    assert copy_context().run(work) == "a\nb"
    record = json.loads(capfd.readouterr().err)
    facts = {"event": "solver_failed", "error": "a\nb", "request_id": "r-3", "round": 7}
    assert facts.items() <= record.items()


def test_a_process_that_decides_a_round_has_the_ids_of_its_order() -> None:
    order = worker._RoundOrder(
        snapshot=None,  # type: ignore[arg-type] # nothing is decided
        options=None,  # type: ignore[arg-type]
        end_s=0.0,
        ids={"request_id": "r-4", "round": 8},
    )

    def answer() -> dict[str, Any]:
        with pytest.raises(AttributeError):
            worker._answer(order)
        return current_ids()

    assert copy_context().run(answer) == {"request_id": "r-4", "round": 8}
