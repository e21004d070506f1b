"""``tessera demo-train``: train jobs on this machine while rounds scale and move them.

A database, a server and two agents of four virtual GPUs each run as separate processes. A small GPT
in JAX goes from four replicas to a pipeline of tensor-parallel stages, and then to one GPU, while
other jobs arrive and a node is drained. At the end, the losses of all jobs are compared with those
of the same programs, undisturbed.

With ``--discover``, one agent runs the jobs on this machine's GPUs. If there is only one, jobs take
turns on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.table import Table

from tessera.formulation.errors import InvalidInput
from tessera.service.agent.hardware.nvml import load_nvml
from tessera.service.cli.children import ending_signals
from tessera.service.cli.client import Exit
from tessera.service.cli.demo import command as demo
from tessera.service.cli.demo.drive import PARENT, make_cluster
from tessera.service.cli.demo.stack import run_stack
from tessera.service.cli.demo.train.fleet import Fleet, own_fleet, virtual_fleet
from tessera.service.cli.demo.train.jobs import ALL_EXPERTS, DemoJob, choose_jobs
from tessera.service.cli.demo.train.proof import (
    TOLERANCE,
    Execution,
    find_ledger_fault,
    largest_difference,
    last_executions,
)
from tessera.service.cli.demo.train.recorder import Recorder, Start, describe, describe_starts
from tessera.service.cli.demo.train.story import (
    PERIOD_S,
    SETTINGS,
    Stage,
    play,
    read_outputs,
    run_agents,
)
from tessera.service.cli.demo.train.undisturbed import (
    UndisturbedRun,
    read_executions,
    run_undisturbed,
)
from tessera.v1 import jobs_pb2

ROOT: Final = Path(__file__).resolve().parents[4]
EXAMPLES: Final = ROOT / "docs" / "examples"
TORCH_PYTHON: Final = ROOT / "build" / "torch" / "bin" / "python"
"""The interpreter that ``scripts/torch_env.py`` makes."""

JAX_PACKAGES: Final = ("jax", "optax", "orbax")
"""What programs that use ``tessera.jax`` need."""

TABLE_BOX: Final = box.SIMPLE_HEAD
"""The lines of the table, which leave room for its columns in 80 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A job of the demonstration as it ended, with the proof of its training.

    ``ledger_fault`` is "" if its samples are right, or if it keeps no ledger.
    """

    spec: DemoJob
    job: jobs_pb2.Job
    starts: Sequence[Start]
    executions: Sequence[Execution]
    undisturbed: Sequence[Execution]
    difference: float
    ledger_fault: str

    @property
    def faults(self) -> list[str]:
        """Return what is wrong with the job, as sentences."""
        name, found = self.spec.name, list[str]()
        if self.job.state != jobs_pb2.SUCCEEDED:
            found.append(f"{name} did not finish: {describe(self.job)}.")
        if not self.difference <= TOLERANCE:
            found.append(f"A loss of {name} differs by {self.difference:.1e} from the other run.")
        if self.ledger_fault:
            found.append(f"The ledger of {name} is wrong: {self.ledger_fault}.")
        return found


def add_commands(app: typer.Typer) -> None:
    """Add ``run_training_demo`` to the command line."""
    app.command("demo-train")(run_training_demo)


def run_training_demo(
    iterations: Annotated[
        int, typer.Option(help="Iterations of the job that is scaled and moved.", min=100)
    ] = 400,
    discover: Annotated[
        bool,
        typer.Option(
            "--discover",
            help="Train on this machine's GPUs, which NVIDIA's driver reports, in place of eight virtual"
            " ones.",
        ),
    ] = False,
    torch_python: Annotated[
        str,
        typer.Option(
            metavar="PROGRAM",
            envvar="TESSERA_TORCH_PYTHON",
            help="Python interpreter that has PyTorch. Default: the one that scripts/torch_env.py made."
            " 'none': train without PyTorch.",
        ),
    ] = "",
    examples: Annotated[
        Path, typer.Option(help="Directory of the programs that are trained.", show_default=False)
    ] = EXAMPLES,
    picture: Annotated[Path, typer.Option(help="File to which the picture is written.")] = Path(
        "tessera-demo-train.png"
    ),
) -> None:
    """Train jobs that rounds scale and move, and compare their losses with undisturbed runs.

    A database, a server and two agents of four virtual GPUs each run on this machine. The exit code
    is 1 if a job does not finish, if a loss differs, or if a sample was used twice or skipped.
    """
    fleet = own_fleet(load_nvml()) if discover else virtual_fleet(nodes=2, node_gpus=4)
    torch = find_torch(torch_python)
    has_jax = all(find_spec(name) for name in JAX_PACKAGES)
    jobs = choose_jobs(fleet, has_jax=has_jax, has_torch=torch is not None)
    for job in jobs:
        if not (examples / job.script).exists():
            raise InvalidInput(
                "--examples", f"{examples} has no {job.script}; run this in a clone of Tessera"
            )
    for name, is_here in (("PyTorch", torch is not None), ("JAX", has_jax)):
        if not is_here:
            demo.tell(f"There is no {name} here, so programs that need it are left out.")
    with ending_signals():
        results, recorder = train(fleet, jobs, iterations, torch, examples.absolute())
    from tessera.service.cli.demo.train.picture import draw_training  # noqa: PLC0415 - slow

    lead = results[0]
    draw_training(
        picture,
        {result.spec.name: result.starts for result in results},
        lead.executions,
        lead.undisturbed,
        recorder.events,
        fleet.nodes,
    )
    show_results(fleet, results, picture)
    if any(result.faults for result in results):
        raise typer.Exit(Exit.REFUSED)


def find_torch(stated: str) -> Path | None:
    """Return the interpreter that has PyTorch: the stated one, or that of the script, or None."""
    if stated == "none" or not (stated or TORCH_PYTHON.exists()):
        return None
    return Path(stated) if stated else TORCH_PYTHON


def train(
    fleet: Fleet, jobs: Sequence[DemoJob], iterations: int, torch: Path | None, examples: Path
) -> tuple[list[Result], Recorder]:
    """Run the demonstration, and return the jobs as they ended, with the record of their GPUs."""
    with ExitStack() as stack:
        system = stack.enter_context(
            run_stack(settings=SETTINGS, report=demo.tell, period_s=PERIOD_S)
        )
        stage = Stage(
            system=system,
            fleet=fleet,
            examples=examples,
            torch=torch,
            iterations=iterations,
            tell=demo.tell,
        )
        demo.tell("starting the same programs outside of Tessera, at low priority")
        alone = [stack.enter_context(_start_undisturbed(stage, job)) for job in jobs]
        make_cluster(system, [fleet.gpu_type], fleet.nodes)
        stage.import_estimates(jobs)
        demo.tell(f"starting an agent for each node: {fleet}")
        children = stack.enter_context(run_agents(stage))
        demo.wait_for_nodes(system, len(fleet.nodes))
        checks = [child.require_running for child in children]
        checks += [run.require_success for run in alone]
        recorder = Recorder(system.jobs, PARENT, checks)
        ended = play(stage, jobs, recorder)
        demo.tell("comparing losses and samples with the undisturbed runs")
        results = [
            _result(stage, run, ended[run.job.name], recorder.starts.get(run.job.name, []))
            for run in alone
        ]
    return results, recorder


def _start_undisturbed(stage: Stage, job: DemoJob) -> AbstractContextManager[UndisturbedRun]:
    """Return a run of the job's program outside of Tessera."""
    command = job.command(stage.examples)
    if command[0] == str(stage.examples / job.script):
        command = (str(stage.interpreter(job)), *command)
    folder = stage.system.folder / "undisturbed" / job.name
    return run_undisturbed(job, command, job.iterations(stage.iterations), folder)


def _result(
    stage: Stage, run: UndisturbedRun, job: jobs_pb2.Job, starts: Sequence[Start]
) -> Result:
    """Return a job as it ended, with the proof of its training."""
    spec, undisturbed = run.job, run.finish()
    outputs = {} if spec.samples else read_outputs(stage, spec, job.generation)
    executions = read_executions(spec, stage.files_of(spec), outputs)
    last, total = last_executions(executions), spec.iterations(stage.iterations)
    return Result(
        spec=spec,
        job=job,
        starts=starts,
        executions=executions,
        undisturbed=undisturbed,
        difference=largest_difference(last, last_executions(undisturbed)),
        ledger_fault=find_ledger_fault(last, total, spec.batch, spec.samples)
        if spec.samples
        else "",
    )


def show_results(fleet: Fleet, results: Sequence[Result], picture: Path) -> None:
    """Print the table of the jobs, and what is wrong."""
    table = Table(title=str(fleet), box=TABLE_BOX, padding=0, show_edge=False)
    for column in ("job", "state", "steps", "plans"):
        table.add_column(column, overflow="fold")
    for column in ("moves", "restart", "differs", "samples"):
        table.add_column(column, justify="right", overflow="fold")
    for result in results:
        table.add_row(*table_row(result))
    demo.out.print(table)
    demo.say(
        "Plans: the stages of each plan in turn, or its number of GPUs, as rounds decided. Moves: the"
        " number of restarts, also under the same plan. Restart: the measured time to stop, launch and"
        " reach the first step. Differs: the largest difference of a loss from that of the same program"
        " at the same step, outside of Tessera in one process. Samples: whether each was used exactly"
        " once in each epoch, counting the last execution of each step."
    )
    if any(set(ALL_EXPERTS) <= set(result.spec.arguments) for result in results):
        demo.say(
            "The mixture of experts sends each token to all experts. A choice of some may flip by rounding."
        )
    for fault in (fault for result in results for fault in result.faults):
        demo.say(f"FAULT: {fault}")
    demo.say(f"\nPicture: {picture}")


def table_row(result: Result) -> tuple[str, ...]:
    """Return a job's row of the table. "-" means that something was not measured or recorded."""
    job, price_s = result.job, result.job.training.restart_seconds
    ledger = "-" if not result.spec.samples else "wrong" if result.ledger_fault else "all once"
    return (
        result.spec.name,
        jobs_pb2.JobState.Name(job.state).lower(),
        f"{job.iterations_done:.0f}/{job.iterations}",
        describe_starts(result.starts),
        str(max(0, len(result.starts) - 1)),
        f"{price_s:.1f} s" if price_s else "-",
        f"{result.difference:.1e}" if result.difference else "0",
        ledger,
    )
