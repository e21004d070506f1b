"""tessera.v1.Scheduler: deciding, committing, listing and replaying rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

from tessera.db.estimates.plans import read_plans
from tessera.db.rounds.rounds import list_rounds
from tessera.db.store.store import Store
from tessera.formulation.answer.codec import encode
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import DeadlineTooShort, RoundSuperseded
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import rounds as convert
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.rounds.verification import encode_document, verify_round
from tessera.service.server.rpc.deadlines import CallDeadlines
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.rpc.policies import PolicyCalls
from tessera.service.server.rpc.visibility import find_tenants, hide_in_round
from tessera.service.server.rpc.what_if import WhatIfCalls
from tessera.service.server.tasks.lanes import CALLER, Lane, LaneTurn, SizedCalls
from tessera.v1 import scheduler_pb2 as pb
from tessera.v1 import scheduler_pb2_grpc, what_if_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """The servicer of rounds: new ones from the loop, in lanes, and stored ones from the store.

    ``commits`` is the lane of rounds that are committed, ``trials`` that of dry runs and replays.
    ``deadlines`` limits the time of calls. The standing policy of ``policies`` fills in what the options
    of a call leave open. ``what_if`` answers questions about what would happen.
    """

    def __init__(
        self,
        store: Store,
        rounds: RoundLoop,
        *,
        calls: SizedCalls,
        commits: Lane,
        trials: Lane,
        deadlines: CallDeadlines,
        policies: StandingPolicies,
        what_if: WhatIfCalls,
    ) -> None:
        self._store, self._rounds = store, rounds
        self._calls, self._commits, self._trials = calls, commits, trials
        self._deadlines = deadlines
        self._policies, self._policy_calls = policies, PolicyCalls(store, policies)
        self._what_if = what_if

    async def Schedule(self, request: pb.ScheduleRequest, context: _Context) -> pb.Round:
        """Decide one round within the caller's deadline, and commit it."""
        remaining_s, longest_s = self._deadlines.of(context)
        cluster = names.parse_cluster("parent", request.parent)
        lane = self._trials if request.dry_run else self._commits

        def work(turn: LaneTurn) -> pb.Round:
            fair_s = _lesser(turn.left_s, longest_s)
            return self._schedule(request, remaining_s, turn.is_over, fair_s)

        return await lane.run(CALLER.get(), f"Schedule of {cluster}", work)

    async def GetRound(self, request: pb.GetRoundRequest, context: _Context) -> pb.Round:
        """Return a round."""
        if request.summary_only:
            return await self._calls.run(self._get_round, request)
        return await self._calls.run_heavy(self._get_round, request)

    async def ListRounds(
        self, request: pb.ListRoundsRequest, context: _Context
    ) -> pb.ListRoundsResponse:
        """Return a page of rounds, newest first, without decisions."""
        return await self._calls.run(self._list_rounds, request)

    async def ReplayRound(
        self, request: pb.ReplayRoundRequest, context: _Context
    ) -> pb.ReplayRoundResponse:
        """Solve a stored round again; commit nothing."""
        remaining_s, longest_s = self._deadlines.of(context)
        cluster, _ = names.parse_round("name", request.name)

        def work(turn: LaneTurn) -> pb.ReplayRoundResponse:
            fair_s = _lesser(turn.left_s, longest_s)
            return self._replay(request, remaining_s, turn.is_over, fair_s)

        return await self._trials.run(CALLER.get(), f"replay in {cluster}", work)

    async def VerifyRound(
        self, request: pb.VerifyRoundRequest, context: _Context
    ) -> pb.VerifyRoundResponse:
        """Check the certificates of a stored round."""
        cluster, _ = names.parse_round("name", request.name)

        def work(turn: LaneTurn) -> pb.VerifyRoundResponse:
            return self._verify(request, turn.is_over)

        return await self._trials.run(CALLER.get(), f"verification in {cluster}", work)

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: _Context) -> pb.StandingPolicy:
        """Add a version of the standing policy."""
        return await self._calls.run(self._policy_calls.set, request)

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: _Context) -> pb.StandingPolicy:
        """Return the standing policy, or an earlier version of it."""
        return await self._calls.run(self._policy_calls.get, request)

    async def ListPolicies(
        self, request: pb.ListPoliciesRequest, context: _Context
    ) -> pb.ListPoliciesResponse:
        """Return a page of the versions of the standing policy, newest first."""
        return await self._calls.run(self._policy_calls.list, request)

    async def WhatIf(
        self, request: pb.WhatIfRequest, context: _Context
    ) -> what_if_pb2.WhatIfResponse:
        """Say what a change would do that nobody has made; commit nothing."""
        return await self._what_if.ask(request, context)

    def _schedule(
        self,
        request: pb.ScheduleRequest,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
        fair_s: Callable[[], float],
    ) -> pb.Round:
        """Decide a round, and again on the new state if another one was committed meanwhile.

        The solver gets as long as the first attempt took, then half of that, and so on. So the
        call succeeds even if other rounds follow each other quickly. Raises RoundSuperseded if the
        deadline leaves no time.
        """
        clock, winner, limit_s = self._deadlines.clock, "", math.inf
        while True:
            begun_s = clock.monotonic_s()
            solver_s = _lesser(fair_s, partial(_left_s, clock, begun_s + limit_s))
            try:
                return self._decide(request, remaining_s, cancelled, solver_s)
            except RoundSuperseded as late:
                winner, limit_s = late.winner, min(limit_s / 2, clock.monotonic_s() - begun_s)
            except DeadlineTooShort as error:
                if not winner:
                    raise
                raise RoundSuperseded(winner, is_last=True) from error

    def _decide(
        self,
        request: pb.ScheduleRequest,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
        fair_s: Callable[[], float],
    ) -> pb.Round:
        """Decide a round and commit it, unless it is a dry run."""
        cluster = names.parse_cluster("parent", request.parent)
        standing = self._policies.of(cluster)
        options = convert.to_options("options", request.options, standing.options)
        key = fields.request_key(request, request.request_id)
        record = self._rounds.schedule(
            cluster,
            options,
            remaining_s=remaining_s,
            dry_run=request.dry_run,
            request=None if request.dry_run else key,
            cancelled=cancelled,
            fair_s=fair_s,
            policy_version=standing.version,
        )
        sees_tenant = IDENTITY.get().sees_tenant
        message = convert.of_round(record, sees_tenant, summary_only=request.summary_only)
        return self._with_plans(cluster, message)

    def _get_round(self, request: pb.GetRoundRequest) -> pb.Round:
        cluster, number = names.parse_round("name", request.name)
        record = self._store.get_round(cluster, number)
        identity = IDENTITY.get()
        message = convert.of_round(record, identity.sees_tenant, summary_only=request.summary_only)
        hide_in_round(identity, cluster, message, find_tenants(self._store))
        return self._with_plans(cluster, message)

    def _with_plans(self, cluster: str, message: pb.Round) -> pb.Round:
        """Return a round with the execution plans that its decisions name."""
        digests = {decision.allocation.cell.plan for decision in message.decisions} - {""}
        if digests:
            message.execution_plans.update(self._store.read(read_plans, cluster, digests))
        return message

    def _list_rounds(self, request: pb.ListRoundsRequest) -> pb.ListRoundsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=1000, counts=True)
        found = self._store.read(list_rounds, cluster, page.number, page.size + 1)
        last = found[page.size - 1].number if len(found) > page.size else 0
        rounds = [convert.of_summary(summary) for summary in found[: page.size]]
        for message in rounds:
            hide_in_round(IDENTITY.get(), cluster, message, find_tenants(self._store))
        return pb.ListRoundsResponse(rounds=rounds, next_page_token=page.token(last))

    def _replay(
        self,
        request: pb.ReplayRoundRequest,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
        fair_s: Callable[[], float],
    ) -> pb.ReplayRoundResponse:
        cluster, number = names.parse_round("name", request.name)
        options = None
        if request.HasField("options"):
            options = convert.to_options("options", request.options)
        record, same = self._rounds.replay(
            cluster,
            number,
            options,
            remaining_s=remaining_s,
            cancelled=cancelled,
            fair_s=fair_s,
        )
        sees_tenant = IDENTITY.get().sees_tenant
        message = convert.of_round(record, sees_tenant, summary_only=request.summary_only)
        snapshot = b""
        if request.with_snapshot:
            snapshot = encode(self._store.round_snapshot(cluster, number))
        return pb.ReplayRoundResponse(
            round=self._with_plans(cluster, message), same_decisions=same, snapshot=snapshot
        )

    def _verify(
        self, request: pb.VerifyRoundRequest, cancelled: Callable[[], bool]
    ) -> pb.VerifyRoundResponse:
        cluster, number = names.parse_round("name", request.name)
        record, checks = verify_round(self._store, cluster, number, cancelled)
        document = encode_document(request.name, record, checks) if request.with_document else b""
        return pb.VerifyRoundResponse(
            round=convert.of_summary(record.summary),
            goals=map(convert.of_check, checks),
            document=document,
        )


def _lesser(one: Callable[[], float], other: Callable[[], float]) -> Callable[[], float]:
    return lambda: min(one(), other())


def _left_s(clock: Clock, end_s: float) -> float:
    return end_s - clock.monotonic_s()
