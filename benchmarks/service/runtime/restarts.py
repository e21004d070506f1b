"""The parts of a reconfiguration: as keepers measure them, and as a clock outside does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.service.runtime.lab import (
    LOOK_S,
    ProgramAgent,
    RuntimeLab,
    job_spec,
    seconds_of,
    wait_for,
)
from tessera.benchmarks.service.runtime.programs import Program
from tessera.benchmarks.service.runtime.summary import percentile_50, percentile_95
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.simulator.figures import Figure
from tessera.v1 import jobs_pb2, launch_pb2

GPUS: Final = 2
INSPECT_S: Final = 0.6
PARTS: Final = ("checkpoint_s", "stop_s", "launch_s", "first_iteration_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """A move of a job to another node. Times are seconds."""

    parts: launch_pb2.RestartTimes  # as the keepers measured and the server stored them
    outside_s: float  # from the commit of the round until the output of the first iteration

    @property
    def reported_s(self) -> float:
        """Return the sum of the parts. The checkpoint is a part of the stop."""
        return self.parts.stop_s + self.parts.launch_s + self.parts.first_iteration_s


def measure_restarts(
    lab: RuntimeLab,
    program: Program,
    python: str,
    moves: int,
    plan: ExecutionPlan | None = None,
    arguments: Sequence[str] = (),
) -> list[Reconfiguration]:
    """Drain the node of a job ``moves`` times, so that rounds move it from its checkpoint."""
    name = f"move-{program.runtime}"
    nodes = [(f"{name}-{k}", GPUS) for k in range(2)]
    with lab.run_agent(name, nodes, python=python, options=(f"--inspect-s={INSPECT_S}",)) as agent:
        lab.submit([job_spec(name, program, GPUS, plan, arguments)])
        wait_for(lambda: agent.first_iteration_s(name, 1), f"the first iteration of {name}")
        return [_move(lab, agent, name, move + 2) for move in track_steps(moves, f"{name}s")]


def _move(lab: RuntimeLab, agent: ProgramAgent, name: str, generation: int) -> Reconfiguration:
    """Let a round move the job, which makes it ``generation``, and return how long that took."""
    before = lab.job(name)
    (share,) = before.allocation.shares
    with lab.drained(share.node):
        first_s = wait_for(
            lambda: agent.first_iteration_s(name, generation),
            f"the first iteration of start {generation} of {name}",
            every_s=LOOK_S,
        )

        def arrived() -> jobs_pb2.Job | None:
            job, last = lab.job(name), before.training.restart_times
            times = job.training.restart_times
            is_new = times != last and times.stop_s > 0 and job.state == jobs_pb2.RUNNING
            return job if is_new else None

        job = wait_for(arrived, f"the reported times of start {generation} of {name}")
    if job.generation != generation:
        raise RuntimeError(f"{name} has start {job.generation}, but only one node was drained")
    (*_, moved) = (event for event in lab.events(name) if event.event == "move")
    outside_s = first_s - seconds_of(moved.time)
    return Reconfiguration(parts=job.training.restart_times, outside_s=outside_s)


def restart_figures(prefix: str, found: Sequence[Reconfiguration]) -> dict[str, Figure]:
    """Return medians and 95th percentiles of the parts, and how they compare with the outside."""
    figures: dict[str, Figure] = {f"{prefix}_moves": len(found)}
    for part in PARTS:
        values = [getattr(move.parts, part) for move in found]
        stem = f"{prefix}_{part.removesuffix('_s')}"
        figures |= {f"{stem}_p50_s": percentile_50(values), f"{stem}_p95_s": percentile_95(values)}
    reported, outside = [m.reported_s for m in found], [m.outside_s for m in found]
    missed = [m.outside_s - m.reported_s for m in found]
    return figures | {
        f"{prefix}_reported_p50_s": percentile_50(reported),
        f"{prefix}_reported_p95_s": percentile_95(reported),
        f"{prefix}_outside_p50_s": percentile_50(outside),
        f"{prefix}_outside_p95_s": percentile_95(outside),
        f"{prefix}_unreported_p50_s": percentile_50(missed),
        f"{prefix}_reported_share": percentile_50([m.reported_s / m.outside_s for m in found]),
    }
