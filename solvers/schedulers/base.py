"""The interface of published schedulers: a choice of Cells from what a scheduler may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

import numpy as np

from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Ints, concatenate_ranges
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem, RowKind
from tessera.formulation.round.statement import draft_columns
from tessera.formulation.state.information import Information, all_estimates
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget, require_wanted
from tessera.solvers.exact.answers import make_solution, trivial_bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulerView:
    """The view of a scheduler.

    ``draft.snapshot`` has the estimates that the scheduler's information lets it see. ``draft`` has
    one column for each of their Cells, dominated ones too. Profiling tasks, which published
    schedulers do not know, have no columns. ``capacity`` is int64[types], the schedulable GPUs.
    """

    draft: Draft
    capacity: Ints
    seed: int = 0
    cancelled: Callable[[], bool] = never_cancelled

    def check(self) -> None:
        """Raise DeadlineTooShort if nobody waits for the choice any more; long loops call this."""
        require_wanted(self.cancelled)


def make_view(snapshot: Snapshot, policy: Policy, seed: int = 0) -> SchedulerView:
    """Return a scheduler's view of ``snapshot``, which has the estimates that it may see."""
    return _seen(draft_columns(snapshot, policy, every_cell=True), seed)


def _seen(
    draft: Draft, seed: int, cancelled: Callable[[], bool] = never_cancelled
) -> SchedulerView:
    tasks = np.flatnonzero(draft.snapshot.profiling()).tolist()
    draft = draft.without(dict.fromkeys(tasks, _TASK_WAITS))
    return SchedulerView(
        draft=draft,
        capacity=draft.snapshot.schedulable_gpus(),
        seed=seed,
        cancelled=cancelled,
    )


class PublishedScheduler(Protocol):
    """A published scheduler; it keeps no state, since all that it needs is in the snapshot."""

    @property
    def name(self) -> str:
        """Return the scheduler's name, e.g. ``fcfs``."""
        ...

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of ``seen.draft`` that each job shall run, int64[jobs]; -1 if it waits.

        Together the columns fit the capacity of each type.
        """
        ...


@runtime_checkable
class OpportunisticScheduler(Protocol):
    """A published scheduler that starts jobs past blocked ones and later suspends them."""

    def gives_way(self, seen: SchedulerView, choice: Ints) -> Bools:
        """Return which of the jobs that ``choice`` starts give way later, bool[jobs]."""
        ...


@runtime_checkable
class TimelessScheduler(Protocol):
    """A published scheduler that ignores the clock, and what jobs have trained or received."""

    def lasts(self, policy: Policy) -> bool:
        """Return whether its choice stays the same while the same jobs hold the same GPUs.

        It does so whatever time it is by then, and however far the jobs have come.
        """
        ...


def require_choice(draft: Draft, name: str, choice: Ints) -> Ints:
    """Return the answer of the scheduler ``name``, if it is a choice of columns of ``draft``.

    Raises:
        InvalidInput: it is not int64[jobs], or a job has a column that is not its own.
    """
    jobs = len(draft.current)
    if not (
        isinstance(choice, np.ndarray) and choice.shape == (jobs,) and choice.dtype.kind == "i"
    ):
        raise InvalidInput(
            "scheduler",
            f"{name} must return a whole number for each of the {jobs} jobs, int64[jobs]",
        )
    first, end = draft.job_start[:-1], draft.job_start[1:]
    wrong = np.flatnonzero((choice != -1) & ((choice < first) | (choice >= end)))
    if len(wrong):
        job = int(wrong[0])
        raise InvalidInput(
            "scheduler",
            f"{name} chose column {choice[job]} for {draft.snapshot.jobs.name[job]}, whose columns are"
            f" {first[job]} up to but not including {end[job]}; -1 lets a job wait",
        )
    return choice.astype(np.int64, copy=False)


def translate_choice(draft: Draft | Problem, problem: Problem, choice: Ints) -> Ints:
    """Return ``choice`` translated from ``draft`` to ``problem``, int64[jobs]; -1 if a job waits.

    ``choice`` has columns of ``draft``, which may be another statement of the same snapshot. The
    job gets the GPU type and count that the scheduler chose. Of the true Cells there, it gets the
    one that the scheduler named. If there is no such Cell, it gets the one that it runs on now,
    else the fastest. A job whose chosen Cell does not truly run waits.
    """
    translated = np.full(len(choice), -1, dtype=np.int64)
    visible, true = draft.cells, problem.cells
    jobs = np.flatnonzero(choice >= 0)
    first = problem.job_start[jobs]
    count = problem.job_start[jobs + 1] - first
    column, job = concatenate_ranges(first, count), np.repeat(jobs, count)
    cell, chosen = problem.cell[column], np.repeat(draft.cell[choice[jobs]], count)
    same = np.flatnonzero(
        (true.gpu_type[cell] == visible.gpu_type[chosen])
        & (true.gpus[cell] == visible.gpus[chosen])
    )
    column, job, cell, chosen = column[same], job[same], cell[same], chosen[same]
    named = (true.pipeline_degree[cell] == visible.pipeline_degree[chosen]) & (
        true.plan[cell] == visible.plan[chosen]
    )
    rank = np.where(named, 2, column == problem.current[job])
    best = np.lexsort((column, -true.rate[cell], -rank, job))[::-1]
    translated[job[best]] = column[best]  # the best of each job is written last
    return translated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulerDecision:
    """A scheduler's decision: a solution of the true problem, and the jobs whose Cell does not run.

    ``opportunistic`` is bool[jobs]: the jobs that, if they start now, give way to a blocked one
    later. ``held`` are the jobs that were left out because of reservations.
    """

    solution: Solution
    dropped: frozenset[int]
    opportunistic: Bools
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A published scheduler and its information, which by default is the estimates unchanged.

    ``parameters`` are those with which a round set the scheduler up, in the notation of its options.
    """

    published: PublishedScheduler
    information: Information = all_estimates
    parameters: str = ""

    @property
    def description(self) -> str:
        """Return the scheduler's name with its parameters, e.g. ``arena (depth=5)``."""
        return self.published.name + (f" ({self.parameters})" if self.parameters else "")

    def lasts(self, policy: Policy) -> bool:
        """Return whether the choice is the same until a job comes, goes, or gets or loses GPUs."""
        return isinstance(self.published, TimelessScheduler) and self.published.lasts(policy)

    def decide(
        self,
        draft: Draft,
        problem: Problem,
        seed: int = 0,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> SchedulerDecision:
        """Return the scheduler's choice, translated to ``problem``.

        ``draft`` has the columns of the true snapshot on every Cell, and ``problem`` states it. The
        bound is the trivial one, since the scheduler proves nothing.

        Raises:
            DeadlineTooShort: ``cancelled`` has become true.
            InvalidInput: the scheduler's answer is not a choice of the columns that it saw.
        """
        known = self.information(draft.snapshot)
        sees_all = known is draft.snapshot
        visible = draft if sees_all else draft_columns(known, draft.policy, every_cell=True)
        view = _seen(visible, seed, cancelled)
        chosen = require_choice(view.draft, self.published.name, self.published.choose(view))
        choice = translate_choice(view.draft, problem, chosen)
        held: set[int] = set()
        while over := _find_over_windows(problem, choice):
            # Windows are not in its paper, so it chooses again without the jobs that they keep out.
            held |= over
            view = replace(view, draft=view.draft.without(dict.fromkeys(over, HELD)))
            chosen = self.published.choose(view)
            choice = translate_choice(view.draft, problem, chosen)
        return SchedulerDecision(
            held=frozenset(held),
            solution=make_solution(
                problem, choice, bound=trivial_bound(problem), solver=self.published.name, seed=seed
            ),
            dropped=frozenset(np.flatnonzero((chosen >= 0) & (choice < 0)).tolist()),
            opportunistic=self.published.gives_way(view, chosen)
            if isinstance(self.published, OpportunisticScheduler)
            else np.zeros(len(chosen), dtype=np.bool_),
        )


_TASK_WAITS: Final = Reason(
    code=ReasonCode.NOT_CHOSEN,
    message="a published scheduler decides this round, and leaves no GPU of the type idle",
    next_step="wait until a GPU of the type is idle, or profile by hand: `tessera profile`",
)


HELD: Final = Reason(
    code=ReasonCode.HELD_FOR_RESERVATION,
    message="a published scheduler chose GPUs for the job that a reservation has for others",
    next_step="wait for the end of the reservation, or entitle the job to it: `tessera reserve list`",
)


def _find_over_windows(problem: Problem, choice: Ints) -> set[int]:
    """Return jobs without which ``choice`` (int64[jobs]) leaves reservations their GPUs.

    The jobs that would start are left out first, then those that run. Of these, the later ones in
    order of submission come first.
    """
    over: set[int] = set()
    rows = [r for r, row in enumerate(problem.rows) if row.kind is RowKind.WINDOW]
    left = np.array(choice)
    for row in rows:
        jobs = np.flatnonzero(left >= 0)
        use = np.array([problem.usage_of(int(left[job])).get(row, 0) for job in jobs], np.int64)
        excess = int(use.sum()) - problem.rows[row].capacity
        jobs, use = jobs[use > 0], use[use > 0]
        runs = left[jobs] == problem.current[jobs]
        for k in np.lexsort((-jobs, runs)).tolist():
            if excess <= 0:
                break
            excess -= int(use[k])
            over.add(int(jobs[k]))
            left[jobs[k]] = -1
    return over


def explain_not_chosen(
    snapshot: Snapshot, problem: Problem, decided: SchedulerDecision, name: str
) -> dict[int, Reason]:
    """Return a reason for each job that could run but was not chosen by the scheduler ``name``."""
    plain = Reason(
        code=ReasonCode.NOT_CHOSEN,
        message=f"the scheduler {name} gave the job no GPUs in this round",
        next_step=f"wait for the job's turn under {name}, or choose another scheduler",
    )
    misled = Reason(
        code=ReasonCode.NOT_CHOSEN,
        message=f"the scheduler {name} chose GPUs on which the job does not run, judging by the estimates"
        " that it can see",
        next_step="let the scheduler see better estimates, or choose another scheduler",
    )
    could = (decided.solution.choice < 0) & (np.diff(problem.job_start) > 0)
    tasks = snapshot.profiling()
    return {
        job: _TASK_WAITS
        if tasks[job]
        else HELD
        if job in decided.held
        else misled
        if job in decided.dropped
        else plain
        for job in np.flatnonzero(could).tolist()
    }


class FixedSolver:
    """A solver whose solution is known beforehand, so that goals can be measured on it."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution

    @property
    def name(self) -> str:
        """Return the name of the solver that found the solution."""
        return self._solution.solver

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Return the solution measured by the values of ``problem``."""
        return make_solution(
            problem,
            self._solution.choice,
            bound=trivial_bound(problem),
            solver=self.name,
            seed=budget.seed,
        )
