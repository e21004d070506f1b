"""Rounds whose counts may not fit on nodes: packing rows are added until what is chosen fits.

The counts are solved first, as if any GPUs would do. Where they do not fit, the round is stated
again with wider shapes as columns. Then rows that the chosen counts break are added, and the round
is solved again from the last prices, a few times. At last, columns and packings of nodes are solved
as one program among the columns that matter at the prices. The best placed answer is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from tessera.formulation.answer.check import find_placement_violations, score_solution
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.goals import Levels, Linear
from tessera.formulation.round.packing import PackingWeights, ShapeClasses
from tessera.formulation.round.packing.shapes import (
    ROUNDING,
    ShapeClass,
    node_counts,
    packable_types,
)
from tessera.formulation.round.packing.shares import leaves_gaps
from tessera.formulation.round.problem import CouplingRow, Problem
from tessera.formulation.round.statement import replace_goal_values
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import is_answer, is_within, make_solution, trivial_bound
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.relaxation import solve_relaxation
from tessera.solvers.goals import SolvedGoals, solve_goals
from tessera.solvers.goals.rows import levels_of
from tessera.solvers.packing import find_weights
from tessera.solvers.packing.joint import NAME as JOINT
from tessera.solvers.packing.joint import solve_joint
from tessera.solvers.placement import PackedShares, PlacementResult
from tessera.solvers.rounds.passes import PASSES_KEY, Passes
from tessera.solvers.rounds.placement import place_answers
from tessera.solvers.rounds.widened import state_wide
from tessera.solvers.rounds.work import RoundWork

MAX_RELAXATIONS: Final = 12
"""Times that the linear relaxation is solved before a pass, to add the rows that it breaks."""
MAX_RELAXED_COLUMNS: Final = 20_000
"""Columns above which only chosen counts are cut off, since the relaxation would take seconds."""
RELAXED_KEY: Final = "relaxations"
"""Name under which the number of relaxations of a pass is recorded."""
MAX_COLUMNS: Final = 30_000
"""Columns above which a round is not solved again. Stating it again would take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedAnswer:
    """An answer of a round as it was placed, and the statement that it solves."""

    work: RoundWork
    solved: SolvedGoals
    placed: PlacementResult

    def rank(self, floors: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
        """Return a sort key: promised jobs that run, then the goals in order as they are placed.

        What an early goal has beyond its floor (``SolvedGoals.floors``) does not count.
        """
        statement, choice = self.work.statement, self.placed.solution.choice
        runs = int(np.count_nonzero(statement.problem.must_run & (choice >= 0)))
        *early, last = statement.goals
        key = [float(runs)]
        for goal, floor in zip(early, floors, strict=False):
            if isinstance(goal, Levels):
                worst = levels_of(statement.problem, goal, choice).tolist()
                key += [-max(level, least) for level, least in zip(worst, floor, strict=False)]
            else:
                key.append(min(self.placed_value(goal), floor[0]))
        if not isinstance(last, Linear):
            raise AssertionError("the last goal of a policy must be a sum")
        return (*key, self.placed_value(last))

    def placed_value(self, goal: Linear) -> float:
        """Return the value of the placed answer by ``goal``, in its integers."""
        problem = replace_goal_values(self.work.statement.problem, goal)
        score = score_solution(problem, self.placed.solution, self.placed.placement)
        return score * problem.scale


def place_so_that_counts_fit(work: RoundWork, solved: SolvedGoals, solver: Solver) -> PlacedAnswer:
    """Return the best placed answer of the round: that of ``solved``, or of a round with packing rows.

    The result is never worse than ``solved`` placed.
    """
    stated, placed = place_answers(work, solved)
    first = PlacedAnswer(work=stated, solved=solved, placed=placed)
    passes = Passes(work.budget)
    if not passes.left or solver.name == Greedy.name or not solved.solution.has_answer:
        return first
    columns = len(work.statement.problem.cell)
    if columns > MAX_COLUMNS or not passes.affords(columns):
        return first
    types = _types_to_pack(first)
    if not types:
        return first
    return _Packed(work, first, solver, types, passes).best()


class _Packed:
    """A round that is solved again with packing rows."""

    def __init__(
        self,
        work: RoundWork,
        first: PlacedAnswer,
        solver: Solver,
        types: frozenset[int],
        passes: Passes,
    ) -> None:
        self._work, self._first, self._solver, self._passes = work, first, solver, passes
        self._stating = state_wide(work, types)
        self._wide, self._classes = self._stating.statement, self._stating.classes
        self._names = {kind: name for name, kind in self._stating.types.items()}
        self._weights: list[PackingWeights] = []
        self._recorded = list(first.solved.solution.recorded)

    def best(self) -> PlacedAnswer:
        """Return the best placed answer, under the record of all passes."""
        last: tuple[RoundWork, SolvedGoals] | None = None
        broken = self._broken_by(self._carried())
        broken += _standing_weights(self._work.snapshot, self._stating.types)
        while self._passes.left and (last is None or broken):
            self._work.budget.check()
            self._add(broken)
            answer = self._solve(last)
            if answer is None:
                break
            last = answer
            broken = self._broken_by(last[1].solution.choice)
        if last is None:
            return self._first
        stated, solved = last
        answers = [
            self._placed(stated, solved),
            *(self._restated(stated, solved) or [self._first]),
        ]
        rank = partial(PlacedAnswer.rank, floors=solved.floors)
        closed = self._joint(stated, solved, max(answers, key=rank))
        best = max([*closed, *answers], key=rank)  # of equals, one with packing rows
        return self._under_record(best)

    def _broken_by(self, choice: Ints) -> list[PackingWeights]:
        """Return weights of rows that ``choice`` breaks."""
        chosen = np.zeros(len(self._wide.problem.cell))
        chosen[choice[choice >= 0]] = 1.0
        return find_weights(self._classes, self._names, chosen)

    def _stated(self) -> Problem:
        """Return the problem with all rows so far."""
        return self._stating.with_weights(self._weights)

    def _tighten(self, budget: Budget) -> None:
        """Add the rows that the linear relaxation breaks, until it breaks no more.

        The relaxation limits the bound, so these rows lower it. How often it was solved is recorded.
        """
        problem = self._stated()
        if len(problem.cell) > MAX_RELAXED_COLUMNS:
            return
        most, done = int(budget.work.get(RELAXED_KEY, MAX_RELAXATIONS)), 0
        while done < most and not budget.expired():
            budget.check()
            relaxed = solve_relaxation(problem, replace(budget, work={}), None)
            if relaxed.status is not SolveStatus.OPTIMAL:
                break
            done += 1
            broken = find_weights(self._classes, self._names, relaxed.x)
            before = len(self._weights)
            self._add(broken)
            if len(self._weights) == before:
                break
            problem = self._stated()
        self._passes.note(RELAXED_KEY, float(done))

    def _carried(self) -> Ints:
        """Return the first answer's choice in the columns of the wide statement."""
        before, after = self._first.work.statement.problem, self._wide.problem
        choice = np.full(len(before.jobs), -1, dtype=np.int64)
        for job in np.flatnonzero(self._first.solved.solution.choice >= 0).tolist():
            column = int(self._first.solved.solution.choice[job])
            key = _key(before, column)
            own = [c for c in after.columns_of(job) if _key(after, c) == key]
            choice[job] = own[0] if own else -1
        return choice

    def _add(self, weights: list[PackingWeights]) -> None:
        known = {one.subject for one in self._weights}
        self._weights += [one for one in dict.fromkeys(weights) if one.subject not in known]

    def _solve(
        self, last: tuple[RoundWork, SolvedGoals] | None
    ) -> tuple[RoundWork, SolvedGoals] | None:
        """Solve the round with all rows so far, from the last prices; None if no answer is known."""
        budget = self._passes.budget()
        self._tighten(budget)
        statement = replace(self._wide, problem=self._stated())
        widened = frozenset(self._names)
        stated = replace(self._work, statement=statement, widened=widened, hint=None)
        before, solved_before = (self._first.work, self._first.solved) if last is None else last
        greedy = Greedy().solve(stated.surrogate, budget, _hint(stated, last))
        if not greedy.has_answer:
            return None
        stated = replace(stated, hint=greedy)
        prices = _prices(solved_before.solution, before.statement.problem.rows, statement.problem)
        solved = solve_goals(statement, self._solver, budget, greedy, prices)
        if not solved.solution.has_answer:
            return None
        recorded = self._passes.record(solved.solution)
        self._recorded += recorded.recorded
        return stated, replace(solved, solution=recorded)

    def _placed(
        self,
        stated: RoundWork,
        solved: SolvedGoals,
        packed: Mapping[int, PackedShares] | None = None,
    ) -> PlacedAnswer:
        stated, placed = place_answers(stated, solved, packed or {})
        return PlacedAnswer(work=stated, solved=solved, placed=placed)

    def _restated(self, stated: RoundWork, solved: SolvedGoals) -> list[PlacedAnswer]:
        """Return the first answer as it was placed, in the columns of the round with packing rows.

        The bound of that round holds for it, too, and is lower. The list is empty if the columns do
        not have the same value, or do not fit the rows.
        """
        placed, problem = self._first.placed, stated.statement.problem
        before = self._first.work.statement.problem
        choice = np.full(len(problem.jobs), -1, dtype=np.int64)
        for job, gang in placed.placement.gangs.items():
            column = int(placed.solution.choice[job])
            kind, gpus, *cell, nodes = _key(before, column)
            wide = (kind, gpus, gang.nodes)
            own = [(c, _key(problem, c)) for c in problem.columns_of(job)]
            same = [c for c, key in own if (key[0], key[1], key[-1]) == wide]
            same = same or [c for c, key in own if key == (kind, gpus, *cell, nodes)]
            if column == int(before.current[job]) and problem.current[job] >= 0:
                same = [int(problem.current[job])]
            if not same:
                return []
            choice[job] = max(same, key=lambda c: (int(problem.value[c]), -c))
        if not is_answer(problem, choice):
            return []
        solution = replace(
            placed.solution, choice=choice, objective=int(problem.value[choice[choice >= 0]].sum())
        )
        wanted = {job: int(choice[job]) for job in placed.wanted if choice[job] >= 0}
        answer = PlacedAnswer(
            work=stated,
            solved=solved,
            placed=replace(placed, solution=solution, wanted=wanted),
        )
        broken = find_placement_violations(
            stated.snapshot, problem, solution, placed.placement, stated.gangs
        )
        lost = self._first.rank(solved.floors)[-1] - answer.rank(solved.floors)[-1]
        return [] if broken or lost > ROUNDING * len(problem.jobs) else [answer]

    def _joint(
        self, stated: RoundWork, solved: SolvedGoals, best: PlacedAnswer
    ) -> list[PlacedAnswer]:
        """Return the answer of the joint program, if there is a better one."""
        problem, budget = stated.statement.problem, self._work.budget
        bound, goals = solved.solution.bound, stated.statement.goals
        if len(goals) > 1 or not len(solved.solution.prices):
            return []
        value = best.rank(())[-1]
        if is_within(budget.gap, bound, value):
            return []
        joint = solve_joint(
            stated.snapshot,
            problem,
            self._classes,
            stated.gangs,
            solved.solution.prices,
            value,
            budget,
        )
        self._passes.work.append((JOINT, joint.work))
        if joint.choice is None or not is_answer(problem, joint.choice):
            return []
        solution = make_solution(
            problem,
            joint.choice,
            bound=bound,
            solver=solved.solution.solver,
            prices=solved.solution.prices,
            seed=budget.seed,
        )
        solution = replace(
            solution,
            proved_by=solved.solution.proved_by,
            certificate=solved.solution.certificate,
        )
        return [self._placed(stated, replace(solved, solution=solution), joint.shares)]

    def _under_record(self, best: PlacedAnswer) -> PlacedAnswer:
        """Return the answer with the work of all passes."""
        first = self._first.solved.solution
        work = (*first.work, (PASSES_KEY, float(self._passes.done)), *self._passes.work)
        solution = replace(best.solved.solution, work=work, recorded=tuple(self._recorded))
        return replace(best, solved=replace(best.solved, solution=solution))


def _key(problem: Problem, column: int) -> tuple[int, ...]:
    cells, cell = problem.cells, int(problem.cell[column])
    parts = (cells.gpu_type, cells.gpus, cells.pipeline_degree, cells.plan, cells.nodes)
    return tuple(int(part[cell]) for part in parts)


def _types_to_pack(first: PlacedAnswer) -> frozenset[int]:
    """Return the types to solve again with packing rows; none if that is of no use.

    These are the types with nodes of several sizes, and those with shares that may leave gaps.
    Where each share divides the next larger one and the node, counts always fit on fresh nodes, so
    what was lost there was lost to jobs that stay where they are. Nothing is to be gained if each job
    has the column and the shape that were chosen for it.
    """
    result, snapshot = first.placed, first.work.snapshot
    has, wanted = result.solution.choice, first.solved.solution.choice
    denied = [
        *wanted[(wanted >= 0) & (has != wanted)].tolist(),
        *has[list(result.degraded)].tolist(),
    ]
    if not denied:
        return frozenset()
    problem = first.work.statement.problem
    cells, cell = problem.cells, problem.cell
    lost = set(cells.gpu_type[cell[denied]].tolist())
    nodes = {kind: node_counts(snapshot, kind) for kind in sorted(packable_types(snapshot))}
    gappy = {
        kind
        for kind, sizes in nodes.items()
        if leaves_gaps(
            np.unique(cells.gpus[cell[cells.gpu_type[cell] == kind]]).tolist(), tuple(sizes)
        )
    }
    some = frozenset(gappy | {kind for kind, sizes in nodes.items() if len(sizes) > 1})
    useful = lost & gappy or (lost & some and _breaks_a_row(first, some, nodes))
    return some if useful else frozenset()


def _breaks_a_row(
    first: PlacedAnswer, types: frozenset[int], nodes: dict[int, dict[int, int]]
) -> bool:
    """Return whether the counts of the first answer do not fit on the nodes of some type."""
    problem, choice = first.work.statement.problem, first.solved.solution.choice
    cells, row = problem.cells, problem.cell[choice[choice >= 0]]
    row = row[np.isin(cells.gpu_type[row], list(types))]
    shapes = np.stack([cells.gpu_type[row], cells.gpus[row], cells.nodes[row]], axis=1)
    distinct, of_job = np.unique(shapes, axis=0, return_inverse=True)
    classes = ShapeClasses(
        classes=tuple(
            ShapeClass(gpu_type=kind, gpus=gpus, nodes=(count,))
            for kind, gpus, count in distinct.tolist()
        ),
        of_column=of_job.ravel(),
        sizes={kind: tuple(sorted(nodes[kind])) for kind in sorted(types)},
        count={kind: nodes[kind] for kind in sorted(types)},
    )
    names = {kind: str(kind) for kind in types}
    return bool(find_weights(classes, names, np.ones(len(row))))


def _standing_weights(snapshot: Snapshot, types: Mapping[str, int]) -> list[PackingWeights]:
    """Return the packing rows that had a price in the last round, for these types."""
    weights = []
    for name, price in zip(snapshot.prices.name, snapshot.prices.price.tolist(), strict=True):
        one = PackingWeights.from_name(name) if price > 0 else None
        if one is not None and one.gpu_type in types:
            size = int(snapshot.node_size()[types[one.gpu_type]])
            if any(one.up_to(size).weight):
                weights.append(one.up_to(size))
    return weights


def _hint(stated: RoundWork, last: tuple[RoundWork, SolvedGoals] | None) -> Solution | None:
    """Return an answer from which greedy may begin: the last pass's, or the packed witness."""
    choice = stated.statement.witness if last is None else last[1].solution.choice
    if choice is None:
        return None
    problem = stated.surrogate
    if not is_answer(problem, choice):
        return None
    return make_solution(problem, choice, bound=trivial_bound(problem), solver="packing")


def _prices(
    before: Solution, rows_before: tuple[CouplingRow, ...], problem: Problem
) -> Floats | None:
    """Return the prices of an earlier solution for the rows of ``problem``, or None if not known."""
    if not len(before.prices):
        return None
    known = dict(zip((row.name for row in rows_before), before.prices.tolist(), strict=True))
    return np.array([known.get(row.name, 0.0) for row in problem.rows])
