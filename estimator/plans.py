"""Execution plans: GPUs, training settings, candidate stages with their costs, and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final, Protocol

from tessera.estimator.graph import Graph
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.execution_plan import PlanStage, Recomputation, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Numbers of GPUs on some nodes, which are equal except perhaps on the last node."""

    nodes: int
    gpus_per_node: int
    on_last_node: int = 0
    """GPUs on the last node if it has fewer than the others. 0 means as many as the others."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(self.each_node)

    @property
    def each_node(self) -> tuple[int, ...]:
        """Return the GPUs of each node, falling."""
        most = self.gpus_per_node
        return (most,) * (self.nodes - 1) + (self.on_last_node or most,)


MAX_SHAPES: Final = 3
"""Number of shapes for which the Cells of a GPU count are estimated: the fewest nodes that the GPUs
fit on, twice and four times as many."""


def shape_of(gpus: int, node_gpus: int) -> Shape:
    """Return the shape with the fewest nodes of ``node_gpus`` GPUs.

    The GPUs are spread evenly if they can be. Otherwise all nodes but the last are full.
    """
    nodes = -(-gpus // node_gpus)
    if gpus % nodes == 0:
        return Shape(nodes=nodes, gpus_per_node=gpus // nodes)
    rest = gpus - (nodes - 1) * node_gpus
    return Shape(nodes=nodes, gpus_per_node=node_gpus, on_last_node=rest)


def shapes_of(gpus: int, node_gpus: int, nodes: int | None = None) -> list[Shape]:
    """Return the shapes to estimate, the most compact one first, at most :data:`MAX_SHAPES`.

    The wider ones have twice as many nodes as the one before, and equal numbers of GPUs on each.
    They have at most ``nodes`` nodes, or any number if it is None.
    """
    shapes = [shape_of(gpus, node_gpus)]
    for _ in range(1, MAX_SHAPES):
        wider = 2 * shapes[-1].nodes
        if gpus % wider or (nodes is not None and wider > nodes):
            break
        shapes.append(Shape(nodes=wider, gpus_per_node=gpus // wider))
    return shapes


def shape_on(gpus: int, nodes: int, node_gpus: int) -> Shape | None:
    """Return the estimated shape of ``gpus`` GPUs on ``nodes`` nodes, or None without one."""
    if gpus % nodes == 0:
        return Shape(nodes=nodes, gpus_per_node=gpus // nodes)
    shape = shape_of(gpus, node_gpus)
    return shape if shape.nodes == nodes else None


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to ``most``."""
    return [2**k for k in range(most.bit_length())] if most > 0 else []


def powers_dividing(count: int) -> list[int]:
    """Return the powers of two that divide ``count``."""
    return [power for power in powers_of_two(count) if count % power == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The settings of a training job that are the same wherever it runs."""

    global_batch: int
    micro_batches: int = 16
    state_bytes: float = 16.0
    """Bytes of a parameter with its gradient and optimizer states.

    The default is Adam's (ZeRO, SC 2020, section 3.1).
    """
    checkpointing: bool = False
    """Whether only boundaries are kept, and the backward pass repeats the forward pass."""
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def micro_batch(self) -> int:
        """Return the samples of a micro-batch. The last one may have fewer."""
        return math.ceil(self.global_batch / self.micro_batches)

    def at(self, global_batch: int) -> Training:
        """Return the training at another global batch, in no more micro-batches than it fills."""
        return replace(self, global_batch=global_batch).within(self.micro_batches)

    def within(self, micro_batches: int) -> Training:
        """Return the training in at most ``micro_batches`` equal micro-batches.

        There are fewer if the global batch cannot be divided into that many equal ones.
        """
        most = min(micro_batches, self.global_batch)
        count = next(n for n in range(most, 0, -1) if self.global_batch % n == 0)
        return replace(self, micro_batches=count)

    @property
    def recomputation(self) -> Recomputation:
        """Return the recomputation that ``checkpointing`` means in plans."""
        return Recomputation.FULL if self.checkpointing else Recomputation.NONE

    @property
    def forwards(self) -> int:
        """Return the number of forward passes of a micro-batch in an iteration."""
        return 2 if self.checkpointing else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The candidate stages of plans, one per row. All arrays have shape (K,).

    A row is the layers ``start`` to ``end`` (exclusive) on ``dp * tp`` GPUs.
    """

    start: Ints
    end: Ints
    dp: Ints
    tp: Ints
    ep: Ints  # GPUs over which experts are divided; with 1, each keeps all. Divides dp * tp
    # Whether tensor-parallel parts divide activations by sequence (Korthikanti et al. 2022).
    sp: Bools

    def __len__(self) -> int:
        return len(self.start)

    @property
    def gpus(self) -> Ints:
        """Return the GPUs of each candidate, shape (K,)."""
        return self.dp * self.tp

    def rows(self, at: Ints) -> Candidates:
        """Return the candidates at these rows."""
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
    """The costs of candidates, row by row, of shape (K,), in seconds of the stage's slowest GPU.

    ``forward_s`` is ``inf`` if a candidate cannot run: a degree is above the limit of its layers,
    or the replicas cannot share a micro-batch equally.
    """

    candidates: Candidates
    forward_s: Floats  # computing one micro-batch
    backward_s: Floats  # with the repeated forward pass, if any
    comm_s: Floats  # collectives inside the stage, for one micro-batch, both passes
    send_s: Floats  # sending one micro-batch on and receiving its gradient; 0 for the last layer
    # The same with the stage before, assumed to be like this one; 0 for the first layer.
    receive_s: Floats
    sync_s: Floats  # gradients, once per iteration
    update_s: Floats  # optimizer, once per iteration
    state_bytes: Floats  # parameters, gradients, optimizer states on one GPU
    flight_bytes: Floats  # activations kept on one GPU for each micro-batch in flight
    working_bytes: Floats  # in use only while a layer is computed, with buffers of collectives

    @property
    def busy_s(self) -> Floats:
        """Return the seconds of a micro-batch in the stage, both passes, with its collectives."""
        return self.forward_s + self.backward_s + self.comm_s


COST_COLUMNS: Final = tuple(f.name for f in fields(StageCosts) if f.name != "candidates")
"""The names of the columns of :class:`StageCosts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """The stages of an execution plan, with the time and memory that the cost model predicts.

    ``stages`` count the model's own layers.
    """

    stages: tuple[PlanStage, ...]
    micro_batches: int
    iter_time_s: float
    memory_bytes: tuple[float, ...]  # of the fullest GPU of each stage

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(stage.gpus for stage in self.stages)


class Compute(Protocol):
    """A source of kernel times: a roofline or a profile."""

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L).

        Row d is for ``samples[d]`` samples in ``1 / tp[d]`` of the layer. Backward seconds do not
        include a repeated forward pass.
        """
        ...


class Primitive(StrEnum):
    """A collective operation. ``SEND`` goes from one GPU to another."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The groups of GPUs on which collectives run, one per row, shape (K,).

    The ``size`` GPUs of a group are spread evenly over ``nodes`` nodes. ``node_groups`` is the
    number of such groups on the same nodes, including the group itself.
    """

    size: Ints
    nodes: Ints
    node_groups: Ints


class Network(Protocol):
    """A source of collective times: a model of links or measured tables."""

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        """Return the seconds of each collective, shape (K,). They are 0 for groups of one GPU.

        ``payload_bytes`` is the full tensor. For all-reduce, reduce-scatter and all-to-all it is
        the input of each GPU, for all-gather the output of each GPU, and for send the message.
        """
        ...
