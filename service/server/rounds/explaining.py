"""The explanation of a job: of the last round that decided on it, of an earlier one, or as of now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.db.rounds.job_rounds import rounds_of_job
from tessera.db.store.reads import get_job, list_nodes
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.explanations.records import Explanation
from tessera.formulation.base.errors import DeadlineTooShort, InvalidInput, NotAllowed
from tessera.formulation.job.lifecycle import ACTIVE, TERMINAL, JobState
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.records.explanations import JobExplanation
from tessera.formulation.records.jobs import JobRecord
from tessera.formulation.records.rounds import JobRound, RoundRecord, decision_record
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.solvers.rounds.explaining.explain import explain_job
from tessera.solvers.rounds.options import RoundOptions, recorded_options
from tessera.solvers.rounds.plan import RoundOutcome

MAX_HISTORY_ROUNDS: Final = 500
"""The largest number of rounds in a job's history."""

RECORDED_ROUNDS: Final = 5
"""The number of last rounds in an answer from records alone. Each takes a millisecond to read."""

MAX_DRAINS, MAX_DRAIN_NODES = 3, 1000
"""The largest numbers of drains in the evidence of a reason, and of nodes that are read for them."""

ANSWER_S: Final = 1.0
"""Seconds that are kept for the answer: no round is tried in them."""

_NOT_REPEATED: Final = (
    "no step was tried, because this release decides the round otherwise than it was decided"
)
_OUT_OF_TIME: Final = (
    "not every step was tried, because the call's time ended; call again with a longer deadline"
)
_ENDED: Final = "the job has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """The time of a call: what is left of it, and whether its caller has left."""

    remaining_s: Callable[[], float]
    trying_s: Callable[[], float]  # for steps; at most the former
    cancelled: Callable[[], bool]


class JobExplainer:
    """The explainer of jobs, from stored rounds. ``policies`` are those of periodic rounds."""

    def __init__(self, store: Store, rounds: RoundLoop, policies: StandingPolicies) -> None:
        self._store, self._rounds, self._policies = store, rounds, policies

    def explain(
        self, cluster: str, name: str, number: int, time: CallTime, *, with_steps: bool
    ) -> JobExplanation:
        """Return the explanation of a job in round ``number``, or as of now if it is 0. Blocks.

        Raises:
            NotFound: the job or the round. InvalidInput: the round did not decide on the job.
            DeadlineTooShort: the call was cancelled, or too short for the round itself.
        """
        record = self._store.read(get_job, cluster, name)
        if number:
            self._store.get_round(cluster, number)  # it exists, and is still kept
        history = self._store.read(rounds_of_job, cluster, name, number, MAX_HISTORY_ROUNDS)
        if number:
            _require_decided(number, name, history)
            return self._of_round(cluster, name, number, history, time, with_steps=with_steps)
        if last := _deciding_round(record, history):
            return self._of_round(cluster, name, last, history, time, with_steps=with_steps)
        if record.state in TERMINAL:
            return _ended(history)
        explanation = self._as_of_now(record, history, time, with_steps=with_steps)
        return explanation.with_starts_of(record)

    def read_recorded(self, cluster: str, name: str, number: int) -> JobExplanation:
        """Return what is recorded on a job in round ``number``, or at present if it is 0.

        No round is decided. The explanation has a reason, and nothing that must be computed.

        Raises:
            NotFound: the job or the round. InvalidInput: the round did not decide on the job.
        """
        record = self._store.read(get_job, cluster, name)
        history = self._store.read(rounds_of_job, cluster, name, number, RECORDED_ROUNDS)
        if number:
            if not history or history[0].number != number:
                self._store.get_round(cluster, number)  # it exists, and is still kept
            _require_decided(number, name, history)
        if number or record.reason is None:
            decides = bool(number) or record.state in ACTIVE
            shown = history[0] if history and decides else None
            reason = None if shown is None else shown.reason
        else:
            shown = next((r for r in history if r.number == record.reason_round), None)
            reason = record.reason
        kind = shown.kind if shown is not None else DecisionKind.WAIT if reason else ""
        explanation = JobExplanation(
            number=0 if shown is None else shown.number,
            created_s=0.0 if shown is None else shown.created_s,
            kind=kind,
            explanation=None
            if reason is None
            else Explanation(kind=DecisionKind(kind), reason=reason),
            history=history,
            note=_ENDED if record.state in TERMINAL and not number else "",
        )
        return explanation if number else explanation.with_starts_of(record)

    def _of_round(
        self,
        cluster: str,
        name: str,
        number: int,
        history: Sequence[JobRound],
        time: CallTime,
        *,
        with_steps: bool,
    ) -> JobExplanation:
        """Explain the decision of a stored round. Its reason stays as it was given."""
        record = self._store.get_round(cluster, number)
        stored = next(d for d in record.decisions if d.job == name)
        kept = JobExplanation(
            number=number,
            created_s=record.summary.created_s,
            kind=stored.kind,
            history=history,
            explanation=None
            if stored.reason is None
            else Explanation(kind=DecisionKind(stored.kind), reason=stored.reason),
        )
        try:
            snapshot = self._store.round_snapshot(cluster, number)
        except NotAllowed as gone:
            return replace(kept, note=f"no step was tried: {gone}")
        options, outcome = self._repeat(record, snapshot, time)
        job = snapshot.jobs.name.index(name)
        again = decision_record(snapshot, outcome.decisions[job]) if outcome.decisions else None
        if again is None or (again.kind, again.allocation) != (stored.kind, stored.allocation):
            return replace(kept, note=_NOT_REPEATED)
        explanation = self._try_steps(snapshot, options, job, outcome, time, with_steps=with_steps)
        return replace(
            kept,
            explanation=_worded(explanation, stored.reason),
            note="" if explanation.is_complete else _OUT_OF_TIME,
        )

    def _repeat(
        self, record: RoundRecord, snapshot: Snapshot, time: CallTime
    ) -> tuple[RoundOptions, RoundOutcome]:
        """Decide a stored round as recorded. The options are those without the recorded work."""
        summary = record.summary
        options = recorded_options(record.summary.options)
        recorded = self._store.round_proof(summary.cluster, summary.number).recorded
        outcome = self._rounds.decide(
            snapshot,
            replace(options, work=summary.work, recorded=recorded),
            remaining_s=time.remaining_s,
            cancelled=time.cancelled,
        )
        return options, outcome

    def _as_of_now(
        self, record: JobRecord, history: Sequence[JobRound], time: CallTime, *, with_steps: bool
    ) -> JobExplanation:
        """Explain what a round would decide now, so that a step that helps does so in the next round.

        The options are those of the job's last round, unless the policy has changed since. Nothing
        is committed.
        """
        name = record.spec.name
        standing = self._policies.of(record.cluster)
        options = standing.options
        if history:
            last = self._store.get_round(record.cluster, history[0].number).summary
            if last.policy_version == standing.version:
                options = recorded_options(last.options)
        snapshot = self._rounds.load(record.cluster, options)
        outcome = self._rounds.decide(
            snapshot, options, remaining_s=time.remaining_s, cancelled=time.cancelled
        )
        if name not in snapshot.jobs.name or outcome.violations:  # it has ended meanwhile
            return _ended(history)
        explanation = self._try_steps(
            snapshot,
            options,
            snapshot.jobs.name.index(name),
            outcome,
            time,
            with_steps=with_steps,
        )
        explanation = _worded(explanation, None if record.reason_round else record.reason)
        return JobExplanation(
            number=0,
            created_s=snapshot.now_s,
            kind=explanation.kind,
            explanation=self._with_drains(record.cluster, explanation),
            history=history,
            note="" if explanation.is_complete else _OUT_OF_TIME,
        )

    def _with_drains(self, cluster: str, explanation: Explanation) -> Explanation:
        """Return the explanation of a job whose nodes are away, with why nodes were drained."""
        reason = explanation.reason
        if reason.code is not ReasonCode.NODES_AWAY:
            return explanation
        drains = [
            f"{node.spec.name} by {node.drained_by or 'an operator'}: {node.drain_reason}"
            for node in self._store.read(list_nodes, cluster, "", MAX_DRAIN_NODES)
            if node.drain_reason
        ]
        if not drains:
            return explanation
        evidence = (*reason.evidence, ("drains", "; ".join(drains[:MAX_DRAINS])))
        return replace(explanation, reason=replace(reason, evidence=evidence))

    def _try_steps(
        self,
        snapshot: Snapshot,
        options: RoundOptions,
        job: int,
        outcome: RoundOutcome,
        time: CallTime,
        *,
        with_steps: bool,
    ) -> Explanation:
        """Explain the job. A round that is not decided in time counts for nothing."""

        def left_s() -> float:
            return min(time.trying_s(), time.remaining_s() - ANSWER_S) if with_steps else 0.0

        def plan(changed: Snapshot, changed_options: RoundOptions) -> RoundOutcome:
            if left_s() > 0:
                decided = self._rounds.decide(
                    changed, changed_options, remaining_s=left_s, cancelled=time.cancelled
                )
                if left_s() > 0:
                    return decided
            raise DeadlineTooShort("no time is left to try a step")

        explanation = explain_job(snapshot, options, job, outcome, plan)
        return explanation if with_steps else replace(explanation, is_complete=True)


def _ended(history: Sequence[JobRound]) -> JobExplanation:
    return JobExplanation(
        number=0, created_s=0.0, kind="", explanation=None, history=history, note=_ENDED
    )


def _worded(explanation: Explanation, given: Reason | None) -> Explanation:
    """Return the explanation in the words of the reason that was ``given``, if the code is the same.

    The given reason may know more: since when the job is held, or its last error.
    """
    if given is None or given.code is not explanation.reason.code:
        return explanation
    return replace(explanation, reason=replace(given, next_step=explanation.reason.next_step))


def _deciding_round(record: JobRecord, history: Sequence[JobRound]) -> int:
    """Return the round that rejected the job, or the last one if the job runs; else 0."""
    if record.state is JobState.REJECTED:
        return record.reason_round
    return history[0].number if record.state in ACTIVE and history else 0


def _require_decided(number: int, name: str, history: Sequence[JobRound]) -> None:
    if history and history[0].number == number:
        return
    known = f"; rounds {history[-1].number} to {history[0].number} did" if history else ""
    raise InvalidInput("round", f"round {number} did not decide on {name}{known}")
