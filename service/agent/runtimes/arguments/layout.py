"""The places of a gang's ranks, and the arguments and files with which a launcher is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.runtimes import RUNTIMES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The places of a gang's ranks, seen from one of its nodes. There is a rank for each GPU.

    ``member_gpus`` has the number of GPUs of each node, in the order of ranks. ``devices`` are the
    names of this node's GPUs, as CUDA_VISIBLE_DEVICES has them. If it is empty, they are the first
    ones. ``rank_program`` is the beginning of each rank's command, before the interpreter.
    ``address`` and ``port`` may be words for which the rendezvous is filled in later.
    """

    node_rank: int
    member_gpus: tuple[int, ...]
    address: str  # of the node of rank 0
    port: str
    python: str  # the user's interpreter
    rank_program: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    stop_grace_s: float = 0.0  # 0 for the launcher's own default

    def __post_init__(self) -> None:
        """Check that the ranks have places. Raises InvalidInput."""
        if not self.member_gpus or min(self.member_gpus) < 1:
            raise InvalidInput("member_gpus", "must be at least 1 for each node of the gang")
        if not 0 <= self.node_rank < self.nodes:
            raise InvalidInput(
                "node_rank", f"must be 0 to {self.nodes - 1}, not {self.node_rank}: it is a node"
            )
        for name in ("address", "port", "python"):
            if not getattr(self, name):
                raise InvalidInput(name, "must not be empty")
        if self.devices and len(self.devices) != self.node_gpus:
            raise InvalidInput(
                "devices", f"must name the {self.node_gpus} GPUs of this node, or be empty"
            )

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.member_gpus)

    @property
    def node_gpus(self) -> int:
        """Return the number of GPUs on this node."""
        return self.member_gpus[self.node_rank]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs on all nodes."""
        return sum(self.member_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonProgram:
    """A script, or a module after ``-m``, with its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    def command(self, layout: RankLayout) -> tuple[str, ...]:
        """Return the command of a rank. Its output is not buffered."""
        module = ("-m",) if self.is_module else ()
        interpreter = (*layout.rank_program, layout.python, "-u")
        return (*interpreter, *module, self.name, *self.arguments)


def read_program(runtime: str, command: Sequence[str]) -> PythonProgram:
    """Return the program that a job's command names. Raises InvalidInput."""
    RUNTIMES[runtime].check_command("command", command)
    is_module = command[0] in ("-m", "--module")
    name, *arguments = command[1:] if is_module else command
    return PythonProgram(name=name, is_module=is_module, arguments=tuple(arguments))


def check_plan(
    runtime: str, layout: RankLayout, plan: ExecutionPlan | None, global_batch: int
) -> None:
    """Refuse a plan that the runtime, the gang or the batch does not fit. Raises InvalidInput."""
    if plan is None:
        return
    if problem := RUNTIMES[runtime].refuse_plan(plan):
        raise InvalidInput("plan", f"{problem}; {runtime} cannot run it")
    if plan.gpus != layout.gpus:
        raise InvalidInput("plan", f"is for {plan.gpus} GPUs, but the gang has {layout.gpus}")
    if plan.global_batch != global_batch:
        raise InvalidInput(
            "plan",
            f"has {plan.global_batch} samples in an iteration, but the job's global batch is {global_batch};"
            " a plan never changes the global batch",
        )
