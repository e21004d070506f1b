"""The script of the demonstration: what its user and its operator do. Rounds decide all the rest."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from tessera.formulation.errors import Unavailable
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.cli.children import Child, run_child
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.demo.drive import CLUSTER, PARENT, add_estimates
from tessera.service.cli.demo.stack import Stack
from tessera.service.cli.demo.train.fleet import Fleet
from tessera.service.cli.demo.train.jobs import (
    PIPELINE,
    REPLICAS,
    DemoJob,
    plan_estimates,
    profiles_csv,
)
from tessera.service.cli.demo.train.recorder import Recorder, Start, gpus_of, has_ended
from tessera.v1 import jobs_pb2

SETTINGS: Final = {
    "TESSERA_POLICY": "{objective: throughput}",
    "TESSERA_ROUND_SPACING_S": "2",
}
"""Settings of the server: the objective in which more GPUs are worth most, and quick rounds."""

PERIOD_S: Final = 20.0
"""Seconds between periodic rounds. Most rounds follow events."""

INSPECT_S: Final = 0.5
CHECKPOINT_S: Final = 20.0
GRACE_S: Final = 60.0
"""Seconds that a program may take to write a checkpoint on a busy machine before it is killed."""

FIRST_SHARE: Final = 0.15
"""The share of its iterations that the first job does before others arrive."""

STEP_SHARE: Final = 0.08
"""The share of its iterations that it does in between the later steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The running system of a demonstration, and what its script needs.

    ``torch`` is the interpreter that has PyTorch, or None. Scripts in JAX run with this process's
    own. ``tell`` prints a step.
    """

    system: Stack
    fleet: Fleet
    examples: Path
    torch: Path | None
    iterations: int  # of the job that is scaled
    tell: Callable[[str], None]

    @property
    def checkpoints(self) -> Path:
        """Return the directory of checkpoints, which the nodes share."""
        return self.system.folder / "checkpoints"

    def files_of(self, job: DemoJob) -> Path:
        """Return the directory that all starts of a job share."""
        return self.checkpoints / CLUSTER / f"job-{job.name}" / "files"

    def call(self, *arguments: str) -> str:
        """Run the command line as a user does, and return its standard output.

        Raises:
            CallFailed: it failed.
        """
        environment = {**os.environ, "TESSERA_SERVER": self.system.addresses[0]}
        done = subprocess.run(
            [sys.executable, "-m", "tessera.service.cli.main", *arguments],
            env={**environment, "TESSERA_CLUSTER": CLUSTER},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CallFailed(
                f"`tessera {arguments[0]}` failed: {done.stderr.strip()}", Exit.REFUSED
            )
        return done.stdout

    def submit(self, job: DemoJob) -> None:
        """Submit a job by the command line."""
        path = os.pathsep.join([str(self.interpreter(job).parent), os.defpath])
        self.call(*job.submission(self.examples, self.iterations, path))

    def interpreter(self, job: DemoJob) -> Path:
        """Return the interpreter of a job's script. A job finds it on its PATH."""
        return self.torch if job.needs_torch and self.torch else Path(sys.executable)

    def import_estimates(self, jobs: Sequence[DemoJob]) -> None:
        """Import the estimates of the jobs' models. Their provenance says that they are the demo's."""
        file = self.system.folder / "profiles.csv"
        file.write_text(profiles_csv(jobs, self.fleet), encoding="utf-8")
        self.call("import", "profiles", "--complete", str(file))
        add_estimates(self.system, plan_estimates(jobs, self.fleet.gpu_type.name))

    def report_failure(self, job: DemoJob, plan: ExecutionPlan) -> None:
        """Report that a plan of a job does not run, as after running out of memory."""
        estimates = plan_estimates([job], self.fleet.gpu_type.name, failed=[plan])
        add_estimates(self.system, estimates)


@contextlib.contextmanager
def run_agents(stage: Stage) -> Iterator[list[Child]]:
    """Run an agent for each node, as ``tessera up`` does, and stop all of them at the end."""
    with ExitStack() as stack:
        children = [stack.enter_context(_agent(stage, node)) for node in stage.fleet.nodes]
        for child in children:
            stack.callback(child.terminate)  # all at once, before waiting for the first
        yield children


def _agent(stage: Stage, node: NodeSpec) -> contextlib.AbstractContextManager[Child]:
    folder = stage.system.folder
    nodes = ["--discover"]
    if stage.fleet.is_virtual:
        listed = folder / f"{node.name}.json"
        row = {"node": node.name, "gpu_type": node.gpu_type, "gpus": node.gpus, "rack": node.rack}
        listed.write_text(json.dumps([row]), encoding="utf-8")
        nodes = ["--nodes-file", str(listed)]
    options = {
        "--server": stage.system.addresses[0],
        "--cluster": CLUSTER,
        "--agent-id": f"agent-{node.name}",
        "--data-dir": str(folder / f"agent-{node.name}"),
        "--checkpoint-dir": str(stage.checkpoints),
        "--run-as": pwd.getpwuid(os.geteuid()).pw_name,
        "--python": "python3",
        "--checkpoint-s": f"{CHECKPOINT_S:g}",
        "--inspect-s": f"{INSPECT_S:g}",
        "--heartbeat-s": "1",
        "--grace-s": f"{GRACE_S:g}",
    }
    return run_child(
        f"agent-{node.name}",
        "tessera.service.agent.main",
        [*(word for pair in options.items() for word in pair), *nodes, "--stop-on-exit"],
        folder / "logs",
        GRACE_S + 10.0,
        {"TESSERA_DATABASE_URL": None},
    )


def play(stage: Stage, jobs: Sequence[DemoJob], recorder: Recorder) -> dict[str, jobs_pb2.Job]:
    """Let users and an operator do their part, and return the jobs once all have ended.

    Raises:
        Unavailable: a process of the demonstration has ended, or a step takes too long.
    """
    lead, *others = jobs
    first, step = stage.iterations * FIRST_SHARE, stage.iterations * STEP_SHARE
    guarantee = " and is guaranteed it" if lead.guaranteed else ""
    stage.tell(f"submitting {lead.name}, which requests 1 GPU{guarantee}")
    recorder.note(f"{lead.name} arrives")
    stage.submit(lead)
    recorder.wait(lambda jobs: _is_beyond(jobs, lead, first), f"{lead.name} has trained a while")

    if PIPELINE in lead.plans:
        _change_plan(stage, lead, recorder, step)
    names = ", ".join(job.name for job in others)
    stage.tell(f"submitting {names}, of more weight, while {_where(stage, recorder, lead)}")
    recorder.note("others arrive")
    before = recorder.starts[lead.name][-1]
    for job in others:
        stage.submit(job)
    recorder.wait(
        lambda jobs: _has_trained(recorder, jobs, lead, before, step),
        f"{lead.name} trains after a restart",
    )

    stage.tell(f"draining its first node while {_where(stage, recorder, lead)}")
    moved = recorder.starts[lead.name][-1]
    node = moved.gpus[0][0]
    recorder.note(f"{node} drained", node)
    stage.call("drain", node, "--reason", "demonstration")
    if len(stage.fleet.nodes) > 1:
        recorder.wait(
            lambda jobs: _has_trained(recorder, jobs, lead, moved, step),
            f"{lead.name} trains elsewhere",
        )
    else:
        recorder.wait(
            lambda jobs: all(
                has_ended(job) or job.state == jobs_pb2.QUEUED for job in jobs.values()
            ),
            "the only node has no job left",
        )

    stage.tell(f"putting {node} back while {_where(stage, recorder, lead)}")
    recorder.note(f"{node} back", node)
    stage.call("undrain", node)
    everyone = {job.name for job in jobs}
    recorder.wait(
        lambda jobs: all(has_ended(job) for name, job in jobs.items() if name in everyone),
        "all jobs have ended",
    )
    return recorder.read()


def _change_plan(stage: Stage, lead: DemoJob, recorder: Recorder, step: float) -> None:
    """Report that data parallelism does not run, so that rounds choose a pipeline instead."""
    stage.tell(f"reporting that {REPLICAS} does not run, while {_where(stage, recorder, lead)}")
    recorder.note("dp4 fails")
    before = recorder.starts[lead.name][-1]
    stage.report_failure(lead, REPLICAS)
    recorder.wait(
        lambda jobs: _has_trained(recorder, jobs, lead, before, step),
        f"{lead.name} trains under another plan",
    )


def _is_beyond(jobs: dict[str, jobs_pb2.Job], lead: DemoJob, iterations: float) -> bool:
    job = jobs[lead.name]
    return has_ended(job) or job.iterations_done >= iterations


def _has_trained(
    recorder: Recorder,
    jobs: dict[str, jobs_pb2.Job],
    lead: DemoJob,
    after: Start,
    iterations: float,
) -> bool:
    """Return whether a start later than ``after`` has done ``iterations``, or the job has ended."""
    job, latest = jobs[lead.name], recorder.starts[lead.name][-1]
    if has_ended(job):
        return True
    is_running = latest.generation > after.generation and math.isfinite(latest.running_s)
    return is_running and job.iterations_done >= latest.resumed + iterations


def _where(stage: Stage, recorder: Recorder, lead: DemoJob) -> str:
    """Return a text on what the job runs on now."""
    total = stage.fleet.gpus
    gpus = gpus_of(recorder.read()[lead.name])
    nodes = sorted({node for node, _ in gpus})
    return f"{lead.name} has {len(gpus)} of {total} GPUs ({', '.join(nodes) or 'none'})"


def read_outputs(stage: Stage, job: DemoJob, generations: int) -> dict[int, str]:
    """Return what the first rank of each start of a job has printed.

    A start that was stopped before its program began has no output.

    Raises:
        Unavailable: the output cannot be read.
    """
    outputs = {}
    for generation in range(1, generations + 1):
        request = jobs_pb2.ReadLogsRequest(name=f"{PARENT}/jobs/{job.name}", generation=generation)
        try:
            parts = [part.data for part in stage.system.jobs.ReadLogs(request, timeout=60)]
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                continue
            raise Unavailable(f"cannot read the output of {job.name}: {error.details()}") from error
        outputs[generation] = b"".join(parts).decode(errors="replace")
    return outputs
