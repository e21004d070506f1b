"""One round as a pure function: from a snapshot to decisions, with no database, network or clock.

The service, what-if calls, the simulator, benchmarks and ``tessera replay`` all call
``plan_round``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.answer.check import (
    Violation,
    find_doubly_held,
    find_placement_violations,
    find_violations,
    score_solution,
)
from tessera.formulation.answer.decisions import Decision, DecisionKind, make_decisions
from tessera.formulation.answer.explain import explain_waiting_jobs, state_fair_shares
from tessera.formulation.answer.explanations.starts import tell_starts
from tessera.formulation.answer.law_check import find_law_violations
from tessera.formulation.answer.lookahead_check import find_schedule_violations
from tessera.formulation.answer.network.outcome import NetworkOutcome
from tessera.formulation.answer.network.running import running_after
from tessera.formulation.answer.packing_check import find_false_rows
from tessera.formulation.answer.proofs import NO_PROOF, RoundProof
from tessera.formulation.answer.reservation_check import find_reservation_violations
from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.round.policy import KEEP_MODE, LOOK_AHEAD_MODES, Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.starts.planner import with_plan
from tessera.formulation.round.statement import Statement, draft_columns, state_draft, state_round
from tessera.formulation.state.last_round import ScheduleSegments, StartPlan
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import objective_of
from tessera.solvers.exact.prices import known_prices
from tessera.solvers.goals import solve_goals
from tessera.solvers.lookahead import ADMISSION, admit
from tessera.solvers.placement import PlacementResult, place, seat_leftover
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.packing import place_so_that_counts_fit
from tessera.solvers.rounds.placement import (
    defragment_placement,
    next_defragmentation,
)
from tessera.solvers.rounds.prepared import prepare_snapshot
from tessera.solvers.rounds.promises import had_promise, keep_promises, release_lost_promises
from tessera.solvers.rounds.widened import with_packing
from tessera.solvers.rounds.work import RoundWork
from tessera.solvers.schedulers.base import FixedSolver, Scheduler, explain_not_chosen

__all__ = ["RoundOptions", "RoundOutcome", "plan_round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """The outcome of a round; if it has ``violations``, it must not be committed."""

    problem: Problem
    solution: Solution
    goals: tuple[GoalResult, ...]
    placed: PlacementResult
    decisions: tuple[Decision, ...]
    violations: tuple[Violation, ...]
    greedy_objective: int  # 0 if a published scheduler decided
    given_up: frozenset[int]  # jobs whose promise could not be kept
    admission: Admission | None
    proof: RoundProof = NO_PROOF
    plan: StartPlan | None = None
    """The planned and promised starts of waiting jobs. It is None if nothing is promised."""
    network: NetworkOutcome | None = None
    """It is None if the network is not described, or if the round is refused."""
    stands_until: int = 0
    """Number of the next round that must be decided if nothing happens except training.

    The rounds before it would change nothing, like this one. If it is 0, it is the very next round.
    """

    @property
    def placed_score(self) -> float:
        """Return the value of the round as it was placed, in units of the last goal."""
        return score_solution(self.problem, self.solution, self.placed.placement)

    @property
    def bound_is_trivial(self) -> bool:
        """Return whether nothing was proven of the last goal, so that the gap has no meaning."""
        return self.goals[-1].bound_is_trivial

    @property
    def prices(self) -> dict[str, float]:
        """Return the shadow price of each row, in units of the last goal.

        It is empty if no prices are known.
        """
        prices, rows = self.solution.prices, self.problem.rows
        return {
            row.name: float(price) / self.problem.scale
            for row, price in zip(rows, prices, strict=bool(len(prices)))
        }

    def segments_after(self, snapshot: Snapshot) -> ScheduleSegments:
        """Return the schedules of admitted jobs once the round on ``snapshot`` is carried out."""
        return (
            snapshot.schedule_segments
            if self.admission is None
            else self.admission.schedule_segments
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedRound:
    """A round's solution, placed but not checked.

    ``broken`` has violations from before placement.
    """

    work: RoundWork
    statement: Statement  # with the changes that follow from the solution itself
    solution: Solution
    goals: tuple[GoalResult, ...]
    placed: PlacementResult
    given_up: frozenset[int] = frozenset()
    greedy_objective: int = 0
    admission: Admission | None = None
    proof: RoundProof = NO_PROOF
    plan: StartPlan | None = None
    is_published: bool = False
    broken: tuple[Violation, ...] = ()


def _no_mark(_phase: str) -> None:
    return None


def plan_round(
    snapshot: Snapshot,
    policy: Policy,
    solver: Solver,
    budget: Budget,
    book: Callable[[str], None] = _no_mark,
    scheduler: Scheduler | None = None,
) -> RoundOutcome:
    """Decide a round: state it, solve it, place it, check it, explain it.

    These are steps 3 to 7 of a round; the service loads before them and commits after them. If a
    ``scheduler`` is given, it decides, and ``solver`` is not called; the objective measures its
    choice. ``book`` is called with the name of each phase as it ends (build, greedy, solve, place,
    check).

    Only the solver is limited by the budget's time. Placement limits its own effort, so that a
    round that is decided again with the recorded work is placed as before. Once the budget is
    cancelled, every phase ends, since nobody wants the answer any more.

    By the objective as stated, the value of the solution is never lower than that of greedy's on
    the same problem. If both had to adapt to the free blocks, the same holds for the placed ones.

    Raises:
        DeadlineTooShort: the budget was cancelled.
    """

    def mark(phase: str) -> None:
        book(phase)
        budget.check()

    budget.check()
    prepared_snapshot = prepare_snapshot(snapshot)
    # Step 3: state the columns, the promises and limits, and the problem. Steps 4 and 5: reach its
    # goals in order. Step 6: place the solution on nodes.
    if scheduler is not None:
        answered = _scheduled(prepared_snapshot.snapshot, policy, scheduler, budget, mark)
    else:
        answered = _solved(prepared_snapshot.snapshot, policy, solver, budget, mark)
    mark("place")
    # Step 7: check and explain, with code that no solver shares.
    outcome = _checked(answered)
    mark("check")
    decisions = prepared_snapshot.restore(outcome.decisions)
    if scheduler is None:
        decisions = state_fair_shares(snapshot, policy, decisions)
    outcome = replace(outcome, decisions=decisions)
    # Step 6, continued: network paths and priorities, which only jobs that may run have.
    if snapshot.topology is not None and not outcome.violations:
        outcome = _networked(snapshot, outcome, policy, budget)
        mark("network")
    lasts = scheduler is not None and scheduler.lasts(policy) and not len(snapshot.reservations)
    if lasts and not policy.fair_share and _changes_nothing(outcome):
        return replace(outcome, stands_until=next_defragmentation(snapshot, policy))
    return outcome


def restate_round(snapshot: Snapshot, policy: Policy, budget: Budget) -> RoundWork:
    """Return the round as ``plan_round`` states it before it is solved, with greedy's solution.

    With the recorded work as the budget's, it is stated as it was.

    Raises:
        DeadlineTooShort: the budget was cancelled.
    """
    return _begin(prepare_snapshot(snapshot).snapshot, policy, budget, _no_mark)


def _networked(
    snapshot: Snapshot, outcome: RoundOutcome, policy: Policy, budget: Budget
) -> RoundOutcome:
    """Return the outcome with checked paths and priorities for the jobs that it lets run."""
    network = plan_network(
        snapshot, running_after(snapshot, outcome.decisions), policy, budget.cancelled
    )
    if network.violations:
        return replace(outcome, violations=network.violations, decisions=())
    return replace(outcome, network=network)


def _changes_nothing(outcome: RoundOutcome) -> bool:
    """Return whether everything stays as it is, and fragmentation keeps no job from GPUs.

    Whether to move other jobs to make room for such a job depends on the cost of moves by then.
    """
    if outcome.violations or outcome.placed.unplaced:
        return False
    stay = (DecisionKind.KEEP, DecisionKind.WAIT)
    return all(d.kind in stay for d in outcome.decisions)


def _solved(
    snapshot: Snapshot,
    policy: Policy,
    solver: Solver,
    budget: Budget,
    mark: Callable[[str], None],
) -> _PlacedRound:
    """Return the solver's solution of the round's statement, placed."""
    work = _begin(snapshot, policy, budget, mark)
    admission, problem = work.admission, work.statement.problem
    known = known_prices(problem, snapshot.prices) if len(snapshot.prices) else None
    greedy = work.greedy
    solved = solve_goals(work.statement, solver, budget, greedy, known)
    mark("solve")
    answer = place_so_that_counts_fit(work, solved, solver)
    work, solved, placed = answer.work, answer.solved, answer.placed
    problem, choice = work.statement.problem, placed.solution.choice
    objective = objective_of(problem, choice)
    solution = replace(
        solved.solution,
        choice=choice,
        objective=objective,
        status=placed.solution.status,
        bound=max(solved.solution.bound, objective),
        work=(
            *solved.solution.work,
            *(((ADMISSION, admission.work),) if admission else ()),
        ),
    )
    kept, lost = release_lost_promises(problem, solution)
    broken, had = work.waived | lost | work.statement.lapsed, had_promise(snapshot)
    if admission is not None:  # a new promise that cannot be kept now was never made
        old = snapshot.jobs.admitted
        admission = admission.without(
            frozenset(job for job in broken if not old[job])
        ).as_seen_by_jobs(old)
    return _PlacedRound(
        work=work,
        statement=replace(work.statement, problem=kept),
        solution=solution,
        goals=solved.results,
        placed=placed,
        admission=admission,
        proof=with_packing(solved.proof, work),
        given_up=frozenset(job for job in broken if had[job]),
        greedy_objective=objective_of(problem, greedy.choice),
        plan=work.statement.plan,
    )


def _begin(
    snapshot: Snapshot, policy: Policy, budget: Budget, mark: Callable[[str], None]
) -> RoundWork:
    """Return the round as stated, with the promises that can be kept and greedy's solution."""
    looks_ahead = policy.deadline_mode in LOOK_AHEAD_MODES
    if policy.deadline_mode == KEEP_MODE:  # without a promise, there is nothing to keep
        looks_ahead = bool(snapshot.jobs.admitted.any())
    admission = admit(snapshot, policy, budget) if looks_ahead else None
    statement = state_round(snapshot, policy, admission, check=budget.check)
    snapshot = with_plan(snapshot, statement.plan)
    work = RoundWork.begin(snapshot, policy, budget, statement, admission)
    mark("build")
    work = keep_promises(work)
    mark("greedy")
    return work


def _scheduled(
    snapshot: Snapshot,
    policy: Policy,
    scheduler: Scheduler,
    budget: Budget,
    mark: Callable[[str], None],
) -> _PlacedRound:
    """Return a published scheduler's choice, placed on the GPU types and counts that it chose.

    Profiling tasks, which it does not see, get GPUs that it leaves idle. The bound is the trivial
    one, since nothing was proven.
    """
    draft = draft_columns(snapshot, policy, every_cell=True, check=budget.check)
    work = RoundWork.begin(snapshot, policy, budget, state_draft(draft, promises=()))
    problem = work.statement.problem
    mark("build")
    decided = scheduler.decide(draft, problem, budget.seed, budget.cancelled)
    measured = solve_goals(work.statement, FixedSolver(decided.solution), budget, decided.solution)
    mark("solve")
    absent = {
        **work.statement.absent,
        **explain_not_chosen(snapshot, problem, decided, scheduler.description),
    }
    solution = measured.solution
    placed = place(
        snapshot,
        problem,
        solution,
        deadline_expired=budget.cancelled,
        now=work.gangs,
        chosen_only=True,
    )
    placed = defragment_placement(work, problem, placed, chosen_only=True)
    tasks = np.flatnonzero(snapshot.profiling()).tolist()
    placed = seat_leftover(snapshot, problem, placed, tasks, now=work.gangs)
    # Placement must not hide the rules that the scheduler broke. If it changed nothing, the round's
    # check finds them.
    broken = () if placed.solution is solution else find_violations(problem, solution)
    solution = replace(placed.solution, bound=max(solution.bound, placed.solution.objective))
    return _PlacedRound(
        work=work,
        statement=replace(work.statement, absent=absent, opportunistic=decided.opportunistic),
        solution=solution,
        goals=measured.results,
        placed=placed,
        is_published=True,
        broken=tuple(broken),
    )


def _checked(answered: _PlacedRound) -> RoundOutcome:
    """Return the checked and explained outcome; if no rule is broken, it decides each job."""
    snapshot, gangs = answered.work.snapshot, answered.work.gangs
    statement, solution, placed = answered.statement, answered.solution, answered.placed
    problem, given_up = statement.problem, answered.given_up
    broken = [
        *answered.broken,
        *find_doubly_held(snapshot),
        *find_violations(problem, solution),
        *find_false_rows(snapshot, problem, gangs),
        *find_placement_violations(snapshot, problem, solution, placed.placement, gangs),
        *find_reservation_violations(snapshot, problem, solution, placed.placement),
        *_find_broken_schedules(answered),
    ]
    if not answered.is_published:
        broken += find_law_violations(
            snapshot, answered.work.policy, problem, placed.placement, gangs, given_up
        )
    plan = _plan_after(answered)
    reasons = explain_waiting_jobs(
        snapshot, problem, solution, placed.unplaced, given_up, statement.absent
    )
    reasons = tell_starts(reasons, plan)
    decisions = (
        make_decisions(
            snapshot, statement, solution, placed.placement, reasons, answered.admission, gangs
        )
        if not broken
        else []
    )
    return RoundOutcome(
        problem=problem,
        solution=solution,
        goals=answered.goals,
        placed=placed,
        decisions=tuple(decisions),
        violations=tuple(broken),
        greedy_objective=answered.greedy_objective,
        given_up=given_up,
        admission=answered.admission,
        proof=answered.proof,
        plan=plan,
    )


def _plan_after(placed_round: _PlacedRound) -> StartPlan | None:
    """Return the planned starts of the jobs that still wait after the round."""
    plan = placed_round.plan
    if plan is None:
        return None
    starts = np.zeros(len(plan.start_by_s), dtype=np.bool_)
    starts[list(placed_round.placed.placement.gangs)] = True
    return plan.drop_jobs(starts)


def _find_broken_schedules(answered: _PlacedRound) -> list[Violation]:
    """Return every rule that the schedules of promised deadlines break.

    Promises that the round gives up have no schedule, and neither have jobs that are only planned.
    """
    admission = answered.admission
    if admission is None:
        return []
    kept = np.array(admission.admitted)
    kept[list(answered.given_up)] = False
    segments = admission.schedule_segments.at(kept[admission.schedule_segments.job])
    return find_schedule_violations(answered.work.snapshot, segments, kept)
