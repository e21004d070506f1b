"""The calls that ask what would happen: in the lane of trials, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import grpc.aio

from tessera.db.estimates.derived_estimates import list_models
from tessera.db.store.store import Store
from tessera.formulation.answer.hypotheses import Hypothesis
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.jobs import JobSpec
from tessera.service import fields
from tessera.service.server.convert import jobs as convert_jobs
from tessera.service.server.convert import names
from tessera.service.server.convert import what_if as convert
from tessera.service.server.convert.rounds import to_options
from tessera.service.server.convert.what_if import MAX_NODES
from tessera.service.server.estimates.stated_plans import read_job_plan
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.rpc.deadlines import CallDeadlines
from tessera.service.server.tasks.lanes import CALLER, Lane, LaneTurn
from tessera.service.server.what_if.asking import Lookahead, WhatIfAsker
from tessera.service.server.what_if.orders import HypothesisQuestion
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2 as pb
from tessera.v1 import what_if_pb2

MAX_CHANGES: Final = 1000
MAX_HORIZON_S: Final = 7 * 86_400.0
MAX_FUTURES: Final = 256
DEFAULT_FUTURES: Final = 32
MAX_JOBS: Final = 10_000
DEFAULT_JOBS: Final = 100


class WhatIfCalls:
    """The calls of WhatIf. ``wall_s`` returns seconds since 1970."""

    def __init__(
        self,
        store: Store,
        asker: WhatIfAsker,
        trials: Lane,
        deadlines: CallDeadlines,
        *,
        policies: StandingPolicies,
        new_id: Callable[[], str],
        wall_s: Callable[[], float],
    ) -> None:
        self._store, self._asker = store, asker
        self._trials, self._deadlines = trials, deadlines
        self._policies, self._new_id, self._wall_s = policies, new_id, wall_s

    async def ask(
        self, request: pb.WhatIfRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> what_if_pb2.WhatIfResponse:
        """Answer a question within the caller's deadline."""
        remaining_s, longest_s = self._deadlines.of(context)
        cluster = names.parse_cluster("parent", request.parent)
        max_jobs = fields.require_whole("max_jobs", request.max_jobs, 0, MAX_JOBS) or DEFAULT_JOBS
        ahead = _lookahead(request)

        def work(turn: LaneTurn) -> what_if_pb2.WhatIfResponse:
            standing = self._policies.of(cluster).options
            if not request.HasField("hypothesis"):
                raise InvalidInput("hypothesis", "is not set; say what would change")
            question, jobs = self._hypothesis(cluster, request.hypothesis, standing)
            answer = self._asker.ask(
                cluster,
                question,
                jobs,
                ahead,
                standing=standing,
                remaining_s=lambda: min(remaining_s(), longest_s(), turn.left_s()),
                cancelled=turn.is_over,
            )
            return convert.of_answer(cluster, answer, IDENTITY.get(), max_jobs)

        return await self._trials.run(CALLER.get(), f"what-if in {cluster}", work)

    def _hypothesis(
        self, cluster: str, message: pb.Hypothesis, standing: RoundOptions
    ) -> tuple[HypothesisQuestion, list[JobSpec]]:
        options = to_options("hypothesis.options", message.options, standing)
        if len(message.changes) > MAX_CHANGES:
            fields.require_batch_size("hypothesis.changes", len(message.changes), MAX_CHANGES)
        if not message.changes and options == standing:
            raise InvalidInput(
                "hypothesis", "changes nothing; add changes, or options of rounds that differ"
            )
        hypotheses, jobs = list[Hypothesis](), list[JobSpec]()
        places: dict[str, str] = {}
        for k, change in enumerate(message.changes):
            field = f"hypothesis.changes[{k}]"
            hypotheses += convert.to_hypotheses(field, cluster, change)
            if change.HasField("job_added"):
                spec = self._spec(f"{field}.job_added", cluster, change)
                if (first := places.setdefault(spec.name, field)) != field:
                    raise InvalidInput(
                        field, f"adds job {spec.name} as {first} does; give one another job_id"
                    )
                jobs.append(spec)
        added = sum(change.nodes_added.count for change in message.changes)
        fields.require_whole("hypothesis.changes: nodes_added.count in all", added, 0, MAX_NODES)
        question = HypothesisQuestion(
            hypotheses=tuple(hypotheses), options=options, added=tuple(j.name for j in jobs)
        )
        return question, jobs

    def _spec(self, field: str, cluster: str, change: what_if_pb2.HypotheticalChange) -> JobSpec:
        added = change.job_added
        if added.parent:
            names.require_parent(
                f"{field}.parent", names.parse_cluster(f"{field}.parent", added.parent), cluster
            )
        name = names.require_identifier(f"{field}.job_id", added.job_id or self._new_id())
        read_plan = partial(
            read_job_plan, models=cache(partial(self._store.read, list_models, cluster))
        )
        spec = convert_jobs.to_job_spec(f"{field}.job", cluster, name, added.job, read_plan)
        if spec.deadline_s <= self._wall_s():
            raise InvalidInput(f"{field}.job.deadline", "has passed; set a later one, or none")
        return spec


def _lookahead(request: pb.WhatIfRequest) -> Lookahead:
    horizon_s = fields.seconds_of_duration("horizon", request.horizon)
    fields.require_real("horizon", horizon_s, 0.0, MAX_HORIZON_S)
    futures = fields.require_whole("futures", request.futures, 0, MAX_FUTURES)
    return Lookahead(horizon_s=horizon_s, futures=futures or DEFAULT_FUTURES)
