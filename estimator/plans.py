"""How a Cell runs: GPUs, the training's switches, candidate stages with their costs, and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from tessera.estimator.graph import Graph
from tessera.formulation.tables import Bools, Floats, Ints


class Schedule(StrEnum):
    """The order of forward and backward passes in a pipeline. Equally long here; 1F1B needs less memory."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal numbers of GPUs on some nodes."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.gpus_per_node


def shape_of(gpus: int, node_gpus: int) -> Shape:
    """Return the fewest nodes on which the GPUs lie in equal parts."""
    nodes = -(-gpus // node_gpus)
    while gpus % nodes:
        nodes += 1
    return Shape(nodes=nodes, gpus_per_node=gpus // nodes)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to ``most``."""
    return [2**k for k in range(most.bit_length())] if most > 0 else []


def powers_dividing(count: int) -> list[int]:
    """Return the powers of two that divide ``count``."""
    return [power for power in powers_of_two(count) if count % power == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What stays as it is wherever the job runs."""

    global_batch: int
    micro_batches: int = 16
    state_bytes: float = 16.0
    """Of a parameter with its gradient and optimizer states (Adam: ZeRO, SC 2020, section 3.1)."""
    checkpointing: bool = False
    """Only boundaries are kept; the forward pass is repeated in the backward pass."""
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def micro_batch(self) -> int:
        """Return the samples of a micro-batch; the last one may have fewer."""
        return math.ceil(self.global_batch / self.micro_batches)

    def at(self, global_batch: int) -> Training:
        """Return the training at another batch, in no more micro-batches than it fills."""
        return replace(self, global_batch=global_batch).within(self.micro_batches)

    def within(self, micro_batches: int) -> Training:
        """Return the training in so many micro-batches, or in as many of their size as the batch fills."""
        size = math.ceil(self.global_batch / micro_batches)
        return replace(self, micro_batches=math.ceil(self.global_batch / size))

    @property
    def forwards(self) -> int:
        """Return how often the forward pass runs in an iteration's micro-batch."""
        return 2 if self.checkpointing else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Stages that a plan may be made of, one a row: layers ``start`` to ``end`` (exclusive) on
    ``dp * tp`` GPUs. All arrays have shape (K,)."""

    start: Ints
    end: Ints
    dp: Ints
    tp: Ints
    ep: Ints  # GPUs over which experts are divided; 1: each keeps all. Divides dp * tp
    sp: Bools  # activations between tensor-parallel parts are divided by sequence (Korthikanti et al. 2022)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def gpus(self) -> Ints:
        """Return the GPUs of each, shape (K,)."""
        return self.dp * self.tp

    def rows(self, at: Ints) -> Candidates:
        """Return these rows."""
        return Candidates(
            start=self.start[at],
            end=self.end[at],
            dp=self.dp[at],
            tp=self.tp[at],
            ep=self.ep[at],
            sp=self.sp[at],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """What candidates cost, row for row. Shape (K,); times in seconds, of the slowest GPU of the stage.

    ``inf`` in ``forward_s``: it cannot run (a degree above the layer's limit, a micro-batch that replicas
    cannot share).
    """

    candidates: Candidates
    forward_s: Floats  # computing one micro-batch
    backward_s: Floats  # with the repeated forward pass, if any
    comm_s: Floats  # collectives inside the stage, of one micro-batch, both passes
    send_s: Floats  # handing one micro-batch on and getting its gradient back; 0 for the last layer
    receive_s: (
        Floats  # the same with the stage before, taken to be like this one; 0 for the first layer
    )
    sync_s: Floats  # gradients, once an iteration
    update_s: Floats  # optimizer, once an iteration
    state_bytes: Floats  # parameters, gradients, optimizer states on one GPU
    flight_bytes: Floats  # activations kept on one GPU for each micro-batch in flight
    working_bytes: Floats  # alive only while a layer is computed, with buffers of collectives

    @property
    def busy_s(self) -> Floats:
        """Return seconds of a micro-batch in the stage, both passes, with its collectives."""
        return self.forward_s + self.backward_s + self.comm_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a plan: layers ``start`` to ``end`` (exclusive), ``dp`` replicas of ``tp`` GPUs."""

    start: int
    end: int
    dp: int
    tp: int
    ep: int = 1
    sp: bool = False

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in order, with the time and memory that the cost model gives them."""

    stages: tuple[Stage, ...]
    micro_batches: int
    iter_time_s: float
    memory_bytes: tuple[float, ...]  # of the fullest GPU of each stage

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(stage.gpus for stage in self.stages)


class Compute(Protocol):
    """Where the time of kernels comes from: a roofline, or a profile."""

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L).

        Row d: ``samples[d]`` samples in ``1 / tp[d]`` of the layer. Backward holds no repeated forward pass.
        """
        ...


class Primitive(StrEnum):
    """A collective operation; ``SEND`` is from one GPU to another."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Where collectives run, one a row, shape (K,): ``size`` GPUs evenly on ``nodes`` nodes, while
    ``beside`` such groups (itself included) use the same nodes."""

    size: Ints
    nodes: Ints
    beside: Ints


class Network(Protocol):
    """Where the time of collectives comes from: a model of links, or measured tables."""

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        """Return seconds of each collective, shape (K,); 0 for groups of one GPU.

        ``payload_bytes`` is the full tensor: all-reduce and reduce-scatter each GPU's input, all-gather each
        GPU's output, all-to-all each GPU's input, send the message.
        """
        ...
