"""The jobs of the demonstration, as data: one that is scaled and moved, and others that take its GPUs."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.runtimes import COMMAND, TORCHRUN

GPU_TYPE: Final = "cpu"
"""The GPU type of the virtual GPUs, which are processes."""

NODE_GPUS: Final = 2
PARAMS: Final = "tiny"
"""The size of the models."""

PROVENANCE: Final = "demo"
"""The provenance of the estimates, by which everyone sees that they were not measured."""

PROGRESS_PATTERN: Final = r"iteration (?P<iteration>[0-9]+) loss (?P<loss>[0-9.]+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """A job of the demonstration.

    ``share`` is its iterations, compared with those of the job that is scaled. ``work_s`` is the
    time of one GPU in an iteration, which the GPUs of a job share. ``counts`` are the GPU counts
    that it has estimates for. ``samples`` is the size of its data set if it keeps a ledger of the
    samples that it used, and otherwise 0.
    """

    name: str
    model: str
    runtime: str
    script: str  # in the directory of examples
    arguments: tuple[str, ...] = ()
    batch: int = 16
    share: float = 1.0
    work_s: float
    overhead_s: float  # of an iteration, in its estimates
    counts: tuple[int, ...] = (1,)
    weight: float = 1.0
    guaranteed: bool = False
    needs_torch: bool = False
    samples: int = 0

    def iterations(self, of_lead: int) -> int:
        """Return its iterations, if the job that is scaled has ``of_lead``."""
        return max(1, round(self.share * of_lead))

    def command(self, examples: Path) -> tuple[str, ...]:
        """Return the words that start the program, without the interpreter of scripts."""
        words = (str(examples / self.script), *self.arguments)
        return words if self.runtime != COMMAND else (sys.executable, *words)

    def submission(self, examples: Path, of_lead: int) -> list[str]:
        """Return the arguments of ``tessera submit``."""
        command = (*self.command(examples), "--work-s", f"{self.work_s:g}")
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
        words += ["--runtime", self.runtime, "--command", shlex.join(command)]
        return [*words, *(["--progress-pattern", PROGRESS_PATTERN] * (self.runtime == COMMAND))]


RESTART_S: Final = 5.0
"""The price of a restart until it is measured."""

LEADS: Final = (
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

It requests one GPU and is guaranteed that, so rounds may give it all others and take them back."""

OTHERS: Final = tuple(
    DemoJob(
        name=f"plain-{number}",
        model="plain",
        runtime=COMMAND,
        script="train_plain.py",
        arguments=("--every", "25"),
        share=0.5,
        work_s=0.2,
        overhead_s=0.0,
        weight=2.0,
    )
    for number in (1, 2, 3)
)
"""Jobs that arrive later, and are worth more than further GPUs of the first."""


def choose_jobs(*, has_torch: bool) -> tuple[DemoJob, ...]:
    """Return the jobs that can run here. The first is the one that is scaled and moved."""
    able = [job for job in (*LEADS, *OTHERS) if has_torch or not job.needs_torch]
    lead = next(job for job in able if job in LEADS)
    return (lead, *(job for job in able if job not in LEADS))


def shapes_of(gpus: int, nodes: int) -> list[tuple[int, int]]:
    """Return the (nodes, GPUs on each) on which ``gpus`` fit evenly."""
    return [
        (count, gpus // count)
        for count in range(1, nodes + 1)
        if gpus % count == 0 and gpus // count <= NODE_GPUS
    ]


def profiles_csv(jobs: Sequence[DemoJob], nodes: int) -> str:
    """Return the estimates of the jobs' models, for ``tessera import profiles``."""
    columns = ("model", "params", "global_batch", "gpu_type", "num_nodes", "gpus_per_node")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow((*columns, "iter_time_s", "status", "source", "provenance"))
    by_model: Mapping[str, DemoJob] = {job.model: job for job in jobs}
    for job in by_model.values():
        for gpus in job.counts:
            time_s = job.work_s / gpus + job.overhead_s
            for shape in shapes_of(gpus, nodes):
                cell = (job.model, PARAMS, job.batch, GPU_TYPE, *shape)
                rows.writerow((*cell, f"{time_s:g}", "ok", "analytic", PROVENANCE))
    return text.getvalue()
