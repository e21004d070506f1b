"""tessera.v1.Scheduler: decide, commit, look back, repeat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc.aio

from formulation.codec import encode
from service.loop import RoundLoop
from service.ports import Clock, Store
from service.roundoptions import RoundOptions
from service.rpc import fields, names
from service.rpc.calls import Calls
from service.rpc.convert import rounds as convert
from service.rpc.paging import page_of
from tessera.v1 import scheduler_pb2 as pb
from tessera.v1 import scheduler_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves rounds: new ones from the loop, in a pool of their own, and stored ones from the store.

    ``default_deadline_s`` is what a call gets that brings no deadline, ``standing`` what holds where its
    options say nothing.
    """

    def __init__(
        self, store: Store, rounds: RoundLoop, clock: Clock, *,
        calls: Calls, round_calls: Calls, default_deadline_s: float, standing: RoundOptions,
    ) -> None:  # fmt: skip
        self._store, self._rounds, self._clock = store, rounds, clock
        self._calls, self._round_calls = calls, round_calls
        self._default_deadline_s, self._standing = default_deadline_s, standing

    async def Schedule(self, request: pb.ScheduleRequest, context: _Context) -> pb.Round:
        """Decide one round inside the caller's deadline, and commit it."""
        remaining_s, over = self._remaining_s(context), threading.Event()
        try:
            return await self._round_calls.run(self._schedule, request, remaining_s, over.is_set)
        finally:
            over.set()

    async def GetRound(self, request: pb.GetRoundRequest, context: _Context) -> pb.Round:
        """Return a round."""
        return await self._calls.run(self._get_round, request)

    async def ListRounds(
        self, request: pb.ListRoundsRequest, context: _Context
    ) -> pb.ListRoundsResponse:
        """Return a page of rounds, newest first, without decisions."""
        return await self._calls.run(self._list_rounds, request)

    async def ReplayRound(
        self, request: pb.ReplayRoundRequest, context: _Context
    ) -> pb.ReplayRoundResponse:
        """Solve a stored round again; commit nothing."""
        remaining_s, over = self._remaining_s(context), threading.Event()
        try:
            return await self._round_calls.run(self._replay, request, remaining_s, over.is_set)
        finally:
            over.set()

    def _remaining_s(self, context: _Context) -> Callable[[], float]:
        """Return what tells, from any thread, how much of the call's deadline is left."""
        left_s: float | None = context.time_remaining()
        end_s = self._clock.monotonic_s()
        end_s += self._default_deadline_s if left_s is None else left_s
        return lambda: end_s - self._clock.monotonic_s()

    def _schedule(
        self,
        request: pb.ScheduleRequest,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> pb.Round:
        cluster = names.parse_cluster("parent", request.parent)
        options = convert.to_options("options", request.options, self._standing)
        key = fields.request_key(request, request.request_id)
        record = self._rounds.schedule(
            cluster, options, remaining_s=remaining_s, dry_run=request.dry_run,
            request=None if request.dry_run else key, cancelled=cancelled,
        )  # fmt: skip
        return convert.of_round(record, summary_only=request.summary_only)

    def _get_round(self, request: pb.GetRoundRequest) -> pb.Round:
        cluster, number = names.parse_round("name", request.name)
        record = self._store.get_round(cluster, number)
        return convert.of_round(record, summary_only=request.summary_only)

    def _list_rounds(self, request: pb.ListRoundsRequest) -> pb.ListRoundsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=1000, counts=True)
        found = self._store.list_rounds(cluster, page.number, page.size + 1)
        last = found[page.size - 1].number if len(found) > page.size else 0
        return pb.ListRoundsResponse(
            rounds=map(convert.of_summary, found[: page.size]), next_page_token=page.token(last)
        )

    def _replay(
        self,
        request: pb.ReplayRoundRequest,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> pb.ReplayRoundResponse:
        cluster, number = names.parse_round("name", request.name)
        options = None
        if request.HasField("options"):
            options = convert.to_options("options", request.options)
        record, same = self._rounds.replay(
            cluster, number, options, remaining_s=remaining_s, cancelled=cancelled
        )
        answer = convert.of_round(record, summary_only=request.summary_only)
        snapshot = b""
        if request.with_snapshot:
            snapshot = encode(self._store.round_snapshot(cluster, number))
        return pb.ReplayRoundResponse(round=answer, same_decisions=same, snapshot=snapshot)
