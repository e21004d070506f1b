"""Calls and rounds over a real socket: their log records and errors have the same ids."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import grpc
import grpc.aio
import pytest

from tessera.db.engine import Database
from tessera.db.round_store import RoundStore
from tessera.db.store import PostgresStore
from tessera.formulation.errors import NotAllowed
from tessera.formulation.logs import JSON, begin_ids, current_ids, make_handler
from tessera.service import worker
from tessera.service.background import run_in_process
from tessera.service.loop import RoundLoop
from tessera.v1 import jobs_pb2, jobs_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.support.agents import until
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details
from tests.support.running_server import a_cluster, channel_to, settings

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
    database: Database, store: PostgresStore, logged: LogReader
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
    database: Database, store: PostgresStore, logged: LogReader
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
    database: Database, store: PostgresStore, logged: LogReader, monkeypatch: pytest.MonkeyPatch
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
    database: Database, store: PostgresStore, logged: LogReader, monkeypatch: pytest.MonkeyPatch
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
    database: Database, store: PostgresStore, logged: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store)

    def stumble(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("the implementation's own business")

    monkeypatch.setattr(PostgresStore, "get_job", stumble)
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
    database: Database, store: PostgresStore, logged: LogReader
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
