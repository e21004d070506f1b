"""Searches of tuning spaces in processes of their own, and the speeds of the plans they find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from tessera.benchmarks.service.reconfigure.runs import run_program
from tessera.benchmarks.service.tuning.cells import ModelSize, TunedCell
from tessera.formulation.execution_plan import ExecutionPlan, execution_plan_of
from tessera.formulation.launch import TuningSpace

EXAMPLE: Final = "train_jax_gpt"
"""The example whose model is trained."""


class SearchFailed(RuntimeError):
    """An error for a search in which no plan runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSearch:
    """A search of a space, really run. Seconds are CPU seconds of its process.

    ``tried`` counts the plans, the Cell's own one included, and ``failed`` those of them that did
    not run.
    """

    winner: ExecutionPlan
    tried: int
    failed: int
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """A model on virtual devices, which programs measure."""

    size: ModelSize
    batch: int
    devices: int

    def search_space(self, cell: TunedCell, space: TuningSpace) -> SpaceSearch:
        """Try the Cell's own plan and those of a space, as a job's program does at its start.

        Raises:
            SearchFailed: no plan runs.
            RuntimeError: the program failed.
        """
        plans = [json.loads(plan.to_json()) for plan in cell.spaces[space]]
        own = json.loads(cell.plan.to_json())
        answer = self._run({"search": {"planned": own, "plans": plans}})
        trials = answer["trials"]
        failed = [trial["problem"] for trial in trials if trial["problem"]]
        if len(failed) == len(trials):
            raise SearchFailed(f"no plan of {len(trials)} runs: {failed[0]}")
        best = min(trials, key=lambda trial: float(trial["iteration_s"]))
        return SpaceSearch(
            winner=execution_plan_of("plan", best["plan"]),
            tried=len(trials),
            failed=len(failed),
            spent_s=answer["spent_s"],
        )

    def judge_plans(
        self, plans: Sequence[ExecutionPlan], rounds: int
    ) -> dict[ExecutionPlan, float]:
        """Return the median CPU seconds of an iteration of each plan, measured in turn."""
        distinct = list(dict.fromkeys(plans))
        plain = [json.loads(plan.to_json()) for plan in distinct]
        answer = self._run({"judge": {"plans": plain, "rounds": rounds}})
        return {p: median(s) for p, s in zip(distinct, answer["iteration_s"], strict=True)}

    def _run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Run a task in a fresh process, in which nothing was compiled before."""
        model = {"example": EXAMPLE, "sizes": asdict(self.size), "batch": self.batch}
        lines = run_program("tuning", json.dumps({"model": model, **task}), self.devices)
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
