"""CPU seconds of an iteration by ``tessera.jax``, compared with a plain JAX program's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.benchmarks.service.reconfigure.runs import run_program
from tessera.benchmarks.service.runtime.summary import median, median_interval_95
from tessera.formulation.execution_plan import ExecutionPlan, PlanStage, Precision

BATCH: Final = 16
PIPELINE_PARTS: Final = 4
"""Micro-batches of the pipeline, and of the single program that it is compared with."""

LAYERS: Final = 6
SIZES: Final = {"vocabulary": 256, "sequence": 64, "width": 128, "heads": 4, "blocks": 4}
"""A GPT of 875,008 parameters. An iteration takes tens of milliseconds on two cores."""

LENGTH: Final = 3
"""Iterations of a block. The two programs run blocks in turn."""

WARM_UP: Final = 3

PROCESSES: Final = 4
"""Processes among which pairs are divided. Where threads and memory are differs from one to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A plan of ``tessera.jax``, and the degrees of the plain program that it is compared with."""

    name: str
    plan: ExecutionPlan
    dp: int
    tp: int

    @property
    def devices(self) -> int:
        """Return the devices that both programs see."""
        return max(self.plan.gpus, self.dp * self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The share by which ``tessera.jax`` needs more CPU time, one for each pair of blocks."""

    shares: Sequence[float]
    tessera_s: float
    plain_s: float

    @property
    def median(self) -> float:
        """Return the median share."""
        return median(self.shares)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the median."""
        return median_interval_95(self.shares)


def make_contests() -> tuple[Contest, ...]:
    """Return two plans of one stage against the same by hand, and a pipeline against one device."""
    pipeline = ((0, 2), (2, 3), (3, 4), (4, 6))
    return (
        Contest(name="dp4", plan=_plan([PlanStage(start=0, end=LAYERS, dp=4)]), dp=4, tp=1),
        Contest(
            name="dp2_tp2", plan=_plan([PlanStage(start=0, end=LAYERS, dp=2, tp=2)]), dp=2, tp=2
        ),
        Contest(
            name="pp4",
            plan=_plan([PlanStage(start=a, end=b) for a, b in pipeline], PIPELINE_PARTS),
            dp=1,
            tp=1,
        ),
    )


def measure_overhead(contest: Contest, pairs: int) -> Overhead:
    """Run both programs in turn, ``pairs`` times, and return what ``tessera.jax`` needs more.

    Raises:
        MissingData: the examples are not installed here.
        RuntimeError: the program failed.
    """
    given = {
        "sizes": SIZES,
        "batch": BATCH,
        "micro_batches": contest.plan.accumulation,
        "dp": contest.dp,
        "tp": contest.tp,
        "length": LENGTH,
        "warm_up": WARM_UP,
    }
    tessera_s, plain_s = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="tessera-overhead-") as folder:
        variables = _write_variables(Path(folder), contest.plan)
        while len(tessera_s) < pairs:
            given["pairs"] = min(-(-pairs // PROCESSES), pairs - len(tessera_s))
            lines = run_program("overhead", json.dumps(given), contest.devices, variables)
            measured = json.loads(lines[-1])
            tessera_s += measured["tessera_s"]
            plain_s += measured["plain_s"]
    return Overhead(
        shares=[own / other - 1 for own, other in zip(tessera_s, plain_s, strict=True)],
        tessera_s=median(tessera_s),
        plain_s=median(plain_s),
    )


def _write_variables(folder: Path, plan: ExecutionPlan) -> dict[str, str]:
    """Return the variables of a job with this plan. Processes share what they compile."""
    path = folder / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return {
        "TESSERA_PLAN_FILE": str(path),
        "TESSERA_PROGRESS_FILE": str(folder / "progress.json"),
        "TESSERA_CONTROL_FILE": str(folder / "control.json"),
        "TESSERA_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    }


def _plan(stages: Sequence[PlanStage], parts: int = 1) -> ExecutionPlan:
    return ExecutionPlan(
        stages=tuple(stages),
        micro_batch=BATCH // parts,
        accumulation=parts,
        precision=Precision.F32,
    )
