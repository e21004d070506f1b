"""The result of a round as plain objects: what each job got, and what is proven of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.explanations.records import Explanation
from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.base.errors import InvalidInput, NotFound
from tessera.formulation.job.reasons import Reason
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.explaining.explain import explain_job
from tessera.solvers.rounds.explaining.trials import PlanRound
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The decision of a round on a job.

    If the job waits, it has no GPUs, and ``reason`` says why. ``nodes`` maps the names of nodes to
    the indices of the GPUs on them. ``restart_price`` is in units of the objective.
    """

    name: str
    kind: DecisionKind
    gpu_type: str = ""
    gpus: int = 0
    pipeline_degree: int = 0
    plan: str = ""
    nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    samples_per_s: float = 0.0
    restart_price: float = 0.0
    deadline_promised: bool = False
    reason: Reason | None = None

    @property
    def runs(self) -> bool:
        """Return whether the job has GPUs after the round."""
        return self.gpus > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundResult:
    """The result of a round. Numbers are in ``unit``, that of the objective's last stage."""

    snapshot: Snapshot
    options: RoundOptions
    outcome: RoundOutcome
    """The round as the solvers' room returns it, for whatever has no plain form here."""
    plan_within: Callable[[float], PlanRound]
    """Return a function that decides further rounds, within these seconds."""
    jobs: dict[str, JobResult] = field(init=False)
    """The results by job, in the order in which jobs were added."""

    def __post_init__(self) -> None:
        """Make the results of the jobs."""
        results = (_job_result(self.snapshot, one) for one in self.outcome.decisions)
        object.__setattr__(self, "jobs", {result.name: result for result in results})

    def __getitem__(self, job: str) -> JobResult:
        """Return the result of a job. Raises NotFound."""
        if job not in self.jobs:
            raise NotFound(f"job {job}")
        return self.jobs[job]

    def __iter__(self) -> Iterator[JobResult]:
        """Yield the results of all jobs."""
        return iter(self.jobs.values())

    @property
    def objective(self) -> float:
        """Return the value that was reached."""
        return self.outcome.goals[-1].objective

    @property
    def bound(self) -> float:
        """Return the value that no answer can exceed, or NaN if nothing was proven."""
        return math.nan if self.outcome.bound_is_trivial else self.outcome.goals[-1].bound

    @property
    def gap(self) -> float:
        """Return the distance from the bound, relative to it; NaN if nothing was proven."""
        return math.nan if self.outcome.bound_is_trivial else self.outcome.goals[-1].gap

    @property
    def unit(self) -> str:
        """Return the unit of the objective, e.g. ``effective GPUs``."""
        return self.outcome.goals[-1].unit

    @property
    def goals(self) -> tuple[GoalResult, ...]:
        """Return the result of each stage of the objective, in order."""
        return self.outcome.goals

    @property
    def status(self) -> SolveStatus:
        """Return whether the answer is proven best."""
        return self.outcome.solution.status

    @property
    def prices(self) -> dict[str, float]:
        """Return what one more unit of each row would be worth, e.g. of ``gpus/h100``.

        It is empty if no prices are known.
        """
        return self.outcome.prices

    def explain(self, job: str, *, time_limit_s: float = 10.0) -> Explanation:
        """Return why the job runs or waits, who displaced it, and steps that were tried.

        Each step was tried by another round. ``is_complete`` is false if time ended them.

        Raises:
            NotFound: there is no such job. InvalidInput: the time limit is not above 0.
        """
        if not time_limit_s > 0:
            raise InvalidInput("time_limit_s", f"must be above 0, not {time_limit_s!r}")
        index = list(self.jobs).index(self[job].name)
        return explain_job(
            self.snapshot, self.options, index, self.outcome, self.plan_within(time_limit_s)
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each job, e.g. for ``pandas.DataFrame`` or ``csv.DictWriter``."""
        return [
            asdict(result)
            | {
                "kind": str(result.kind),
                "nodes": ",".join(result.nodes),
                "reason": str(result.reason.message) if result.reason else "",
            }
            for result in self
        ]


def _job_result(snapshot: Snapshot, decision: Decision) -> JobResult:
    name = snapshot.jobs.name[decision.job]
    common: dict[str, Any] = {
        "name": name,
        "kind": decision.kind,
        "deadline_promised": decision.admitted,
        "reason": decision.reason,
    }
    if decision.gang is None:
        return JobResult(**common)
    cell = snapshot.cell(decision.cell)
    return JobResult(
        **common,
        gpu_type=cell.gpu_type,
        gpus=cell.gpus,
        pipeline_degree=cell.pipeline_degree,
        plan=cell.plan,
        nodes={snapshot.nodes.name[node]: gpus for node, gpus in decision.gang.members},
        samples_per_s=decision.rate,
        restart_price=decision.restart_price,
    )
