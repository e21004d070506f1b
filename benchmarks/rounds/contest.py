"""A contest entry: one solver on one kind of round, in a separate process that is measured.

``python -m tessera.benchmarks.rounds.contest`` reads an entry from standard input and prints a line
of JSON for each event. ``run_entry`` starts it, reads the lines, and kills it at twice its time limit.
"""

from __future__ import annotations

import json
import math
import os
import queue
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from tessera.benchmarks.rounds.entries import ContestEntry, draw_round, state_drawn
from tessera.benchmarks.rounds.families import NAMED_FAMILIES
from tessera.benchmarks.rounds.instances import churn_round, make_instance
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.round.goals import GoalResult, Linear
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import Statement, state_round
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.provenance import ROOT
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import objective_of, trivial_bound
from tessera.solvers.exact.baselines.stock import StockCpSat
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.goals import SolvedGoals, build_surrogate, solve_goals
from tessera.solvers.registry import make_solver
from tessera.solvers.warm import run_every_loop

SETUP_S: Final = 600.0
"""Seconds within which a process must have imported, warmed up and drawn its first round."""
WARM_REPEATS: Final = 3
NAMED_WARM_UP_JOBS: Final = 40
"""Jobs of the round with which a process warms up for a named family."""
SOLVER_ALIASES: Final = {"cp-sat": "stock-cp-sat"}
"""Solvers that have another name in the registry, whose "cp-sat" plans its work and uses prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRound:
    """The outcome of one round.

    ``objective`` and ``bound`` are those of the first goal, as shown; ``sign`` is -1 if less is
    better. ``answers`` has (seconds since the solve began, objective) of the answers that were
    reported early. ``cpu_s`` has the CPU seconds of all threads and child processes. ``proved_by``
    names what proved the bound, and ``cp_sat`` is whether CP-SAT ran.
    """

    status: str
    objective: float
    bound: float
    gap: float
    sign: int
    last_gap: float
    build_s: float
    solve_s: float
    cpu_s: float
    jobs: int
    columns: int
    verified: bool
    proved_by: str
    cp_sat: bool
    answers: tuple[tuple[float, float], ...] = ()

    @property
    def total_s(self) -> float:
        """Return the seconds from the snapshot to the answer."""
        return self.build_s + self.solve_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """The outcome of a process. ``ended`` is "done", "killed" or "failed"."""

    rounds: tuple[SolvedRound, ...]
    ended: str
    peak_mib: float = math.nan
    first_s: float = math.nan  # the round before the churn
    cold_s: float = math.nan
    warm_s: float = math.nan
    warm_gap: float = math.nan  # the worst one
    warm_verified: bool = False
    early: tuple[tuple[float, float], ...] = ()
    """The answers that were reported before the process was killed."""


Tell = Callable[[dict[str, Any]], None]


def run_entry(entry: ContestEntry) -> ProcessOutcome:
    """Run ``entry`` in a separate process, and kill it at twice the time limit of a round."""
    with subprocess.Popen(
        [sys.executable, "-m", "tessera.benchmarks.rounds.contest"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both are pipes")
        json.dump(asdict(entry), process.stdin)
        process.stdin.close()
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        outcome = _follow(entry, lines)
        if process.poll() is None and outcome.ended != "done":
            os.killpg(process.pid, signal.SIGKILL)  # its own session: CBC is a child process of it
        process.wait()
        reader.join()
        return outcome


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Pass on the reports of a process. HiGHS prints other lines to the same stream."""
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def _follow(entry: ContestEntry, lines: queue.Queue[str]) -> ProcessOutcome:
    """Return the outcome that the lines report. If the next line is late, it is "killed"."""
    rounds: list[SolvedRound] = []
    answers: list[tuple[float, float]] = []
    patience_s = SETUP_S
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return ProcessOutcome(rounds=tuple(rounds), ended="killed", early=tuple(answers))
        if not line:
            return ProcessOutcome(rounds=tuple(rounds), ended="failed", early=tuple(answers))
        said = json.loads(line)
        if "done" in said:
            return ProcessOutcome(rounds=tuple(rounds), ended="done", **said["done"])
        if "answer" in said:
            answers.append((said["answer"][0], said["answer"][1]))
        elif "started" in said:
            answers.clear()
            deadline_s = time.monotonic() + 2 * entry.time_limit_s
        elif "round" in said:
            rounds.append(SolvedRound(answers=tuple(answers), **said["round"]))
            answers.clear()
            deadline_s = time.monotonic() + SETUP_S


def take_part(entry: ContestEntry, tell: Tell) -> None:
    """Solve the rounds of ``entry`` in this process, and report each event with ``tell``."""
    _warm_up(entry)
    told: dict[str, Any] = {}
    if entry.churn > 0:
        told = _cold_and_warm(entry)
    else:
        for k in range(entry.repeats):
            seeded = replace(entry, seed=entry.seed + k)
            result = _round(seeded, tell)
            tell({"round": result})
    tell({"done": {"peak_mib": peak_mib(), **told}})


def _warm_up(entry: ContestEntry) -> None:
    """Solve a tiny round, so that imports and compilation are not part of any solver's time.

    Rounds of named families use more of the solver, so that theirs is small rather than tiny.
    """
    run_every_loop()  # as the service does before its first round
    small = replace(entry, jobs=6, gpus=max(8, entry.types), time_limit_s=10.0)
    if entry.family in NAMED_FAMILIES:
        small = replace(entry, jobs=NAMED_WARM_UP_JOBS, time_limit_s=10.0)
    _round(small, lambda _line: None)


def _round(entry: ContestEntry, tell: Tell) -> dict[str, Any]:
    """Draw, state, solve and check one round, and return the fields of a ``SolvedRound``."""
    drawn = draw_round(entry)
    tell({"started": True})
    started_s = time.perf_counter()
    statement = state_drawn(drawn, entry.objective)
    build_s = time.perf_counter() - started_s
    goal = statement.goals[0]
    scale = goal.scale if isinstance(goal, Linear) else 1.0
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()

    def on_answer(objective: float) -> None:
        tell({"answer": [time.perf_counter() - began_s, objective / scale]})

    alone = len(statement.goals) == 1
    result = solve_with(
        statement, _solver(entry.solver, on_answer if alone else None), _budget(entry)
    )
    solve_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    first, solution = result.results[0], result.solution
    answered = solution.has_answer
    return {
        "status": str(solution.status),
        "objective": first.objective if answered else math.nan,
        "bound": first.bound,
        "gap": first.gap if answered else math.inf,
        "sign": 1 if isinstance(goal, Linear) or goal.sign < 0 else -1,
        "last_gap": result.results[-1].gap,
        "build_s": build_s,
        "solve_s": solve_s,
        "cpu_s": cpu_s,
        "jobs": len(statement.problem.jobs),
        "columns": len(statement.problem.cell),
        "verified": answered and not find_violations(statement.problem, solution),
        "proved_by": solution.proved_by,
        "cp_sat": used_cp_sat(solution),
    }


def used_cp_sat(solution: Solution) -> bool:
    """Return whether CP-SAT ran: it did work, has a recorded answer, or proved the bound."""
    stages = [stage for stage, amount in solution.work if amount > 0]
    stages += [answer.stage for answer in solution.recorded]
    return solution.proved_by == CpSat.name or any(
        stage.rpartition(":")[2] == CpSat.name for stage in stages
    )


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _solver(name: str, on_answer: Callable[[float], None] | None) -> Solver:
    name = SOLVER_ALIASES.get(name, name)
    if name == StockCpSat.name and on_answer is not None:
        return StockCpSat(on_answer)
    return make_solver(name)


def _budget(entry: ContestEntry) -> Budget:
    end_s = time.perf_counter() + entry.time_limit_s
    return Budget(
        remaining_s=lambda: end_s - time.perf_counter(),
        seed=entry.seed,
        gap=entry.gap,
        workers=entry.workers,
    )


def solve_with(statement: Statement, by: Solver, budget: Budget) -> SolvedGoals:
    """Return the solver's answer.

    For lexicographic goals it starts from greedy's, as in a real round.
    """
    goal = statement.goals[0]
    if len(statement.goals) == 1 and isinstance(goal, Linear):
        found = by.solve(statement.problem, budget)
        result = GoalResult(
            name=goal.name,
            unit=goal.unit,
            objective=found.objective / goal.scale,
            bound=found.bound / goal.scale,
            gap=found.gap,
        )
        return SolvedGoals(solution=found, results=(result,))
    greedy = Greedy().solve(build_surrogate(statement), budget)
    return solve_goals(statement, by, budget, greedy)


def _cold_and_warm(entry: ContestEntry) -> dict[str, Any]:
    """Solve a round, replace some jobs, and solve the next round cold and warm.

    The hint is the last answer for the jobs that are still there, with its shadow prices. Times
    are medians of a few runs. The running jobs are part of the round, so that a cold solver knows
    them too.
    """
    snapshot = make_instance(
        entry.jobs, entry.gpus, entry.types, entry.seed, family=entry.family, running=entry.running
    )
    policy, by = (
        Policy(objective=entry.objective, promise_starts=False),
        _solver(entry.solver, None),
    )
    problem = state_round(snapshot, policy).problem
    began_s = time.perf_counter()
    first = by.solve(problem, _budget(entry))
    first_s = time.perf_counter() - began_s
    problem, hint = churn_and_hint(
        snapshot, problem, first, entry.churn, entry.seed, entry.family, policy
    )
    took: dict[str, list[float]] = {"cold": [], "warm": []}
    verified, gap = True, 0.0
    for _ in range(WARM_REPEATS):
        for name, known in (("cold", None), ("warm", hint)):
            began_s = time.perf_counter()
            result = by.solve(problem, _budget(entry), known)
            took[name].append(time.perf_counter() - began_s)
            verified = verified and result.has_answer and not find_violations(problem, result)
            gap = max(gap, result.gap if known is hint else 0.0)
    return {
        "first_s": first_s,
        "cold_s": statistics.median(took["cold"]),
        "warm_s": statistics.median(took["warm"]),
        "warm_gap": gap,
        "warm_verified": verified,
    }


def churn_and_hint(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    churn: float,
    seed: int,
    family: str,
    policy: Policy,
) -> tuple[Problem, Solution]:
    """Return the round after ``solution`` of ``problem``, and what it knows of that solution."""
    after = churn_round(snapshot, problem, solution.choice, churn, seed, family)
    later = state_round(after, policy).problem
    hint = Solution(
        status=SolveStatus.FEASIBLE,
        choice=later.current,
        solver=solution.solver,
        objective=objective_of(later, later.current),
        bound=trivial_bound(later),
        prices=solution.prices,
    )
    return later, hint


def peak_mib() -> float:
    """Return the peak memory of this process or of a child process, whichever is larger, in MiB.

    Linux includes the parent's memory in ``ru_maxrss``, so that the process's own peak is read from
    /proc if that exists.
    """
    status = Path("/proc/self/status")
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if status.exists():
        rows = (line.split() for line in status.read_text().splitlines())
        mine = next((int(row[1]) for row in rows if row and row[0] == "VmHWM:"), mine)
    return max(mine, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    take_part(ContestEntry(**json.load(sys.stdin)), _print)
