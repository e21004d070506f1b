"""The jobs of the demonstration, as data: one that is scaled and moved, and others that take its GPUs."""

from __future__ import annotations

import csv
import io
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
)
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.runtimes import COMMAND, JAX, TORCHRUN
from tessera.formulation.values import Cell, EstimateSource, Workload
from tessera.service.cli.demo.train.fleet import Fleet

BATCH: Final = 16
"""The global batch of all jobs."""

PARAMS: Final = "tiny"
"""The size of the models."""

PROVENANCE: Final = "demo"
"""The provenance of the estimates, by which everyone sees that they were not measured."""

PROGRESS_PATTERN: Final = r"iteration (?P<iteration>[0-9]+) loss (?P<loss>[0-9.]+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """A job of the demonstration.

    ``share`` is its iterations, compared with those of the job that is scaled. ``work_s`` is the
    time of one GPU in an iteration, which the GPUs of a job share. If ``waits``, the program spends
    it waiting. ``counts`` are the GPU counts that it has estimates for.
    ``environment`` are variables of its program. ``samples`` is the size of its data set if it keeps
    a ledger of the samples that it used, and otherwise 0.
    """

    name: str
    model: str
    runtime: str
    script: str  # in the directory of examples
    arguments: tuple[str, ...] = ()
    batch: int = BATCH
    share: float = 1.0
    work_s: float
    overhead_s: float  # of an iteration, in its estimates
    counts: tuple[int, ...] = (1,)
    weight: float = 1.0
    guaranteed: bool = False
    needs_torch: bool = False
    needs_jax: bool = False
    plans: tuple[ExecutionPlan, ...] = ()
    """Its execution plans, each for one node. If it is empty, only the counts are known."""
    samples: int = 0
    waits: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        """Return what it trains."""
        return Workload(model=self.model, params=PARAMS, global_batch=self.batch)

    def iterations(self, of_lead: int) -> int:
        """Return its iterations, if the job that is scaled has ``of_lead``."""
        return max(1, round(self.share * of_lead))

    def command(self, examples: Path) -> tuple[str, ...]:
        """Return the words that start the program, without the interpreter of scripts."""
        words = (str(examples / self.script), *self.arguments)
        return words if self.runtime != COMMAND else (sys.executable, *words)

    def fit(self, fleet: Fleet) -> DemoJob:
        """Return the job as it runs on a fleet: with the counts and plans that fit there.

        Jobs of a single GPU are not guaranteed it, because nothing else could then run. Those that
        arrive later weigh more there, because a restart of what runs may take half of their worth
        (``max_restart_share``). On GPUs that exist, programs have real work and wait for nothing.
        """
        is_single = fleet.gpus == 1
        return replace(
            self,
            counts=tuple(count for count in self.counts if count <= fleet.gpus),
            plans=tuple(plan for plan in self.plans if plan.gpus <= fleet.node_gpus),
            guaranteed=self.guaranteed and not is_single,
            weight=self.weight * SINGLE_FACTOR if is_single and self.weight > 1 else self.weight,
            waits=fleet.is_virtual,
            environment=fleet.environment,
        )

    def submission(self, examples: Path, of_lead: int, path: str = "") -> list[str]:
        """Return the arguments of ``tessera submit``. ``path`` is the program's PATH, or ""."""
        command = self.command(examples)
        if self.waits:
            command = (*command, "--work-s", f"{self.work_s:g}")
        words = [
            "submit",
            self.name,
            "--model",
            self.model,
            "--params",
            PARAMS,
            "--batch",
            str(self.batch),
        ]
        words += ["--iterations", str(self.iterations(of_lead)), "--gpus", "1"]
        words += ["--weight", f"{self.weight:g}", "--restart", f"{RESTART_S:g}s"]
        words += ["--guaranteed"] if self.guaranteed else []
        variables = {**self.environment, **({"PATH": path} if path else {})}
        for name, value in variables.items():
            words += ["--env", f"{name}={value}"]
        words += ["--runtime", self.runtime, "--command", shlex.join(command)]
        return [*words, *(["--progress-pattern", PROGRESS_PATTERN] * (self.runtime == COMMAND))]


SINGLE_FACTOR: Final = 1.5
"""The factor of the weights above 1 if there is a single GPU."""

RESTART_S: Final = 5.0
"""The price of a restart until it is measured."""

PIPELINE_SLOWDOWN: Final = 1.5
"""The time of a plan with two stages, compared with that of a plan with one."""

LAYERS: Final = 6
"""The layers of each example in JAX: a first one, four blocks and a head."""


def _plan(*stages: tuple[int, int], accumulation: int = 1, ep: int = 1) -> ExecutionPlan:
    """Return the plan of stages of equal layers, each of which is (dp, tp)."""
    each = LAYERS // len(stages)
    return ExecutionPlan(
        stages=tuple(
            PlanStage(start=index * each, end=(index + 1) * each, dp=dp, tp=tp, ep=ep)
            for index, (dp, tp) in enumerate(stages)
        ),
        micro_batch=BATCH // accumulation,
        accumulation=accumulation,
        precision=Precision.F32,
    )


ALL_EXPERTS: Final = ("--choices", "4")
"""Options with which the mixture sends each token to all of its experts.

If it chose 2 of them, two plans could choose differently: they add numbers up in other orders, and
a token may like two experts equally well. Its losses would then differ by more than rounding."""


def _jax_job(name: str, script: str, options: tuple[str, ...] = (), **changes: Any) -> DemoJob:
    return DemoJob(
        name=name,
        model=name,
        runtime=JAX,
        script=script,
        arguments=("--every", "25", "--precision", "f32", *options),
        overhead_s=0.03,
        needs_jax=True,
        samples=4096,
        **changes,
    )


REPLICAS: Final = _plan((4, 1))
"""Data parallelism on 4 GPUs."""

PIPELINE: Final = _plan((1, 2), (1, 2), accumulation=4)
"""Two pipeline stages of 2 tensor-parallel GPUs each."""

LEADS: Final = (
    _jax_job(
        "gpt-jax",
        "train_jax_gpt.py",
        work_s=0.4,
        guaranteed=True,
        plans=(_plan((1, 1)), REPLICAS, PIPELINE),
    ),
    DemoJob(
        name="gpt",
        model="small-gpt",
        runtime=TORCHRUN,
        script="train_gpt.py",
        arguments=("--every", "25"),
        work_s=0.4,
        overhead_s=0.03,
        counts=(1, 2, 4),
        guaranteed=True,
        needs_torch=True,
        samples=4096,
    ),
    DemoJob(
        name="line",
        model="line",
        runtime=COMMAND,
        script="train_plain.py",
        arguments=("--every", "25"),
        work_s=0.4,
        overhead_s=0.03,
        counts=(1, 2, 4),
        guaranteed=True,
    ),
)
"""Jobs that may be the one that rounds scale and move. The first that can run here is it.

It requests one GPU and is guaranteed that, so rounds may give it more and take them back."""

LARGE: Final = (
    *("--layers", "12", "--width", "1024", "--heads", "16"),
    *("--sequence", "1024", "--vocabulary", "32768", "--precision", "bf16"),
)
"""Sizes of the GPT in PyTorch on GPUs that exist: 220 million parameters."""

OTHERS: Final = (
    _jax_job(
        "moe-jax",
        "train_jax_moe.py",
        ALL_EXPERTS,
        share=0.5,
        work_s=0.2,
        weight=2.0,
        plans=(_plan((1, 1)), _plan((2, 1), ep=2)),
    ),
    _jax_job(
        "resnet-jax",
        "train_jax_resnet.py",
        share=0.5,
        work_s=0.2,
        weight=2.0,
        plans=(_plan((1, 1)), _plan((2, 1))),
    ),
    *(
        DemoJob(
            name=f"plain-{number}",
            model="plain",
            runtime=COMMAND,
            script="train_plain.py",
            arguments=("--every", "25"),
            counts=(1, 2),
            share=0.5,
            work_s=0.2,
            overhead_s=0.0,
            weight=2.0,
        )
        for number in (1, 2, 3)
    ),
)
"""Jobs that arrive later, and are worth more than further GPUs of the first."""


def choose_jobs(fleet: Fleet, *, has_jax: bool, has_torch: bool) -> tuple[DemoJob, ...]:
    """Return the jobs that can run here. The first is the one that is scaled and moved.

    If that is in JAX, the GPT in PyTorch is one of the others, and the other way round. On GPUs that
    exist, the GPT in PyTorch comes first, in a size that keeps one busy.
    """

    def can_run(job: DemoJob) -> bool:
        can_use = fleet.is_virtual or job.needs_torch or job.needs_jax
        return can_use and (has_torch or not job.needs_torch) and (has_jax or not job.needs_jax)

    leads = LEADS if fleet.is_virtual else sorted(LEADS, key=lambda job: not job.needs_torch)
    able = [job for job in leads if can_run(job)]
    if not able:
        raise InvalidInput(
            "--discover", "needs PyTorch or JAX; name an interpreter of --torch-python"
        )
    lead, *rest = able
    if not fleet.is_virtual and lead.needs_torch:
        lead = replace(lead, arguments=(*lead.arguments, *LARGE))
    second = [
        replace(job, share=0.5, weight=2.0, guaranteed=False)
        for job in rest
        if job.needs_torch or job.needs_jax
    ]
    others = [job for job in OTHERS if can_run(job)]
    return tuple(job.fit(fleet) for job in (lead, *second, *others))


def shapes_of(gpus: int, fleet: Fleet) -> list[tuple[int, int]]:
    """Return the (nodes, GPUs on each) on which ``gpus`` fit evenly."""
    return [
        (count, gpus // count)
        for count in range(1, len(fleet.nodes) + 1)
        if gpus % count == 0 and gpus // count <= fleet.node_gpus
    ]


def profiles_csv(jobs: Sequence[DemoJob], fleet: Fleet) -> str:
    """Return the estimates of the jobs' models, for ``tessera import profiles``."""
    columns = ("model", "params", "global_batch", "gpu_type", "num_nodes", "gpus_per_node")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow((*columns, "iter_time_s", "status", "source", "provenance"))
    by_model: Mapping[str, DemoJob] = {job.model: job for job in jobs if not job.plans}
    for job in by_model.values():
        for gpus in job.counts:
            time_s = job.work_s / gpus + job.overhead_s
            for shape in shapes_of(gpus, fleet):
                cell = (job.model, PARAMS, job.batch, fleet.gpu_type.name, *shape)
                rows.writerow((*cell, f"{time_s:g}", "ok", "analytic", PROVENANCE))
    return text.getvalue()


def plan_estimates(
    jobs: Sequence[DemoJob], gpu_type: str, failed: Sequence[ExecutionPlan] = ()
) -> list[EstimateRecord]:
    """Return the estimates of the plans of jobs that have some. Plans of ``failed`` do not run.

    A pipeline takes longer than replicas, so rounds choose it only if these do not run.
    """
    return [
        EstimateRecord(
            workload=job.workload,
            cell=Cell(
                gpu_type=gpu_type,
                gpus=plan.gpus,
                pipeline_degree=plan.pipeline_degree,
                nodes=1,
                plan=plan.digest,
            ),
            iter_time_s=math.inf
            if plan in failed
            else PIPELINE_SLOWDOWN ** (plan.pipeline_degree - 1) * job.work_s / plan.gpus
            + job.overhead_s,
            source=EstimateSource.ANALYTIC,
            provenance=PROVENANCE,
            complete=True,
            plan=plan,
        )
        for job in jobs
        for plan in job.plans
    ]
