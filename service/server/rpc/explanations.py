"""The calls that explain jobs: in the lane of trials if they decide rounds, else short ones."""

from __future__ import annotations

from typing import Any

import grpc.aio

from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.convert import names
from tessera.service.server.convert.explanations import of_explanation
from tessera.service.server.rounds.explaining import CallTime, JobExplainer
from tessera.service.server.rpc.deadlines import CallDeadlines
from tessera.service.server.tasks.lanes import CALLER, Lane, LaneTurn, SizedCalls
from tessera.v1 import jobs_pb2 as pb


class ExplanationCalls:
    """The calls of ExplainJob. While others wait for a thread, a call tries no further steps."""

    def __init__(
        self,
        explainer: JobExplainer,
        calls: SizedCalls,
        trials: Lane,
        deadlines: CallDeadlines,
    ) -> None:
        self._explainer, self._calls = explainer, calls
        self._trials, self._deadlines = trials, deadlines

    async def explain(
        self, request: pb.ExplainJobRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExplainJobResponse:
        """Explain a job within the caller's deadline."""
        remaining_s, longest_s = self._deadlines.of(context)
        cluster, job = names.parse_job("name", request.name)
        if request.round < 0:
            raise InvalidInput("round", "must be the number of a round, or 0 for the last one")
        if request.recorded_only:
            return await self._calls.run(self._read_recorded, cluster, job, request.round)

        def work(turn: LaneTurn) -> pb.ExplainJobResponse:
            time = CallTime(
                remaining_s=remaining_s,
                trying_s=lambda: min(turn.left_s(), longest_s()),
                cancelled=turn.is_over,
            )
            explained = self._explainer.explain(
                cluster, job, request.round, time, with_steps=not request.without_steps
            )
            return of_explanation(cluster, job, explained, IDENTITY.get().sees_tenant)

        return await self._trials.run(CALLER.get(), f"explanation of {job} in {cluster}", work)

    def _read_recorded(self, cluster: str, job: str, number: int) -> pb.ExplainJobResponse:
        recorded = self._explainer.read_recorded(cluster, job, number)
        return of_explanation(cluster, job, recorded, IDENTITY.get().sees_tenant)
