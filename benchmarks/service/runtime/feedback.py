"""Estimates before and after jobs ran by stated plans, and the plan that rounds then choose."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.service.runtime.lab import RuntimeLab, job_spec, wait_for
from tessera.benchmarks.service.runtime.programs import Program, stated_plans
from tessera.benchmarks.service.runtime.summary import choice_quality, percentile_50
from tessera.formulation.execution_plan import ExecutionPlan, read_execution_plan
from tessera.v1 import estimates_pb2, jobs_pb2

GPUS: Final = 2
INSPECT_S: Final = 0.3
"""Seconds between the agent's inspections here, so that a measurement takes seconds and not minutes."""

NODES: Final = (("feedback", GPUS),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that a round gave to a job which states none."""

    digest: str
    plan: str  # in words
    iter_time_s: float  # measured on the job itself
    best_again_s: float
    """The time of the best stated plan, measured in turn with it. If a stated plan was chosen, its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Times of an iteration in seconds, by the digest of the plan."""

    plans: Mapping[str, str]  # in words
    before: Mapping[str, float]
    taught: Mapping[str, float]  # measured by the first run of each plan
    after: Mapping[str, float]
    held_out: Mapping[str, float]  # measured by the second run
    choice: Choice

    @property
    def overall(self) -> dict[str, float]:
        """Return the time of each stated plan, the mean of its two runs."""
        return {d: statistics.fmean((self.taught[d], self.held_out[d])) for d in self.plans}

    @property
    def choice_after(self) -> float:
        """Return the best measured time over that of the chosen plan.

        A plan that nobody stated has run only once, later than the others. It is compared with the
        best stated plan as measured in turn with it.
        """
        times = self.overall
        if self.choice.digest in times:
            return choice_quality(times, times[self.choice.digest])
        return self.choice.best_again_s / self.choice.iter_time_s


def measure_feedback(
    lab: RuntimeLab, program: Program, python: str, plans: int, repeats: int
) -> Feedback:
    """Run each of the first ``plans`` stated plans twice, and then a job that states none."""
    ordered = stated_plans(program, GPUS, plans)
    name = f"feedback-{program.runtime}"
    lab.describe(program.workload)
    before = _estimate(lab, program, name, ordered)
    with lab.run_agent(name, NODES, python=python, options=(f"--inspect-s={INSPECT_S}",)):
        taught = {
            ordered[k].digest: _run(lab, program, f"{name}-first-{k}", ordered[k]).iter_time_s
            for k in track_steps(plans, f"{name}: first runs")
        }
        after = _measured_estimates(lab, program)
        held_out = {
            ordered[k].digest: _run(lab, program, f"{name}-second-{k}", ordered[k]).iter_time_s
            for k in track_steps(plans, f"{name}: second runs")
        }
        best = min(taught, key=lambda digest: taught[digest] + held_out[digest])
        stated = {plan.digest: plan for plan in ordered}
        choice = _choose(lab, program, name, stated, best, repeats)
    return Feedback(
        plans={plan.digest: str(plan) for plan in ordered},
        before=before,
        taught=taught,
        after=after,
        held_out=held_out,
        choice=choice,
    )


def _choose(
    lab: RuntimeLab,
    program: Program,
    name: str,
    stated: Mapping[str, ExecutionPlan],
    best: str,
    repeats: int,
) -> Choice:
    """Return the plan that a round gives to a job without a stated plan.

    If nobody has stated it, it and the ``best`` stated one run ``repeats`` times each, in turn.
    """
    first = _run(lab, program, f"{name}-choice")
    digest = first.cell.plan
    plan = read_execution_plan("execution_plan", first.execution_plan)
    times, best_times = [first.iter_time_s], list[float]()
    if digest not in stated:
        for k in track_steps(repeats, f"{name}: choice"):
            if k:
                times.append(_run(lab, program, f"{name}-choice-{k}", plan).iter_time_s)
            best_times.append(_run(lab, program, f"{name}-best-{k}", stated[best]).iter_time_s)
    return Choice(
        digest=digest,
        plan=str(plan),
        iter_time_s=percentile_50(times),
        best_again_s=percentile_50(best_times or times),
    )


def _estimate(
    lab: RuntimeLab, program: Program, name: str, plans: Sequence[ExecutionPlan]
) -> dict[str, float]:
    """Return the service's estimates of plans that never ran, by digest.

    Their jobs wait, because the nodes have no agent yet, and are cancelled.
    """
    lab.add_nodes(NODES)
    jobs = [f"{name}-estimate-{k}" for k in range(len(plans))]
    specs = [job_spec(job, program, GPUS, plan) for job, plan in zip(jobs, plans, strict=True)]
    lab.submit(specs)
    wanted = {plan.digest for plan in plans}

    def estimates() -> dict[str, float]:
        cells = {c.cell.plan: c.iter_time_s for c in lab.cells(program.workload)}
        return {d: cells[d] for d in wanted} if wanted <= cells.keys() else {}

    estimated = wait_for(estimates, f"estimates of {len(plans)} plans")
    for job in jobs:
        lab.end(job)
    return estimated


def _run(
    lab: RuntimeLab, program: Program, job: str, plan: ExecutionPlan | None = None
) -> jobs_pb2.Allocation:
    """Run a job until it is measured and the service has learned it. Return what it ran on."""
    lab.submit([job_spec(job, program, GPUS, plan)])

    def measured() -> jobs_pb2.Allocation | None:
        held = lab.job(job).allocation
        return held if held.iter_time_source == estimates_pb2.MEASURED else None

    held = wait_for(measured, f"a measured time of {job}")
    digest = held.cell.plan
    wait_for(lambda: digest in _measured_estimates(lab, program), f"the estimate of {job}")
    lab.end(job)
    return held


def _measured_estimates(lab: RuntimeLab, program: Program) -> dict[str, float]:
    return {
        c.cell.plan: c.iter_time_s
        for c in lab.cells(program.workload)
        if c.source == estimates_pb2.MEASURED
    }
