"""Memory of a stage (states, activations in flight, working set), and the stage that overflows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from tessera.estimator.graph import Graph
from tessera.estimator.hardware import GIB, Hardware
from tessera.estimator.plans import StageCosts, Training
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import Offload, PlanSwitches, Schedule

HOST_UTILISATION: Final = 0.5
"""Share of the data sheet's bandwidth that is reached between a host and its GPUs: ports are shared,
and copies are not always large or pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The placement of parameters, gradients and optimizer states.

    See ZeRO (SC 2020) and ZeRO-Offload (ATC 2021).
    """

    zero: int = 0
    """The ZeRO stage. Replicas divide optimizer states from stage 1 on, gradients from stage 2 on,
    and parameters from stage 3 on."""
    offload: bool = False
    """Whether optimizer states are in the host's memory and updated there."""
    offload_parameters: bool = False
    """Whether parameters are in the host's memory, too, and gathered from there before each pass
    (ZeRO-Infinity, SC 2021, section 5). The price of a plan adds the time that this takes."""
    host_bytes_per_s: float | None = None
    """What is reached between host and one GPU. If None, what was measured on the GPU type, or else
    half of the data sheet's bandwidth."""
    host_update_bytes_per_s: float | None = None
    """Bytes of states per second that the processors of one host update. If None, the hardware's."""
    cpus_per_gpu: int = 0
    """CPU cores for each GPU that update offloaded states. If it is 0, all of the host's do."""

    def moved_bytes_per_s(self, hardware: Hardware) -> float:
        """Return the bytes per second between the host and one GPU."""
        if self.host_bytes_per_s is not None:
            return self.host_bytes_per_s
        if hardware.copied_bytes_per_s is not None:
            return hardware.copied_bytes_per_s
        return hardware.host_bytes_per_s * HOST_UTILISATION

    def updated_bytes_per_s(self, hardware: Hardware, gpus: ArrayLike = 1) -> Floats | float:
        """Return the bytes of states per second that one host updates for some of its GPUs."""
        if self.host_update_bytes_per_s is not None:
            return self.host_update_bytes_per_s
        if not self.cpus_per_gpu:
            return hardware.host_update_bytes_per_s
        return hardware.updated_bytes_per_s(self.cpus_per_gpu * np.asarray(gpus))

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise TesseraError(f"the ZeRO stage must be from 0 to 3, not {self.zero}")


def place_states(states: States, switches: PlanSwitches) -> States:
    """Return states that are placed as a plan's switches say."""
    return replace(
        states,
        zero=switches.zero.value,
        offload=switches.offload is not Offload.NONE,
        offload_parameters=switches.offload is Offload.PARAMETERS,
        cpus_per_gpu=switches.cpus_per_gpu,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopies:
    """The numbers of copies that a runtime holds of the memory in use during a micro-batch.

    A calibration replaces them. The defaults are what the operators need. Compilers hold more, e.g.
    operands in two types or layouts, or a repeated forward pass that runs ahead of its backward
    pass.
    """

    layer: float = 1.0  # of the largest layer's activations
    unfused: float = 1.0
    """Copies of what a layer holds in use because its kernels are not fused. PyTorch has one
    (``benchmarks/estimator/bench_gpu_estimates.py``), and compilers have none."""
    stage: float = 0.0
    """Copies of the activations of all layers of a stage, if their forward pass is repeated."""
    gradients: float = 1.0
    """Copies of gradients in buffers for their exchange between replicas. PyTorch's DDP has one in
    its buckets unless configured otherwise. XLA has one too (``benchmarks/estimator/memory.py``).
    """

    def __post_init__(self) -> None:
        if min(self.layer, self.unfused, self.stage, self.gradients) < 0:
            raise TesseraError(f"numbers of copies must not be negative: {self}")


FUSED: Final = MemoryCopies(unfused=0.0)
"""The copies of a runtime whose compiler fuses kernels, before any others are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableMemory:
    """The part of a GPU's memory that a stage can use."""

    usable: float = 0.9  # share; the rest is lost to fragmentation and other processes
    context_bytes: float = 0.6 * GIB
    """Driver context, kernels and libraries' handles: 0.4 to 0.8 GiB per process on recent GPUs."""


def parameter_bytes(graph: Graph, training: Training) -> tuple[float, float, float]:
    """Return the bytes per parameter of weights, gradients and optimizer states.

    Together they are ``state_bytes``.

    Raises:
        TesseraError: ``state_bytes`` does not even hold a weight and its gradient.
    """
    width = float(graph.element_bytes)
    rest = training.state_bytes - 2 * width
    if rest < 0:
        raise TesseraError(
            f"state_bytes is {training.state_bytes:g}, but weight and gradient alone need "
            f"{2 * width:g} in {graph.dtype}; give the sum of weight, gradient and optimizer states"
        )
    return width, width, rest


def state_bytes(
    graph: Graph, training: Training, states: States, parameters: Floats, replicas: Ints
) -> Floats:
    """Return the bytes of states on a GPU that holds ``parameters`` with ``replicas`` replicas."""
    weight, gradient, optimizer = parameter_bytes(graph, training)
    divided = [replicas if states.zero >= stage else 1 for stage in (3, 2, 1)]
    on_gpu = gradient / divided[1]
    if not states.offload_parameters:
        on_gpu = on_gpu + weight / divided[0]
    if not states.offload:
        on_gpu = on_gpu + optimizer / divided[2]
    return np.asarray(parameters * on_gpu, dtype=np.float64)


def host_state_bytes(
    graph: Graph, training: Training, states: States, parameters: Floats, replicas: Ints
) -> Floats:
    """Return the bytes of host memory that the states of one GPU take, as in :func:`state_bytes`.

    Optimizer states are kept there, and gradients arrive there (ZeRO-Offload, ATC 2021, section
    4.1). With offloaded parameters, weights are kept there, too.
    """
    weight, gradient, optimizer = parameter_bytes(graph, training)
    divided = [replicas if states.zero >= stage else 1 for stage in (3, 1)]
    on_host = (gradient + optimizer) / divided[1] if states.offload else 0.0
    if states.offload_parameters:
        on_host = on_host + weight / divided[0]
    return np.asarray(parameters * on_host, dtype=np.float64)


def in_flight(schedule: Schedule, stages: int, micro_batches: int) -> Ints:
    """Return the number of micro-batches of which each stage keeps activations, shape (stages,).

    GPipe runs all forward passes first. Under 1F1B, stage i starts with the backward pass after
    ``stages - i`` forward passes (Narayanan et al., SC 2021, section 2.2).
    """
    if schedule is Schedule.GPIPE:
        return np.full(stages, micro_batches, dtype=np.int64)
    return np.minimum(stages - np.arange(stages, dtype=np.int64), micro_batches)


def memory_bytes(
    costs: StageCosts, flights: Ints | int, room: UsableMemory | None = None
) -> Floats:
    """Return the bytes on the fullest GPU of each candidate, shape (K,).

    ``flights`` is the number of micro-batches in flight.
    """
    context = (room or UsableMemory()).context_bytes
    return costs.state_bytes + costs.flight_bytes * flights + costs.working_bytes + context


def limit_bytes(memory: float, room: UsableMemory | None = None) -> float:
    """Return the bytes of a GPU's ``memory`` that a stage may use."""
    return (room or UsableMemory()).usable * memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """The stage that does not fit, with the bytes that it needs and the limit."""

    stage: int
    needed_bytes: float
    limit_bytes: float
    largest: str  # name of the largest part of the needed bytes
    largest_bytes: float

    def __str__(self) -> str:
        return (
            f"stage {self.stage} needs {self.needed_bytes / GIB:.1f} GiB but has"
            f" {self.limit_bytes / GIB:.1f} GiB; {self.largest} alone need"
            f" {self.largest_bytes / GIB:.1f} GiB"
        )


def largest_overflow(parts: Mapping[str, Floats], needed: Floats, most: float) -> Overflow | None:
    """Return the stage whose ``needed`` bytes exceed ``most`` by most, or None if all stages fit.

    ``parts`` are the parts of the bytes by their names. They and ``needed`` have shape (stages,).
    """
    stage = int(needed.argmax())
    if needed[stage] <= most:
        return None
    largest = max(parts, key=lambda name: float(parts[name][stage]))
    return Overflow(
        stage=stage,
        needed_bytes=float(needed[stage]),
        limit_bytes=most,
        largest=largest,
        largest_bytes=float(parts[largest][stage]),
    )
