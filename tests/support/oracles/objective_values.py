"""An oracle for small rounds: the values of objectives, straight from the snapshot.

It is written only from the equations of ``docs/mathematics.md``. It shares no code with the
objectives, the rules or the problem that it judges, groups the estimates into Cells itself, and
keeps dominated Cells. It works only for small snapshots without pins, avoided nodes, quotas or
guaranteed jobs, and with one estimate for each Cell, at its fewest nodes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tessera.formulation.base.tables import Floats, Ints, Table
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import STATES, Snapshot

TIE_TOLERANCE = 1e-9
"""The relative difference between two computations of the same number."""
RUNNABLE_STATES = frozenset(
    i for i, s in enumerate(STATES) if s.name in ("QUEUED", "STARTING", "RUNNING", "STOPPING")
)
"""The codes of the states in which a round may give a job GPUs."""
SPREAD_RATE_SHARE = 0.9
"""The share of the rate that each doubling of the nodes leaves ("Shapes" of docs/mathematics.md)."""


@dataclass(frozen=True, slots=True)
class OracleOption:
    """A Cell that a job may run on. ``current`` is whether the job runs there now."""

    gpu_type: int
    gpus: int
    degree: int
    rate: float
    current: bool


Choice = Sequence[OracleOption | None]
"""The option of each job. If it is None, the job waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleGoal:
    """A goal: a sum of terms (objective -> weight), or the levels of the objective ``levels``."""

    terms: tuple[tuple[str, float], ...] = ()
    levels: str = ""
    tolerance: float = 0.0


class Oracle:
    """A snapshot as its equations describe it. The goals in ``goals`` are reached in order."""

    def __init__(self, snapshot: Snapshot, policy: Policy, goals: Sequence[OracleGoal]) -> None:
        self._snapshot, self._policy, self.goals = snapshot, policy, tuple(goals)
        self._jobs = _rows(snapshot.jobs)
        self._estimates = _rows(snapshot.estimates)
        self.capacity = [0] * len(snapshot.gpu_types)
        self._size = [0] * len(snapshot.gpu_types)
        for node in _rows(snapshot.nodes):
            if node["schedulable"]:
                self.capacity[node["gpu_type"]] += node["gpus"]
                self._size[node["gpu_type"]] = max(self._size[node["gpu_type"]], node["gpus"])
        self._tenant = {t["name"]: t["weight"] for t in _rows(snapshot.tenants)}
        self._cells = [self._cells_of(j) for j in range(len(self._jobs))]
        self._unit = [self._unit_rate(j) for j in range(len(self._jobs))]
        self._expected = [self._expected_rate(j) for j in range(len(self._jobs))]
        self._requested = [self._requested_rate(j) for j in range(len(self._jobs))]
        self._start_share = [self._restart_share(j) for j in range(len(self._jobs))]
        self._fair = [0.0] * len(self._jobs)
        if any(goal.levels == "finish-time-fairness" for goal in goals):
            total = sum(self._weight(j) for j in range(len(self._jobs)))
            self._fair = [self._fair_rate(j, total) for j in range(len(self._jobs))]
        self.options: list[list[OracleOption | None]] = [
            self._allowed(j) for j in range(len(self._jobs))
        ]

    # the references that values are measured against

    def _cells_of(self, job: int) -> list[OracleOption]:
        row, result = self._jobs[job], []
        batch = self._snapshot.workloads[row["workload"]].global_batch
        now = (row["current_type"], row["current_gpus"], row["current_degree"])
        for e in self._estimates:
            if e["workload"] != row["workload"] or e["gpus"] > self.capacity[e["gpu_type"]]:
                continue
            if e["nodes"] != math.ceil(e["gpus"] / self._size[e["gpu_type"]]):
                raise ValueError("the oracle knows one estimate a Cell, at its fewest nodes")
            key = (e["gpu_type"], e["gpus"], e["pipeline_degree"])
            result.append(OracleOption(*key, batch / e["iter_time_s"], key == now))
        return result

    def _weight(self, job: int) -> float:
        """Return the weight of a job, Eq. (9)."""
        row = self._jobs[job]
        queue = self._policy.weight_of_priority.get(row["priority"], 1.0)
        return float(row["weight"] * self._tenant.get(row["tenant"], 1.0) * queue)

    def _work(self, job: int) -> float:
        row = self._jobs[job]
        return float(
            row["iterations_left"] * self._snapshot.workloads[row["workload"]].global_batch
        )

    def _unit_rate(self, job: int) -> float:
        """Return the unit rate of a job, Eq. (6)."""
        return max((c.rate / c.gpus for c in self._cells[job]), default=1.0)

    def _expected_rate(self, job: int) -> float:
        """Return the expected rate of a job, Eq. (6b)."""
        may_run = sum(
            row["state"] in RUNNABLE_STATES and self._weight(j) > 0
            for j, row in enumerate(self._jobs)
        )
        share = max(1, sum(self.capacity) // max(1, may_run))
        cells = self._cells[job]
        least = min((c.gpus for c in cells), default=0)
        return max((c.rate for c in cells if c.gpus <= max(share, least)), default=1.0)

    def _requested_rate(self, job: int) -> float:
        """Return the rate of a job as requested, Eq. (6c)."""
        wanted = [c.rate for c in self._cells[job] if c.gpus == self._jobs[job]["requested_gpus"]]
        return max(wanted or [c.rate for c in self._cells[job]])

    def _restart_share(self, job: int) -> float:
        """Return the restart share of a job, Eq. (7)."""
        horizon_s = min(self._policy.restart_horizon_s, self._work(job) / self._expected[job])
        return float(min(self._policy.max_restart_share, self._jobs[job]["restart_s"] / horizon_s))

    def _fair_rate(self, job: int, total: float) -> float:
        """Return the fair rate of a job: the first line of Eq. (14), over the polytope's corners.

        A corner has as many basic variables (shares of time and slacks) as there are constraints.
        """
        cells, types = self._cells[job], len(self.capacity)
        share = self._weight(job) / total
        bound = np.array([1.0, *(share * c for c in self.capacity)])
        matrix = np.zeros((types + 1, len(cells) + types + 1))
        for c, cell in enumerate(cells):
            matrix[0, c], matrix[1 + cell.gpu_type, c] = 1.0, cell.gpus
        matrix[:, len(cells) :] = np.eye(types + 1)
        rate = np.array([*(c.rate for c in cells), *([0.0] * (types + 1))])
        bases = np.array(list(itertools.combinations(range(matrix.shape[1]), types + 1)))
        square = matrix[:, bases].transpose(1, 0, 2)
        proper = np.abs(np.linalg.det(square)) > 1e-12
        at = np.linalg.solve(
            square[proper], np.broadcast_to(bound[:, np.newaxis], (int(proper.sum()), types + 1, 1))
        )[..., 0]
        feasible = (at >= -1e-12).all(axis=1)
        return float((rate[bases[proper]][feasible] * at[feasible]).sum(axis=1).max())

    # the options of jobs

    def _allowed(self, job: int) -> list[OracleOption | None]:
        """Return the options of the job: its Cells and waiting, except what rules forbid."""
        row, cells = self._jobs[job], list(self._cells[job])
        if any(name == "cost" for goal in self.goals for name, _ in goal.terms):
            floor = self._policy.rate_floor * self._requested[job] * (1 - TIE_TOLERANCE)
            cells = [
                c
                for c in cells
                if (c.rate >= floor and self._price(c.gpu_type) > 0)
                or (c.current and row["admitted"])  # a promised job may stay where it is
            ]
        cells = [c for c in cells if self._may_replan(job, c, cells)]
        if self._policy.deadline_mode == "myopic" and math.isfinite(row["deadline_s"]):
            in_time = [c for c in cells if self._in_time(job, c)]
            if in_time:
                return [*([] if row["admitted"] else [None]), *in_time]
            if row["generation"] == 0 and not row["admitted"]:
                return [None]  # it never ran, and would be too late
        return [None, *cells]

    def _may_replan(self, job: int, cell: OracleOption, cells: list[OracleOption]) -> bool:
        """Return whether the job may run on the Cell, as far as replans are limited (34a)."""
        row, policy = self._jobs[job], self._policy
        now = next((c for c in cells if c.current), None)
        dated = math.isfinite(row["deadline_s"])
        if policy.deadline_mode in ("ignore", "keep"):
            dated = row["admitted"]
        if now is None or cell.current or dated or not policy.replan_spacing:
            return True
        if (cell.gpu_type, cell.gpus) != (now.gpu_type, now.gpus):
            return True
        spaced_s = policy.replan_spacing * row["restart_s"]
        if row["since_s"] > 0 and self._snapshot.now_s - row["since_s"] < spaced_s:
            return False
        within_s = min(spaced_s, policy.restart_horizon_s, self._work(job) / now.rate)
        return bool(
            within_s * (cell.rate - now.rate) >= row["restart_s"] * cell.rate
            and cell.rate > now.rate
        )

    def _in_time(self, job: int, cell: OracleOption) -> bool:
        """Return whether the job ends in time (Arena, Eq. 6).

        Its rate must be at least the work left divided by the time left, less the restart.
        """
        row = self._jobs[job]
        left_s = row["deadline_s"] - self._snapshot.now_s
        rate, pause_s = cell.rate, row["restart_s"]
        if cell.current:  # it stays where it is, on as many nodes as it has
            pause_s = max(0.0, row["since_s"] + row["restart_s"] - self._snapshot.now_s)
            fewest = math.ceil(cell.gpus / self._size[cell.gpu_type])
            held = len({a["node"] for a in _rows(self._snapshot.allocations) if a["job"] == job})
            rate *= SPREAD_RATE_SHARE ** math.log2(max(held, fewest) / fewest)
        return bool(
            left_s > 0
            and self._work(job) <= rate * max(0.0, left_s - pause_s) * (1 + TIE_TOLERANCE)
        )

    def _price(self, gpu_type: int) -> float:
        kind = self._snapshot.gpu_types[gpu_type]
        return kind.watts / 1000 if self._policy.cost_of == "watts" else kind.dollars_per_hour

    # the values of options

    def value(
        self, terms: Sequence[tuple[str, float]], job: int, option: OracleOption | None
    ) -> float:
        """Return the value that the job adds to a sum, Eqs. (5), (10) to (13)."""
        if option is None:
            return 0.0
        return sum(weight * self._value(name, job, option) for name, weight in terms)

    def _value(self, name: str, job: int, option: OracleOption) -> float:
        weight, unit = self._weight(job), self._unit[job]
        start = 0.0 if option.current else self._start_share[job]
        if name == "running":
            return weight
        if name == "cost":
            return -option.gpus * self._price(option.gpu_type) * (1 + start)
        worth = weight * option.rate / unit * (1 - start)
        if name.startswith(("jct", "balanced")):
            remaining_s = self._work(job) / unit
            horizons = self._policy.restart_horizon_s / max(remaining_s, self._policy.round_s)
            _, _, share = name.partition(":")
            worth *= horizons ** (1.0 if name == "jct" else float(share or 0.5))
        return worth

    def level(self, name: str, job: int, option: OracleOption | None) -> float:
        """Return the job's level, Eqs. (15) to (18)."""
        row, round_s = self._jobs[job], self._policy.round_s
        rate = 0.0 if option is None else option.rate
        paid_s = 0.0 if option is None or option.current else row["restart_s"]
        runs_s = max(0.0, round_s - paid_s)
        if name == "max-min":
            served = rate / self._unit[job] * runs_s
            return float(-(row["service_gpu_s"] + served) / self._weight(job))
        later = self._expected[job] if name == "makespan" else self._fair[job]
        finish_s = round_s + row["restart_s"] + max(0.0, self._work(job) - rate * runs_s) / later
        if option is not None:
            finish_s = min(finish_s, paid_s + self._work(job) / rate)
        if name == "makespan":
            return float(finish_s)
        batch = self._snapshot.workloads[row["workload"]].global_batch
        alone_s = max(round_s, row["iterations"] * batch / later)
        return float((max(0.0, self._snapshot.now_s - row["submit_s"]) + finish_s) / alone_s)

    def worth(self, choice: Choice) -> list[tuple[float, ...]]:
        """Return the value of each goal: (sum,), or the levels, worst first."""
        result: list[tuple[float, ...]] = []
        for goal in self.goals:
            if goal.levels:
                result.append(self._sorted_levels(goal.levels, choice))
            else:
                result.append((sum(self.value(goal.terms, j, o) for j, o in enumerate(choice)),))
        return result

    def _sorted_levels(self, name: str, choice: Choice) -> tuple[float, ...]:
        some = [j for j in range(len(choice)) if any(o is not None for o in self.options[j])]
        return tuple(sorted((self.level(name, j, choice[j]) for j in some), reverse=True))

    def fits(self, choice: Choice) -> bool:
        """Return whether every job has an allowed option, within the GPUs of each type."""
        used = [0] * len(self.capacity)
        for job, option in enumerate(choice):
            if option not in self.options[job]:
                return False
            if option is not None:
                used[option.gpu_type] += option.gpus
        return all(u <= c for u, c in zip(used, self.capacity, strict=True))

    # the best answers

    def best_by_enumeration(self, margin: float = 0.0) -> list[tuple[float, ...]]:
        """Return the value of each goal in a best answer, by trying every assignment.

        ``margin`` raises the value that goals with a tolerance must keep.
        """
        index = self._assignments()
        left = np.arange(len(index))
        for goal in self.goals:
            if goal.levels:
                left = self._least(goal.levels, index, left)
                continue
            total = self._table(partial(self.value, goal.terms), index[left]).sum(1)
            floor = _floor(goal, float(total.max()), margin)
            left = left[total >= floor - TIE_TOLERANCE * abs(floor)]
        choice = [self.options[j][k] for j, k in enumerate(index[left[0]].tolist())]
        return self.worth(choice)

    def _assignments(self) -> Ints:
        """Return every assignment that fits, as indices of options, int64[assignments, jobs]."""
        index = np.zeros((1, 0), dtype=np.int64)
        used = np.zeros((1, len(self.capacity)), dtype=np.int64)
        for options in self.options:
            takes = np.zeros((len(options), len(self.capacity)), dtype=np.int64)
            for k, option in enumerate(options):
                if option is not None:
                    takes[k, option.gpu_type] = option.gpus
            total = used[:, np.newaxis] + takes
            row, option_of = np.nonzero((total <= np.array(self.capacity)).all(axis=2))
            used = total[row, option_of]
            index = np.column_stack([index[row], option_of])
        return index

    def _least(self, name: str, index: Ints, left: Ints) -> Ints:
        some = [j for j in range(len(self.options)) if any(o is not None for o in self.options[j])]
        level = self._table(partial(self.level, name), index[left])[:, some]
        level = -np.sort(-level, axis=1)
        rows = np.arange(len(left))
        for place in range(len(some)):
            least = level[rows, place].min()
            rows = rows[level[rows, place] <= least + TIE_TOLERANCE * abs(least)]
        return np.asarray(left[rows])

    def _table(self, of: Callable[[int, OracleOption | None], float], index: Ints) -> Floats:
        """Return ``of(job, option)`` for each assignment, float64[assignments, jobs]."""
        columns = [np.array([of(j, o) for o in options]) for j, options in enumerate(self.options)]
        return np.stack([c[index[:, j]] for j, c in enumerate(columns)], axis=1)

    def best_by_dynamic_program(self, margin: float = 0.0) -> list[tuple[float, ...]]:
        """Return the value of each goal in a best answer, job by job over the GPUs used so far.

        For each number of used GPUs it keeps the best partial answer. This is correct because all
        goals keep their order when the same job is added to two partial answers: sums by addition,
        sorted levels by insertion. A sum with a tolerance before another sum needs more:
        ``_best_of_two``.
        """
        tolerant = next((k for k, g in enumerate(self.goals) if g.tolerance), None)
        if tolerant is None:
            best = max(self._by_used(self.goals).values())
            return [
                tuple(-x for x in part) if g.levels else part
                for g, part in zip(self.goals, best, strict=True)
            ]
        if len(self.goals) != 2 or any(g.levels for g in self.goals):
            raise ValueError("the oracle knows a tolerance only for the first of two sums")
        (top,) = max(self._by_used(self.goals[:1]).values())[0]
        floor = _floor(self.goals[0], top, margin)
        return [(top,), (self._best_of_two(floor),)]

    def _by_used(
        self, goals: Sequence[OracleGoal]
    ) -> dict[tuple[int, ...], tuple[tuple[float, ...], ...]]:
        """Return the best values for each number of used GPUs, as tuples. Larger is better."""
        nothing = tuple(() if goal.levels else (0.0,) for goal in goals)
        best: dict[tuple[int, ...], tuple[tuple[float, ...], ...]] = {
            (0,) * len(self.capacity): nothing
        }
        for job, options in enumerate(self.options):
            counts = any(o is not None for o in options)
            adds = [
                (
                    o,
                    [
                        self.level(g.levels, job, o) if g.levels else self.value(g.terms, job, o)
                        for g in goals
                    ],
                )
                for o in options
            ]
            then: dict[tuple[int, ...], tuple[tuple[float, ...], ...]] = {}
            for used, worth in best.items():
                for option, add in adds:
                    key = self._using(used, option)
                    if key is None:
                        continue
                    new = tuple(
                        (_inserted(w, -a) if counts else w) if g.levels else (w[0] + a,)
                        for g, w, a in zip(goals, worth, add, strict=True)
                    )
                    if key not in then or new > then[key]:
                        then[key] = new
            best = then
        return best

    def _best_of_two(self, floor: float) -> float:
        """Return the greatest second sum for which the first is at least ``floor``.

        For each number of used GPUs it keeps the pairs that no other pair beats in both, except
        those that are too low to reach the floor.
        """
        first, second = (goal.terms for goal in self.goals)
        most = [max(self.value(first, j, o) for o in opts) for j, opts in enumerate(self.options)]
        pairs: dict[tuple[int, ...], list[tuple[float, float]]] = {
            (0,) * len(self.capacity): [(0.0, 0.0)]
        }
        for job, options in enumerate(self.options):
            needed = floor - sum(most[job + 1 :]) - TIE_TOLERANCE * abs(floor)
            then: dict[tuple[int, ...], list[tuple[float, float]]] = {}
            for option in options:
                add = self.value(first, job, option), self.value(second, job, option)
                for used, result in pairs.items():
                    key = self._using(used, option)
                    if key is not None:
                        then.setdefault(key, []).extend(
                            (a + add[0], b + add[1]) for a, b in result if a + add[0] >= needed
                        )
            pairs = {key: _unbeaten(result) for key, result in then.items()}
        return max(b for result in pairs.values() for _, b in result)

    def _using(self, used: tuple[int, ...], option: OracleOption | None) -> tuple[int, ...] | None:
        if option is None:
            return used
        total = used[option.gpu_type] + option.gpus
        if total > self.capacity[option.gpu_type]:
            return None
        return (*used[: option.gpu_type], total, *used[option.gpu_type + 1 :])


def _rows(table: Table) -> list[dict[str, Any]]:
    return [table.row(index) for index in range(len(table))]


def _floor(goal: OracleGoal, best: float, margin: float) -> float:
    return best - goal.tolerance * abs(best) + (margin if goal.tolerance else 0.0)


def _inserted(worth: tuple[float, ...], item: float) -> tuple[float, ...]:
    at = bisect.bisect_left(worth, item)
    return (*worth[:at], item, *worth[at:])


def _unbeaten(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    top = -math.inf
    for pair in sorted(pairs, reverse=True):
        if pair[1] > top:
            result.append(pair)
            top = pair[1]
    return result
