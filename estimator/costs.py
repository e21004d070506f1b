"""Costs of candidate stages as arrays: kernels, collectives, gradients, updates, transfers, memory.

A candidate is a contiguous segment of layers on ``dp * tp`` GPUs. Everything that depends on a
layer and a setting (dp, tp, ep, sp, micro-batch) is computed once for each distinct setting. Running
sums over the layers then give each segment's cost as the difference of two values. What ZeRO,
offload and recomputation change is added last, so that one table of terms serves all of them.
``docs/estimator/iteration-time.md`` describes the groups and the collectives that run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.hardware import Hardware
from tessera.estimator.layouts import settings_of
from tessera.estimator.memory import MemoryCopies, States, parameter_bytes, state_bytes
from tessera.estimator.plans import (
    Candidates,
    Compute,
    Groups,
    Network,
    Primitive,
    Shape,
    StageCosts,
    Training,
    powers_dividing,
    powers_of_two,
)
from tessera.estimator.pricing.compute import plan_compute
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.execution_plan import Recomputation

UPDATE_UTILISATION = 0.8
"""Share of the memory bandwidth that the optimizer's kernels reach. They only stream."""


def candidates_of(
    graph: Graph,
    shape: Shape,
    *,
    stage_gpus: Sequence[int] | None = None,
    expert_parallel: bool = True,
    sequence_parallel: bool = True,
) -> Candidates:
    """Return every segment of layers on every number of GPUs under every allowed setting.

    The number of GPUs of a stage is a power of two. A single stage (a job without a pipeline) may
    also have all GPUs. Tensor and expert degrees are powers of two that divide the GPUs. They are
    within the limits of the segment's layers, and each GPU has the same number of experts. Settings
    that change nothing are left out: expert degrees without experts, and sequence parallelism
    without a tensor group.
    """
    total = shape.gpus
    counts = sorted({*powers_of_two(total), total}) if stage_gpus is None else sorted(stage_gpus)
    settings = np.array(
        [
            (gpus // tp, tp, ep, sp)
            for gpus in counts
            for tp in powers_dividing(gpus)
            for ep in (powers_dividing(gpus) if expert_parallel else [1])
            for sp in ((0, 1) if sequence_parallel and tp > 1 else (0,))
        ],
        dtype=np.int64,
    ).reshape(-1, 4)
    start, end = np.triu_indices(len(graph))
    end = end + 1
    tensor_limit = _over_segments(graph.tensor_limit, np.minimum, start, end)
    experts = _over_segments(graph.experts, np.maximum, start, end)
    fits = (settings[None, :, 1] <= tensor_limit[:, None]) & (
        np.maximum(experts, 1)[:, None] % settings[None, :, 2] == 0
    )
    segment, setting = np.nonzero(fits)
    dp, tp, ep, sp = settings[setting].T
    return Candidates(
        start=start[segment].astype(np.int64),
        end=end[segment].astype(np.int64),
        dp=dp,
        tp=tp,
        ep=ep,
        sp=sp.astype(bool),
    )


def _over_segments(column: Floats, by: np.ufunc, start: Ints, end: Ints) -> Floats:
    """Return the minimum or maximum of a layer's column (L,) over each segment, shape (K,)."""
    padded = np.append(column, column[-1:])
    ends = np.stack([start, end], axis=1).ravel()
    return np.asarray(by.reduceat(padded, ends)[::2], dtype=np.float64)


def drop_idle_degrees(graph: Graph, candidates: Candidates) -> Candidates:
    """Return candidates in which a stage without experts has no expert degree."""
    experts = _over_segments(graph.experts, np.maximum, candidates.start, candidates.end)
    return replace(candidates, ep=np.where(experts > 1, candidates.ep, 1))


class StageTerms:
    """The terms of the costs of candidates, before ZeRO, offload and recomputation are chosen.

    ``micro_batch`` is the samples of a micro-batch, one number or one for each candidate.
    """

    def __init__(
        self,
        graph: Graph,
        training: Training,
        hardware: Hardware,
        shape: Shape,
        candidates: Candidates,
        compute: Compute,
        network: Network,
        micro_batch: int | Ints,
    ) -> None:
        """Cost the kernels and the collectives of a pass."""
        self._graph, self._training, self._hardware = graph, training, hardware
        self._compute, self._network, self.candidates = compute, network, candidates
        each = np.broadcast_to(np.asarray(micro_batch, dtype=np.int64), candidates.start.shape)
        self._settings, self._which = settings_of(candidates, each, shape)
        self._can_run = _can_run(graph, candidates, each)

    def costs(self, states: States, recomputed: Recomputation, copies: MemoryCopies) -> StageCosts:
        """Return the costs of the candidates under these choices."""
        forward_s, backward_s, comm_s = self._passes_s(states, recomputed)
        send_s, receive_s = self._handed_s
        return StageCosts(
            candidates=self.candidates,
            forward_s=forward_s,
            backward_s=backward_s,
            comm_s=comm_s,
            send_s=send_s,
            receive_s=receive_s,
            sync_s=self._syncs_s(states.zero),
            update_s=_updates_s(self._graph, self._training, self._hardware, self._rows, states),
            state_bytes=self._rows.states(self._graph, self._training, states),
            flight_bytes=self._rows.flight_bytes(recomputed),
            working_bytes=self._rows.working_bytes(recomputed, states, copies),
        )

    def busy_s(self, states: States, recomputed: Recomputation) -> Floats:
        """Return the seconds of a micro-batch in each candidate, as in the costs, shape (K,)."""
        return np.asarray(sum(self._passes_s(states, recomputed)), dtype=np.float64)

    def _passes_s(self, states: States, recomputed: Recomputation) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of forward and backward passes and of collectives, each of shape (K,)."""
        forwards = 2 if recomputed is Recomputation.FULL else 1
        forward_s, backward_s = self._kernels_s
        backward_s = backward_s + (forwards - 1) * forward_s
        if recomputed is Recomputation.SELECTIVE:
            backward_s = backward_s + self._attention_s
        comm_s = (forwards + 1) * self._passed_s
        if states.zero >= 2:
            scattered_s, gathered_s = self._divided_s
            comm_s = comm_s + scattered_s
            if states.zero == 3:
                comm_s = comm_s + (forwards + 1) * gathered_s
        if states.offload_parameters:
            comm_s = comm_s + (forwards + 1) * self._fetch_s(states)
        return np.where(self._can_run, forward_s, np.inf), backward_s, comm_s

    def _summed(self, layers: Floats, which: Ints | None = None) -> Floats:
        """Return the sums over segments, shape (K,), of the layer costs of settings, shape (D, L)."""
        total = np.zeros((layers.shape[0], layers.shape[1] + 1))
        np.cumsum(layers, axis=1, out=total[:, 1:])
        at = self._which if which is None else which
        summed = total[at, self.candidates.end] - total[at, self.candidates.start]
        return np.asarray(summed, dtype=np.float64)

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self._graph, self.candidates, self._settings.samples[self._which])

    @cached_property
    def _distinct_kernels(self) -> tuple[Floats, Ints, Ints]:
        """Return the samples and tensor degrees of distinct kernels, and those of each candidate."""
        settings = self._settings
        pairs = np.stack([settings.samples, settings.tp], axis=1)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        return distinct[:, 0], distinct[:, 1].astype(np.int64), which[self._which]

    @cached_property
    def _kernels_s(self) -> tuple[Floats, Floats]:
        """Return the forward and backward seconds of each candidate's kernels, shape (K,)."""
        samples, tp, which = self._distinct_kernels
        forward, backward = self._compute.layer_s(self._graph, self._training, samples, tp)
        return self._summed(forward, which), self._summed(backward, which)

    @cached_property
    def _attention_s(self) -> Floats:
        """Return the forward seconds of each candidate's attention, shape (K,)."""
        samples, tp, which = self._distinct_kernels
        kernels = plan_compute(self._compute, self._hardware)
        return self._summed(kernels.attention_s(self._graph, self._training, samples, tp), which)

    @cached_property
    def _passed_s(self) -> Floats:
        """Return the seconds of a micro-batch's collectives in one pass, shape (K,).

        Each backward pass mirrors its forward pass (Megatron-LM, figure 4). A repeated forward pass
        repeats the collectives as well.
        """
        graph, settings = self._graph, self._settings
        width, spread = graph.element_bytes, _Spread(self._network, graph)
        count = message_counts(graph)
        each_s = np.zeros((len(settings.dp), len(graph)))
        if (settings.tp > 1).any():
            reduced = width * settings.samples[:, None] * graph.reduced / count
            whole, tensor = ~settings.sp, settings.tensor
            each_s[whole] = spread.seconds(Primitive.ALL_REDUCE, reduced, tensor, whole)
            if settings.sp.any():
                for primitive in (Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER):
                    each_s[~whole] += spread.seconds(primitive, reduced, tensor, ~whole)
            each_s *= count
        if (settings.ep > 1).any():
            share = (settings.samples / settings.tp)[:, None]
            half = width * share * graph.exchanged / 2  # to the experts, and the same amount back
            each_s += 2 * spread.seconds(Primitive.ALL_TO_ALL, half, settings.expert)
        return self._summed(each_s)

    @cached_property
    def _divided_s(self) -> tuple[Floats, Floats]:
        """Return the seconds that ZeRO adds to a micro-batch, each of shape (K,).

        They are those to reduce divided gradients after a backward pass (stages 2 and 3), and to
        gather divided weights before each pass (stage 3; ZeRO, section 7).
        """
        graph, settings, width = self._graph, self._settings, self._graph.element_bytes
        spread = _Spread(self._network, graph)
        distinct, which = settings.without_samples()
        own = width * (graph.weights / distinct.tp[:, None] + graph.shared_weights)
        experts = width * graph.expert_weights / distinct.ep[:, None]
        scattered_s, gathered_s = (
            self._summed(
                spread.seconds(primitive, own, distinct.data)
                + spread.seconds(primitive, experts, distinct.expert_data),
                which[self._which],
            )
            for primitive in (Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER)
        )
        return scattered_s, gathered_s

    def _fetch_s(self, states: States) -> Floats:
        """Return the seconds in which a micro-batch's weights come from the host, shape (K,).

        Each replica fetches its part before each pass, and nothing hides it (ZeRO-Infinity, SC
        2021, sections 4.1 and 6.1).
        """
        rows = self._rows
        own = (rows.own + rows.shared) / rows.dp + rows.experts / rows.expert_replicas
        rate = states.moved_bytes_per_s(self._hardware)
        return np.asarray(self._graph.element_bytes * own / rate, dtype=np.float64)

    @cached_property
    def _handed_s(self) -> tuple[Floats, Floats]:
        """Return the seconds to exchange a micro-batch's activations and gradients with neighbours.

        The first result is for the next stage, the second for the one before. Both have shape (K,).
        Nothing is sent before the first layer or after the last.

        Each GPU sends its part of the tensor group's activations to a partner in the next stage
        (Narayanan et al., SC 2021, section 4.1), where they are gathered. The next stage is assumed
        to be like this one. A job on several nodes has a pair of stages on different nodes, and its
        slower path counts for all.
        """
        graph, settings = self._graph, self._settings
        start, end = self.candidates.start, self.candidates.end
        if settings.shape.gpus < 2 or len(graph) < 2:
            return np.zeros(len(start)), np.zeros(len(start))
        pairs = Groups(
            size=np.full_like(settings.gpus, 2),
            nodes=np.full_like(settings.gpus, min(settings.shape.nodes, 2)),
            node_groups=np.minimum(settings.gpus, settings.shape.gpus_per_node),
        )
        spread = _Spread(self._network, graph)
        payload = graph.element_bytes * settings.samples[:, None] * graph.boundary
        sent_s = spread.seconds(Primitive.SEND, payload / settings.tp[:, None], pairs)
        whole = ~settings.sp & (settings.tp > 1)
        sent_s[whole] += spread.seconds(Primitive.ALL_GATHER, payload, settings.tensor, whole)
        taken_s = np.zeros((len(settings.dp), len(graph) + 1))
        taken_s[:, 1:-1] = 2 * sent_s[:, :-1]
        return taken_s[self._which, end], taken_s[self._which, start]

    def _syncs_s(self, zero: int) -> Floats:
        """Return the seconds of the gradient exchange between replicas, once per iteration.

        Under ZeRO, the updated parts are gathered. ZeRO 2 and 3 have already reduced the gradients
        among replicas, but not yet the weights that tensor parts share.
        """
        match zero:
            case 0:
                return self._exchanged_s(Primitive.ALL_REDUCE)
            case 1:
                return self._gradients_gathered_s + self._exchanged_s(Primitive.REDUCE_SCATTER)
            case 2:
                return self._gradients_gathered_s + self._shared_s
            case _:
                return self._shared_s

    @cached_property
    def _shared_s(self) -> Floats:
        """Return the seconds to add up gradients of weights that tensor parts share, shape (K,)."""
        rows = self._rows
        payload = self._graph.element_bytes * np.where(rows.sp, rows.shared, 0.0)
        groups = _select_groups(self._settings.tensor, self._which)
        return _positive_s(self._network, Primitive.ALL_REDUCE, payload, groups)

    @cached_property
    def _gradients_gathered_s(self) -> Floats:
        return self._exchanged_s(Primitive.ALL_GATHER)

    def _exchanged_s(self, primitive: Primitive) -> Floats:
        """Return the seconds of a collective on all gradients of each candidate.

        Weights are exchanged over the data-parallel group, and an expert's weights over the GPUs
        that also hold it. Weights that tensor parts share have equal gradients on each part, unless
        the parts hold different positions of a sequence.
        """
        rows, settings = self._rows, self._settings

        def taken_s(parameters: Floats, groups: Groups) -> Floats:
            payload = self._graph.element_bytes * parameters
            return _positive_s(
                self._network, primitive, payload, _select_groups(groups, self._which)
            )

        split = np.where(rows.sp, rows.shared, 0.0)
        total_s = taken_s(rows.own + rows.shared - split, settings.data)
        if split.any():
            total_s = total_s + taken_s(split, settings.everyone)
        if self._graph.expert_weights.any():
            total_s = total_s + taken_s(rows.experts, settings.expert_data)
        return total_s


def _can_run(graph: Graph, candidates: Candidates, micro_batch: Ints) -> Bools:
    """Return which candidates can run, with their samples of a micro-batch, shape (K,).

    Their degrees must be within the limits of the layers, and replicas need equal numbers of samples.
    """
    start, end = candidates.start, candidates.end
    tensor_limit = _over_segments(graph.tensor_limit, np.minimum, start, end)
    experts = _over_segments(graph.experts, np.maximum, start, end)
    runs = (candidates.tp <= tensor_limit) & (micro_batch % candidates.dp == 0)
    runs &= np.maximum(experts, 1) % candidates.ep == 0
    runs &= candidates.gpus % candidates.ep == 0
    return np.asarray(runs & (start < end), dtype=np.bool_)


def message_counts(graph: Graph) -> Floats:
    """Return the number of all-reduces that carry a layer's ``reduced``, shape (L,).

    Each of them is as large as the layer's boundary. The last layer hands nothing on, so the
    boundary before it is used.
    """
    before = np.concatenate([graph.boundary[:1], graph.boundary[:-1]])
    message = np.where(graph.boundary > 0, graph.boundary, before)
    count = np.ones(len(graph))
    np.divide(graph.reduced, message, out=count, where=message > 0)
    return np.maximum(np.round(count), 1.0)


@dataclass(frozen=True, slots=True)
class _Spread:
    """A network that takes payloads of shape (D, L) for D groups, in which many layers are alike."""

    network: Network
    graph: Graph

    def seconds(
        self, primitive: Primitive, payload: Floats, groups: Groups, chosen: Bools | None = None
    ) -> Floats:
        """Return the seconds for the chosen groups, or for all of them, shape (D, L)."""
        if chosen is not None:
            payload, groups = payload[chosen], _select_groups(groups, np.flatnonzero(chosen))
        first, which = _alike_layers(self.graph)
        few = payload[:, first]
        rows = Groups(
            size=np.repeat(groups.size, len(first)),
            nodes=np.repeat(groups.nodes, len(first)),
            node_groups=np.repeat(groups.node_groups, len(first)),
        )
        return _positive_s(self.network, primitive, few.ravel(), rows).reshape(few.shape)[:, which]


def _positive_s(network: Network, primitive: Primitive, payload: Floats, groups: Groups) -> Floats:
    """Return the seconds of collectives. Where nothing is sent they are 0, without latency."""
    sent = np.flatnonzero((payload > 0) & (groups.size > 1)).astype(np.int64)
    taken = np.zeros(len(payload))
    if len(sent):
        taken[sent] = network.seconds(primitive, payload[sent], _select_groups(groups, sent))
    return taken


def _select_groups(groups: Groups, which: Ints) -> Groups:
    return Groups(
        size=groups.size[which], nodes=groups.nodes[which], node_groups=groups.node_groups[which]
    )


class _Rows:
    """Sums of graph columns over the candidates' segments, with their settings, of shape (K,)."""

    def __init__(self, graph: Graph, candidates: Candidates, samples: Floats) -> None:
        self._graph = graph
        self.start, self.end = candidates.start, candidates.end
        self.dp, self.tp, self.ep = candidates.dp, candidates.tp, candidates.ep
        self.sp, self.samples = candidates.sp, samples
        self.own = self.total(graph.weights) / self.tp
        self.shared = self.total(graph.shared_weights)
        self.experts = self.total(graph.expert_weights) / self.ep
        self.expert_replicas = np.maximum(self.dp * self.tp // self.ep, 1)

    def total(self, column: Floats) -> Floats:
        """Return the sum over each segment."""
        running = np.concatenate([[0.0], np.cumsum(column)])
        return np.asarray(running[self.end] - running[self.start], dtype=np.float64)

    def most(self, column: Floats) -> Floats:
        """Return the maximum of each segment."""
        return _over_segments(column, np.maximum, self.start, self.end)

    def divided(self, parts: Floats, whole: Floats, by: Callable[[Floats], Floats]) -> Floats:
        """Return ``by`` of ``parts`` and ``whole`` as each GPU of a tensor group holds them.

        A tensor group always divides ``parts``, but ``whole`` only with sequence parallelism.
        """
        return by(parts) / self.tp + by(whole) / np.where(self.sp, self.tp, 1)

    def states(self, graph: Graph, training: Training, states: States) -> Floats:
        """Return the bytes of states on a GPU."""
        dense = state_bytes(graph, training, states, self.own + self.shared, self.dp)
        return dense + state_bytes(graph, training, states, self.experts, self.expert_replicas)

    def flight_bytes(self, recomputed: Recomputation) -> Floats:
        """Return the bytes of a micro-batch that a GPU keeps between the two passes.

        They are the inputs of layers and whatever else a backward pass needs. Inputs are whole on
        each tensor part unless the sequence is divided. The rest is not kept if the forward pass is
        repeated, and the scores of attention are not kept if attention is.
        """
        graph, inputs = self._graph, _inputs(self._graph)
        if recomputed is Recomputation.FULL:
            scalars = self.divided(np.zeros(len(graph)), inputs, self.total)
        else:
            again = graph.attention_kept if recomputed is Recomputation.SELECTIVE else 0.0
            kept = graph.kept - again - graph.unsplit
            scalars = self.divided(kept, inputs + graph.unsplit, self.total)
        return np.asarray(graph.element_bytes * self.samples * scalars, dtype=np.float64)

    def working_bytes(
        self, recomputed: Recomputation, states: States, copies: MemoryCopies
    ) -> Floats:
        """Return the bytes in use while a micro-batch is computed, but not between its passes.

        They are the largest layer's activations with their gradients, the input and output of a
        stage, and the buffers of collectives. If the forward pass is repeated, what the layer keeps
        is added. If only attention is, its scores are made again, and are in the working set.
        """
        graph = self._graph
        repeated = 1.0 if recomputed is Recomputation.FULL else 0.0
        divided, whole = repeated * (graph.kept - graph.unsplit), repeated * graph.unsplit
        alive = 2 * (graph.working + copies.unfused * graph.unfused)
        if recomputed is Recomputation.SELECTIVE:
            alive = alive + graph.attention_kept
        layer = copies.layer * self.divided(alive + divided, whole, self.most)
        stage = copies.stage * self.divided(divided, whole, self.total) if copies.stage else 0.0
        edges = _inputs(graph)[self.start] + graph.boundary[self.end - 1]
        total = self.samples * (layer + stage + edges) + self._buffers(states, copies)
        return np.asarray(graph.element_bytes * total, dtype=np.float64)

    @cached_property
    def _largest_message(self) -> Floats:
        """Return the scalars of the largest all-reduce or all-to-all of a micro-batch."""
        graph = self._graph
        reduced = self.most(graph.reduced / message_counts(graph)) * (self.tp > 1)
        exchanged = self.most(graph.exchanged) / 2 / self.tp * (self.ep > 1)
        return self.samples * np.maximum(reduced, exchanged)

    def _buffers(self, states: States, copies: MemoryCopies) -> Floats:
        """Return the scalars that collectives hold in addition to their operands.

        They are the largest message or, under ZeRO 3, the largest layer of gathered weights.
        Gradients on their way between replicas are added, except under ZeRO 2 and 3, which reduce
        them layer by layer.
        """
        graph, largest = self._graph, self._largest_message
        if states.zero < 2:
            exchanged = np.where(self.dp > 1, self.own + self.shared, 0.0)
            exchanged += np.where(self.expert_replicas > 1, self.experts, 0.0)
            return np.asarray(largest + copies.gradients * exchanged, dtype=np.float64)
        if states.zero == 2:
            return largest
        dense = self.most(graph.weights) / self.tp + self.most(graph.shared_weights)
        experts = self.most(graph.expert_weights) / self.ep
        gathered = dense * (self.dp > 1) + experts * (self.expert_replicas > 1)
        return np.asarray(np.maximum(largest, gathered), dtype=np.float64)


def _updates_s(
    graph: Graph, training: Training, hardware: Hardware, rows: _Rows, states: States
) -> Floats:
    """Return the seconds of the optimizer, which reads and writes all states once.

    Under ZeRO, each replica updates its part of the states.
    """
    shared_out = states.zero >= 1
    updated = (rows.own + rows.shared) / (rows.dp if shared_out else 1)
    updated = updated + rows.experts / (rows.expert_replicas if shared_out else 1)
    if not states.offload:
        rate = hardware.memory_bytes_per_s * UPDATE_UTILISATION
        return np.asarray(2 * training.state_bytes * updated / rate, dtype=np.float64)
    weight, gradient, _ = parameter_bytes(graph, training)
    moved_s = (weight + gradient) * updated / states.moved_bytes_per_s(hardware)
    # One host updates the states of all GPUs of the stage on its node.
    host_gpus = np.minimum(rows.dp * rows.tp, hardware.gpus_per_node)
    host_rate = states.updated_bytes_per_s(hardware, host_gpus)
    host_s = 2 * training.state_bytes * updated * host_gpus / host_rate
    return np.asarray(moved_s + host_s, dtype=np.float64)


def _inputs(graph: Graph) -> Floats:
    """Return the activations handed to each layer, shape (L,). The first layer receives none."""
    return np.concatenate([[0.0], graph.boundary[:-1]])


@lru_cache(maxsize=256)
def _alike_layers(graph: Graph) -> tuple[Ints, Ints]:
    """Return one of each kind of layers with equal messages, and the kind of each layer, shape (L,)."""
    columns = (
        message_counts(graph),
        graph.boundary,
        graph.reduced,
        graph.exchanged,
        graph.weights,
        graph.expert_weights,
        graph.shared_weights,
    )
    layers = np.ascontiguousarray(np.stack(columns, axis=1))
    rows = layers.view(np.dtype((np.void, layers.itemsize * len(columns))))[:, 0]
    _, first, which = np.unique(rows, return_index=True, return_inverse=True)
    return first.astype(np.int64), which.astype(np.int64)
