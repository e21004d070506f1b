"""The round loop, the only place where a round has effects.

It loads a snapshot, plans and commits. It holds no lock or transaction in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from tessera.formulation.answer.codec import digest_of, encode
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import DeadlineTooShort, RoundSuperseded, TooBusy
from tessera.formulation.base.logs import add_ids
from tessera.formulation.records.rounds import RoundCommit, RoundRecord, RoundSummary
from tessera.formulation.records.store import Request
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.ports.rounds import Rounds
from tessera.service.server.rounds.deciding import (
    decide_again,
    is_over,
    limit_solver,
    plan_here,
    require_known_options,
)
from tessera.service.server.rounds.phase_times import NOT_SOLVING, PhaseHistory, Phases, PhaseTimes
from tessera.service.server.rounds.round_summary import make_uncommitted_record, summarise_round
from tessera.service.server.rounds.worker import SolveProcesses
from tessera.solvers import registry as solvers
from tessera.solvers.base import Budget, require_wanted, unlimited_time
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions, make_budget, recorded_options
from tessera.solvers.rounds.plan import RoundOutcome
from tessera.solvers.schedulers import registry as policies
from tessera.solvers.warm import run_every_loop

log = logging.getLogger(__name__)

RESERVED: Final = 0.1
"""Share of its time that a replay keeps for the steps after the solver if none was measured yet."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """A round that is being decided on a state.

    ``winner`` is the round that this process has committed on that state meanwhile, or "".
    """

    cluster: str
    epoch: int
    winner: str = ""


class RoundLoop:
    """A loop that decides and commits rounds.

    Any number may run at the same time, in any number of replicas.
    """

    def __init__(
        self,
        store: Rounds,
        clock: Clock,
        workers: SolveProcesses | None = None,
        from_jobs: int = 0,
        clock_factor: float = 1.0,
    ) -> None:
        """Prepare the solvers and remember the settings.

        Rounds of at least ``from_jobs`` jobs are decided by ``workers``. If it is None, this
        process decides them. Agents replay ``clock_factor`` seconds of training in one second.
        """
        self._clock_factor = clock_factor
        self._store, self._clock = store, clock
        self._workers, self._from_jobs = workers, from_jobs
        make_solver()  # load the solver libraries now, not within the first call's deadline,
        run_every_loop()  # and compile the kernels
        self._isolated = SolveProcesses(on_demand=True)
        self._history = PhaseHistory()
        self._attempts: set[_Attempt] = set()
        self._lock = threading.Lock()  # of the attempts

    def close(self) -> None:
        """End the processes that decide rounds for this loop only."""
        self._isolated.close()

    def schedule(
        self,
        cluster: str,
        options: RoundOptions,
        *,
        remaining_s: Callable[[], float],
        dry_run: bool,
        request: Request | None,
        cancelled: Callable[[], bool],
        fair_s: Callable[[], float] = unlimited_time,
        policy_version: int = 0,
    ) -> RoundRecord:
        """Decide a round and, unless ``dry_run``, commit it. Blocks.

        ``policy_version`` is that of the standing policy, which the round records.
        ``remaining_s`` returns what is left of the caller's deadline (inf if it has no deadline).
        ``fair_s`` returns the time that waiting calls leave to the solver. After it the solver ends
        with its best answer.

        Raises:
            NotFound: the cluster. InvalidInput: the options.
            DeadlineTooShort: too little time for loading, greedy, checking and committing; no round
                was written.
            RoundSuperseded: another round was committed first; no round was written.
        """
        require_known_options(options, commits=not dry_run)
        times = self._history.of(cluster)
        times.require(remaining_s(), *NOT_SOLVING)
        phases = Phases(self._clock)
        begun = (
            self._store.snapshot(cluster, options.use_half_life_s)
            if dry_run
            else self._store.begin_round(cluster, request, options.use_half_life_s)
        )
        if isinstance(begun, RoundRecord):
            return begun
        snapshot = replace(begun, clock_factor=self._clock_factor)
        add_ids(cluster=cluster, round=snapshot.round_number)
        phases.mark("load")
        with self._attempt(snapshot, counts=not dry_run) as attempt:
            over = is_over(remaining_s, lambda: bool(attempt.winner) or cancelled())
            outcome = self._plan_in_time(
                cluster,
                snapshot,
                options,
                times,
                phases,
                remaining_s=remaining_s,
                fair_s=fair_s,
                over=over,
            )
            # From here on nothing is done for a caller that has left.
            require_wanted(over)
        encoded = encode(snapshot)
        summary = replace(
            summarise_round(snapshot, outcome, options, phases.seconds, digest_of(encoded)),
            policy_version=policy_version,
        )
        if dry_run:
            return make_uncommitted_record(snapshot, outcome, replace(summary, outcome="dry_run"))
        times.require(remaining_s(), "commit")
        record = self._store.commit(
            RoundCommit(
                snapshot=snapshot,
                encoded=encoded,
                decisions=outcome.decisions,
                summary=summary,
                request=request,
                schedule_segments=outcome.segments_after(snapshot),
                plan=outcome.plan,
                network=outcome.network,
                proof=outcome.proof,
            ),
            in_time=lambda: remaining_s() > 0 and not cancelled(),
        )
        phases.mark("commit")
        self._overtake(snapshot, record)
        seconds = record.summary.seconds | {"commit": phases.seconds["commit"]}
        record = replace(record, summary=replace(record.summary, seconds=seconds))
        _report(record)
        return record

    def replay(
        self,
        cluster: str,
        number: int,
        options: RoundOptions | None,
        *,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
        fair_s: Callable[[], float] = unlimited_time,
    ) -> tuple[RoundRecord, bool]:
        """Solve the snapshot of a stored round again.

        Return the round, and whether its decisions are the same. If ``options`` is None, the round
        is decided as recorded: each solver stops at the recorded deterministic work instead of a
        time, so that the decisions are the same. Such a replay cannot end early with another
        answer. It is refused if others wait and ``fair_s`` is over.

        Raises:
            NotFound: the cluster or the round. InvalidInput: the options.
            DeadlineTooShort: the deadline ended, or the call was cancelled.
            TooBusy: others wait for the thread.
        """
        if options is not None:
            require_known_options(options, commits=False)
        add_ids(cluster=cluster, round=number)
        record = self._store.get_round(cluster, number)
        snapshot = self._store.round_snapshot(cluster, number)
        options = options or self._repetition(cluster, record.summary)
        gave_way, by_work = threading.Event(), bool(options.work)
        over = is_over(remaining_s, cancelled)
        after_s = self._history.of(cluster).reserve_s() or RESERVED * remaining_s()

        def gives_way() -> bool:
            if by_work and fair_s() <= 0:
                gave_way.set()
            return gave_way.is_set() or over()

        try:
            again = decide_again(
                snapshot,
                options,
                self._clock,
                remaining_s=remaining_s,
                cancelled=gives_way,
                plan=self._plan,
                solve_s=lambda: min(remaining_s() - after_s, fair_s()),
                left_s=remaining_s,
            )
        except DeadlineTooShort:
            if not gave_way.is_set():
                raise
            raise TooBusy(
                "this replay repeats recorded work and cannot end early, but other calls wait for its thread"
                " or its time is over; repeat it when the server is less busy"
            ) from None
        same = [(d.job, d.kind, d.allocation) for d in again.decisions] == [
            (d.job, d.kind, d.allocation) for d in record.decisions
        ]
        return again, same

    def _repetition(self, cluster: str, summary: RoundSummary) -> RoundOptions:
        """Return the options that decide a stored round as it was decided."""
        return replace(
            recorded_options(summary.options),
            work=summary.work,
            recorded=self._store.round_proof(cluster, summary.number).recorded,
            solve_limit_s=float("inf"),
        )

    def load(self, cluster: str, options: RoundOptions) -> Snapshot:
        """Return the state of a cluster as a round with ``options`` would see it. Raises NotFound."""
        snapshot = self._store.snapshot(cluster, options.use_half_life_s)
        return replace(snapshot, clock_factor=self._clock_factor)

    def decide(
        self,
        snapshot: Snapshot,
        options: RoundOptions,
        *,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> RoundOutcome:
        """Return the outcome of a round on ``snapshot``, of which nothing is stored.

        With recorded work in ``options``, the round is decided as recorded.

        Raises:
            DeadlineTooShort: the call was cancelled, or no time is left.
        """
        budget = make_budget(
            options,
            limit_solver(options, self._clock),
            cancelled=is_over(remaining_s, cancelled),
            left_s=remaining_s,
        )
        return self._plan(snapshot, options, budget, Phases(self._clock), remaining_s)

    @contextmanager
    def _attempt(self, snapshot: Snapshot, *, counts: bool) -> Iterator[_Attempt]:
        """Yield an attempt at a round, which ends early once it cannot be committed any more.

        Only one that ``counts`` will be committed. Raises RoundSuperseded.
        """
        attempt = _Attempt(snapshot.cluster, snapshot.epoch)
        if counts:
            with self._lock:
                self._attempts.add(attempt)
        try:
            yield attempt
        except DeadlineTooShort as error:
            if attempt.winner:
                raise RoundSuperseded(attempt.winner) from error
            raise
        finally:
            with self._lock:
                self._attempts.discard(attempt)

    def _overtake(self, snapshot: Snapshot, record: RoundRecord) -> None:
        """End the attempts at rounds on the state for which ``record`` was committed."""
        with self._lock:
            for attempt in self._attempts:
                if (attempt.cluster, attempt.epoch) == (snapshot.cluster, snapshot.epoch):
                    attempt.winner = f"clusters/{snapshot.cluster}/rounds/{record.summary.number}"

    def _plan_in_time(
        self,
        cluster: str,
        snapshot: Snapshot,
        options: RoundOptions,
        times: PhaseTimes,
        phases: Phases,
        *,
        remaining_s: Callable[[], float],
        fair_s: Callable[[], float],
        over: Callable[[], bool],
    ) -> RoundOutcome:
        """Decide a round so that time is left for the steps after its solution.

        What it took is what the cluster's next round is expected to take.
        """
        after_s = times.reserve_s()
        budget = make_budget(
            options,
            limit_solver(options, self._clock, lambda: min(remaining_s() - after_s, fair_s())),
            cancelled=over,
            left_s=remaining_s,
        )
        try:
            outcome = self._plan(snapshot, options, budget, phases, remaining_s)
        except DeadlineTooShort:
            if "solve" in phases.seconds:  # the next step takes at least this long
                phases.mark("place")
                self._remember(cluster, times, phases)
            raise
        self._remember(cluster, times, phases)
        return outcome

    def _plan(
        self,
        snapshot: Snapshot,
        options: RoundOptions,
        budget: Budget,
        phases: Phases,
        remaining_s: Callable[[], float],
    ) -> RoundOutcome:
        """Decide the round here, or in another process if it is large or uninterruptible."""
        workers = self._workers if len(snapshot.jobs) >= self._from_jobs else None
        if not (
            solvers.is_interruptible(options.solver)
            and policies.is_interruptible(options.scheduler)
        ):
            workers = self._workers or self._isolated
        if workers is None:
            return plan_here(snapshot, options, budget, phases, remaining_s)
        outcome = workers.plan(snapshot, options, budget, phases.book, remaining_s)
        phases.mark("transfer")
        return outcome

    def _remember(self, cluster: str, times: PhaseTimes, phases: Phases) -> None:
        """Expect that the next round of the cluster takes as long as this one."""
        times.remember(phases.seconds)
        self._history.keep(cluster, times)


def _report(record: RoundRecord) -> None:
    s = record.summary
    facts = {
        "cluster": s.cluster,
        "round": s.number,
        "epoch": s.epoch,
        "solver": s.solver,
        "gap": None if s.bound_is_trivial else s.gap,
        "running": s.running,
        "waiting": s.waiting,
        "started": s.started,
        "suspended": s.suspended,
        "changed": s.changed,
        **{f"{phase}_s": seconds for phase, seconds in s.seconds.items()},
    }
    if s.outcome == "refused":
        log.error(
            "the checker refused the round; the previous decisions stay",
            extra={"event": "round_refused", **facts, "violations": s.violations},
        )
    else:
        log.info("committed a round", extra={"event": "round_committed", **facts})
