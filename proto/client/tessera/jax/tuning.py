"""Tuning at launch: execution plans are measured before training begins, and the fastest is used.

Each plan trains a state of its own that is thrown away, so the state of the training never changes,
and no plan needs the memory of two. It is off unless the job asks for it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import jax

from tessera import progress
from tessera.jax.engines import Engine
from tessera.jax.errors import TrainingError
from tessera.jax.hosts import find_largest_of_hosts, is_first_host, take_from_first_host
from tessera.jax.models import Values
from tessera.jax.plans import read_plan
from tessera.plans import ExecutionPlan

WARM_UP_ITERATIONS: Final = 2
"""Iterations of a plan that are not measured: programs are compiled, and memory is first used."""

MEASURED_ITERATIONS: Final = 5
"""Iterations of a plan whose median is its time."""

MAX_ENDED_STARTS: Final = 2
"""Starts of a job that a plan may end while it is tried. Then it is not tried any more."""

MAX_PROBLEM_CHARS: Final = 200

PlainPlan: TypeAlias = Mapping[str, Any]
"""A plan as JSON's plain values, as ``progress.plan`` returns it."""

EngineMaker: TypeAlias = Callable[[ExecutionPlan], Engine]

_FAILURES: Final = (TrainingError, RuntimeError, ValueError, TypeError, MemoryError)
"""Errors of a plan that cannot be compiled, has too little memory, or does not fit the model. Those
of XLA are RuntimeErrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that was tried, or was left out because it ended earlier starts.

    ``iteration_s`` is infinite if it failed or was left out, and ``problem`` says why.
    """

    plan: PlainPlan
    iteration_s: float
    problem: str = ""
    is_left_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The trials of a start, that of the planned plan first. ``plans`` is how many there were."""

    trials: tuple[Trial, ...]
    plans: int
    spent_s: float

    @property
    def best(self) -> Trial | None:
        """Return the fastest trial, or None if all failed."""
        best = min(self.trials, key=lambda trial: trial.iteration_s, default=None)
        return best if best is not None and math.isfinite(best.iteration_s) else None

    def __str__(self) -> str:
        """Return a sentence about what was tried."""
        failed = [trial for trial in self.trials if trial.problem]
        text = f"tuning tried {len(self.trials)} of {self.plans} plans in {self.spent_s:.1f} s"
        if self.best is not None:
            text += f"; the best takes {self.best.iteration_s:.4g} s an iteration"
        if self.trials:
            text += f", the planned one {self.trials[0].iteration_s:.4g} s"
        if failed:
            text += f"; {len(failed)} failed, e.g. {failed[0].problem}"
        return text


def tune(
    make_engine: EngineMaker,
    load_batch: Callable[[], tuple[Values, Values]],
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> PlainPlan | None:
    """Return the plan to train by: the fastest that this start could try, or that of Tessera.

    Nothing is tried unless the job asks for it. The result is None if Tessera has chosen no plan.
    ``load_batch`` returns the inputs and targets of a global batch, NumPy arrays. Call it before the
    training's own state is made, on all hosts. The leader decides for all of them. What was tried is
    written to the standard error, and the winner is reported.

    A plan that ended two starts of the job while it was tried, e.g. because it hung, is left out.
    A request to stop ends the tuning after the present plan.
    """
    planned, asked = progress.plan(), take_from_first_host(progress.tuning())
    if planned is None or asked is None:
        return planned
    progress.begin_tuning()
    inputs, targets = load_batch()
    tuning = try_plans(
        make_engine,
        planned,
        asked["plans"],
        asked["budget_s"],
        inputs,
        targets,
        seed=seed,
        clock=clock,
        notes=progress.job_dir() / "tuning-trials.json",
    )
    if progress.is_first_rank():
        sys.stderr.write(f"{tuning}\n")
    best = tuning.best
    if best is None:
        progress.end_tuning()
        return planned
    first = tuning.trials[0]
    planned_s = None if first.is_left_out else first.iteration_s
    progress.report_plan(dict(best.plan), best.iteration_s, planned_s)
    return best.plan


def try_plans(
    make_engine: EngineMaker,
    planned: PlainPlan,
    plans: Sequence[PlainPlan],
    budget_s: float,
    inputs: Values,
    targets: Values,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    notes: Path | None = None,
) -> Tuning:
    """Try ``planned``, then the others in their order, for as long as the budget lasts.

    The budget is looked at before each plan but the first, and compilation counts. A plan that fails
    is left behind. ``notes`` is a file in which the leader notes the plan that is under trial, so
    that later starts know what this one did not survive.
    """
    candidates = {_text(plain): plain for plain in (planned, *plans)}
    trials: list[Trial] = []
    began_s, ended = clock(), take_from_first_host(_read_notes(notes))
    for text, plain in candidates.items():
        is_over = progress.stop_requested() or clock() - began_s >= budget_s
        if trials and take_from_first_host(is_over):
            break
        if ended.get(text, 0) >= MAX_ENDED_STARTS:
            problem = "it ended earlier starts of the job"
            trials.append(
                Trial(plan=plain, iteration_s=math.inf, problem=problem, is_left_out=True)
            )
            continue
        _write_notes(notes, {**ended, text: ended.get(text, 0) + 1})
        trials.append(_try_plan(make_engine, plain, inputs, targets, seed, clock))
        _write_notes(notes, ended)
        gc.collect()  # the arrays of a failed plan may be in cycles
    return Tuning(trials=tuple(trials), plans=len(candidates), spent_s=clock() - began_s)


def measure_plan(
    engine: Engine,
    inputs: Values,
    targets: Values,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    iterations: int = MEASURED_ITERATIONS,
) -> list[float]:
    """Return the seconds of iterations of an engine on a state that is thrown away."""
    state, times = engine.initial_state(seed), []
    for iteration in range(WARM_UP_ITERATIONS + iterations):
        began_s = clock()
        state, loss = engine.run_iteration(state, inputs, targets, iteration)
        jax.block_until_ready((state, loss))
        times.append(clock() - began_s)
    return times[WARM_UP_ITERATIONS:]


def _try_plan(
    make_engine: EngineMaker,
    plain: PlainPlan,
    inputs: Values,
    targets: Values,
    seed: int,
    clock: Callable[[], float],
) -> Trial:
    seconds, problem = math.inf, ""
    try:
        engine = make_engine(read_plan(plain))
        seconds = median(measure_plan(engine, inputs, targets, seed, clock))
    except _FAILURES as error:
        problem = " ".join(str(error).split())[:MAX_PROBLEM_CHARS] or type(error).__name__
    worst = find_largest_of_hosts(seconds)
    if math.isinf(worst) and not problem:
        problem = "it failed on another host"
    return Trial(plan=plain, iteration_s=worst, problem=problem)


def _text(plain: PlainPlan) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _read_notes(path: Path | None) -> dict[str, int]:
    """Return how many starts of the job ended while each plan was under trial."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return {}  # it is not there yet, or damaged
    counts = value.items() if isinstance(value, dict) else ()
    return {text: count for text, count in counts if isinstance(count, int)}


def _write_notes(path: Path | None, ended: Mapping[str, int]) -> None:
    if path is None or not is_first_host():
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(dict(ended)), encoding="utf-8")
    temporary.replace(path)
