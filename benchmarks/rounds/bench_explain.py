"""A test of explanations: each step that one states is tried, and the job must then do as it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.explained_rounds import draw_explained_round
from tessera.benchmarks.rounds.tried_steps import decide_without_limit, find_fault
from tessera.formulation.answer.explanations.changes import ChangeKind
from tessera.formulation.answer.explanations.records import Claim, Explanation
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.figures import Report
from tessera.simulator.sweeps.runner import ResultsFolder, Workers, run_tasks
from tessera.simulator.sweeps.tasks import Task
from tessera.solvers.rounds.explaining.changed import is_slower, rate_before
from tessera.solvers.rounds.explaining.explain import explain_job
from tessera.solvers.rounds.options import RoundOptions

ROUNDS_PER_TASK: Final = 20
"""The number of rounds that one process explains before it reports."""

JUDGED_ROUNDS: Final = 100
"""The number of rounds from which the share of explanations with a step is judged."""

LESS_WEIGHT: Final = 0.95
"""The share of the weight of a step that is tried, too: it should not be enough."""

DETERMINISTIC_GAP: Final = 1e-9
"""The gap of the rounds, so that each has one best answer, up to equal values."""


@register_case(
    "explain",
    smoke={"rounds": 10, "workers": 0},
    verified_share=("==", 1.0),
    stepped_share=(">=", 0.98),
    faults=("==", 0),
)
def check_explanations(
    rounds: Annotated[int, typer.Option(help="Number of random rounds.")] = 500,
    first: Annotated[int, typer.Option(help="Number of the first round, to repeat one.")] = 0,
    seed: int = 0,
    workers: Workers = None,
    results: ResultsFolder = None,
) -> Report:
    """Explain every job of random rounds that does not run or was changed, and try each step.

    A round has 4 to 9 jobs for few GPUs, with quotas, guarantees, deadlines, pins, bounds, avoided
    and drained nodes, failed and held jobs, and jobs without estimates. Policies take turns: all
    objectives, orders, limits, and published schedulers. Each step is applied to the round's
    snapshot by other code than the product's, and the round is decided again.

    ``verified_share`` is the share of the steps after which the job does what the step says, and
    other jobs lose what it says. ``stepped_share`` is the share of the explanations with such a
    step, among those that need one. ``tight_share`` is the share of the raised weights of which 95 %
    are not enough. The table counts by reason, and lists each step that is not true.
    """
    tasks = [
        Task(
            name=f"rounds {begin} to {end - 1}",
            function="tessera.benchmarks.rounds.bench_explain:explain_rounds",
            options={"first": begin, "count": end - begin, "seed": seed},
        )
        for begin, end in _spans(first, first + rounds)
    ]
    parts = list(run_tasks(tasks, folder=results, workers=workers).values())
    tally = sum((Counter(part["tally"]) for part in parts), Counter[str]())
    faulty = [fault for part in parts for fault in part["faulty"]]
    return Report(
        seed=seed,
        figures={
            "rounds": rounds,
            "explanations": tally["explanations"],
            "steps": tally["steps"],
            "verified_share": _ratio(tally["verified"], tally["steps"]),
            "stepped_share": _ratio(tally["stepped"], tally["needs step"]),
            "tight_share": _ratio(tally["tight"], tally["weights"]),
            "rounds_tried": tally["rounds tried"],
            "faults": len(faulty),
        },
        table=[*_by_reason(tally), *faulty],
        waived=frozenset() if rounds >= JUDGED_ROUNDS else frozenset({"stepped_share"}),
    )


def explain_rounds(*, first: int, count: int, seed: int) -> dict[str, Any]:
    """Explain and judge the rounds ``first`` to ``first + count - 1``."""
    tally, faulty = Counter[str](), list[dict[str, Any]]()
    for number in range(first, first + count):
        snapshot, options = draw_explained_round(np.random.default_rng([seed, number]), number)
        _judge_round(snapshot, replace(options, gap=DETERMINISTIC_GAP), number, tally, faulty)
    return {"tally": dict(tally), "faulty": faulty}


def _judge_round(
    snapshot: Snapshot,
    options: RoundOptions,
    number: int,
    tally: Counter[str],
    faulty: list[dict[str, Any]],
) -> None:
    outcome = decide_without_limit(snapshot, options)
    if outcome.violations:
        faulty.append({"round": number, "fault": f"refused: {outcome.violations[0].detail}"})
        return
    for decision in outcome.decisions:
        explanation = explain_job(snapshot, options, decision.job, outcome, decide_without_limit)
        code = explanation.reason.code
        tally.update({"explanations": 1, f"of {code}": 1})
        tally["rounds tried"] += explanation.rounds_tried
        tally[f"stepped {code}"] += bool(explanation.steps)
        loses = is_slower(snapshot, outcome, decision) and code is not ReasonCode.GAINED
        if decision.gang is None or loses:
            tally.update({"needs step": 1, "stepped": bool(explanation.steps)})
        name, rate = snapshot.jobs.name[decision.job], rate_before(snapshot, outcome, decision.job)
        for step in explanation.steps:
            fault = find_fault(snapshot, options, name, decision, rate, step)
            tally.update({"steps": 1, f"steps {code}": 1, "verified": not fault})
            if fault:
                faulty.append(
                    {
                        "round": number,
                        "job": name,
                        "reason": code,
                        "step": str(step.message),
                        "fault": fault,
                    }
                )
        _judge_weight(snapshot, options, name, explanation, tally)


def _judge_weight(
    snapshot: Snapshot,
    options: RoundOptions,
    job: str,
    explanation: Explanation,
    tally: Counter[str],
) -> None:
    """Count whether less of the raise of a weight would not have been enough."""
    for step in explanation.steps:
        change = step.changes[0]
        is_raise = change.kind is ChangeKind.WEIGHT and change.before > 0
        if is_raise and step.claim is Claim.RUNS:
            less = max(change.before, LESS_WEIGHT * change.amount)
            lighter = replace(step, changes=(replace(change, amount=less),), effects=())
            before = decide_without_limit(snapshot, options).decisions[
                snapshot.jobs.name.index(job)
            ]
            fault = find_fault(snapshot, options, job, before, 0.0, lighter)
            tally.update({"weights": 1, "tight": bool(fault)})


def _by_reason(tally: Counter[str]) -> list[dict[str, Any]]:
    return [
        {
            "reason": code.value,
            "explanations": tally[f"of {code}"],
            "with_step": tally[f"stepped {code}"],
            "steps": tally[f"steps {code}"],
        }
        for code in ReasonCode
        if tally[f"of {code}"]
    ]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _spans(begin: int, end: int) -> list[tuple[int, int]]:
    return [(k, min(end, k + ROUNDS_PER_TASK)) for k in range(begin, end, ROUNDS_PER_TASK)]
