"""Searches of tuning spaces in processes of their own, and the speeds of the plans they find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from tessera import progress
from tessera.benchmarks.service.tuning.cells import ModelSize, TunedCell
from tessera.formulation.execution_plan import ExecutionPlan, execution_plan_of
from tessera.formulation.launch import TuningSpace

PROGRAM: Final = Path(__file__).with_name("program.py")
PATHS: Final = [str(Path(progress.__file__).parents[2])]
"""The folders from which the program imports ``tessera.jax``."""

MAX_ERROR_CHARS: Final = 2000


class SearchFailed(RuntimeError):
    """An error for a program that did not measure what it was asked for."""


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
            SearchFailed: no plan runs, or the program ended without an answer.
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
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TESSERA_"))}
        variables |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.devices}",
            "PYTHONPATH": os.pathsep.join([*PATHS, variables.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [sys.executable, str(PROGRAM)],
            input=json.dumps({"model": self.size.to_plain(self.batch), **task}),
            capture_output=True,
            text=True,
            env=variables,
            check=False,
        )
        if done.returncode:
            raise SearchFailed(f"the program failed: {done.stderr[-MAX_ERROR_CHARS:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
