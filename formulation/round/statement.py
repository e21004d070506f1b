"""The statement of a round: from a snapshot and a policy to columns, rows, marks and goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.job.reasons import Reason
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.capacity import gpu_rows
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.draft import Draft, RowUse, do_not_check
from tessera.formulation.round.goals import Goal, Linear
from tessera.formulation.round.objectives import goals_of, with_needs
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.promises import PHYSICAL, PROMISES, PUBLISHED, Rule
from tessera.formulation.state.last_round import StartPlan
from tessera.formulation.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statement:
    """The problem of a round, and its goals in order.

    ``problem.value`` is that of the last goal, which is a sum. ``absent`` has a reason for each job
    that a rule left without a column. ``rejected`` are those of them that can never run.
    ``opportunistic`` is bool[jobs]: jobs that a published scheduler starts past a blocked one, to which
    they give way later.
    ``plan`` has the planned starts of waiting jobs. It is None if a published scheduler decides.

    ``witness`` is int64[jobs], an answer in which every job that must run does so. It is None if
    the rules do not know one. It must be checked before it is used. ``admits`` are the jobs whose
    deadlines are promised if they run. ``lapsed`` are the jobs whose promise has ended.
    """

    problem: Problem
    goals: tuple[Goal, ...]
    absent: Mapping[int, Reason]
    rejected: frozenset[int]
    opportunistic: Bools
    plan: StartPlan | None = None
    witness: Ints | None = None
    admits: frozenset[int] = frozenset()
    lapsed: frozenset[int] = frozenset()


def state_round(
    snapshot: Snapshot,
    policy: Policy,
    admission: Admission | None = None,
    *,
    waived: frozenset[int] = frozenset(),
    plan: StartPlan | None = None,
    published: bool = False,
    widened: frozenset[int] = frozenset(),
    check: Callable[[], None] = do_not_check,
) -> Statement:
    """State the round, without the promises of the jobs ``waived``, which cannot be kept.

    ``published`` states it for published schedulers, which choose by their own rules. Every Cell is
    then a column, dominated ones too, and there are no promises. On the types ``widened``, shapes on more
    nodes than needed are columns, too, as packing rows need them. ``check`` is called now and then.
    It raises an error once nobody waits for the statement any more.

    Raises:
        ProblemTooLarge: a value or a row would overflow.
    """
    draft = draft_columns(
        snapshot,
        policy,
        admission,
        waived=waived,
        every_cell=published,
        widened=widened,
        check=check,
    )
    return state_draft(replace(draft, plan=plan), () if published else PROMISES)


def draft_columns(
    snapshot: Snapshot,
    policy: Policy,
    admission: Admission | None = None,
    *,
    waived: frozenset[int] = frozenset(),
    every_cell: bool = False,
    widened: frozenset[int] = frozenset(),
    check: Callable[[], None] = do_not_check,
) -> Draft:
    """Return every column that its job can physically run, before any promise or goal."""
    draft = replace(
        first_draft(
            snapshot, policy, admission, every_cell=every_cell, waived=waived, widened=widened
        ),
        check=check,
    )
    for rule in PUBLISHED if every_cell else PHYSICAL:
        draft = rule(draft)
    return draft


def state_draft(draft: Draft, promises: Sequence[Rule] = PROMISES) -> Statement:
    """State the round of the draft that ``draft_columns`` returned. Raises ProblemTooLarge."""
    draft = with_needs(draft)
    for rule in promises:
        draft.check()
        draft = rule(draft)
    draft.check()
    goals = goals_of(draft)
    return Statement(
        problem=_problem(draft, goals[-1]),
        goals=goals,
        absent=draft.absent,
        rejected=draft.rejected,
        opportunistic=np.zeros(len(draft.current), dtype=np.bool_),
        plan=draft.plan,
        witness=draft.witness,
        admits=draft.admits,
        lapsed=draft.lapsed,
    )


def build_problem(snapshot: Snapshot, policy: Policy) -> Problem:
    """Return only the problem of the round, without promises. They would leave few choices."""
    return state_draft(draft_columns(snapshot, policy), ()).problem


def _problem(draft: Draft, goal: Goal) -> Problem:
    if not isinstance(goal, Linear):
        raise AssertionError("the last goal of a policy must be a sum")
    rows = gpu_rows(draft.snapshot)
    columns, types = len(draft.cell), len(rows)
    usage_start, row, amount = np.arange(columns + 1), draft.gpu_type, draft.gpus
    if draft.rows:
        usage_start, row, amount = _by_owner(
            [(usage_start[:-1], row, amount)]
            + [_entries(r, types + i, r.column, r.amount) for i, r in enumerate(draft.rows)],
            columns,
        )
    idle_start, idle_row, idle_amount = _by_owner(
        [_entries(r, types + i, r.idle_job, r.idle_amount) for i, r in enumerate(draft.rows)],
        len(draft.current),
    )
    return Problem(
        jobs=draft.snapshot.jobs.name,
        job_start=draft.job_start,
        cells=draft.cells,
        plans=draft.snapshot.plans,
        cell=draft.cell,
        value=goal.value,
        restart_price=goal.restart_price,
        scale=goal.scale,
        unit=goal.unit,
        rows=(*rows, *(use.row for use in draft.rows)),
        usage_start=usage_start,
        row=row,
        amount=amount,
        idle_start=idle_start,
        idle_row=idle_row,
        idle_amount=idle_amount,
        must_run=draft.must_run,
        least_rate=draft.least_rate,
        movable=draft.movable,
        current=draft.current,
        restart_share=draft.restart_share,
        weight=draft.weight,
    )


Entries = tuple[Ints, Ints, Ints]
"""(owner, row, amount), each int64[entries]."""


def _entries(row: RowUse, index: int, owner: Ints, amount: Ints) -> Entries:
    return owner, np.full(len(owner), index, dtype=np.int64), amount


def _by_owner(parts: list[Entries], owners: int) -> Entries:
    """Return the entries in compressed rows by owner: (start, row, amount).

    Zero amounts are left out.
    """
    owner, row, amount = (
        np.concatenate([np.zeros(0, np.int64), *column])
        for column in (zip(*parts, strict=True) if parts else ((), (), ()))
    )
    some = amount > 0
    owner, row, amount = owner[some], row[some], amount[some]
    order = np.lexsort((row, owner))
    owner = owner[order]
    return np.searchsorted(owner, np.arange(owners + 1)), row[order], amount[order]


def replace_goal_values(problem: Problem, goal: Linear) -> Problem:
    """Return ``problem`` with the values of ``goal``."""
    return replace(
        problem,
        value=goal.value,
        restart_price=goal.restart_price,
        scale=goal.scale,
        unit=goal.unit,
    )
