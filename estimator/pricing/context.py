"""Context parallelism: GPUs that divide the positions of a sequence.

A context group of ``cp`` GPUs behaves like replicas: each holds all weights of the stage, and
gradients are added up over all ``dp * cp`` of them. Instead of samples, its GPUs divide positions. A
GPU therefore computes as many samples as a replica, of which each is ``1 / cp`` as large. Attention
reads keys and values of every position, which travel around the group in a ring (Liu et al., Ring
Attention, ICLR 2024, section 3).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.layouts import settings_of
from tessera.estimator.plans import Candidates, Groups, Network, Primitive, Shape, Training
from tessera.estimator.pricing.compute import PlanCompute
from tessera.formulation.base.tables import Floats

_PER_POSITION = (
    "flops",
    "touched",
    "boundary",
    "kept",
    "unsplit",
    "working",
    "unfused",
    "reduced",
    "exchanged",
    "attention_flops",
    "attention_touched",
    "attention_kept",
    "keys_values",
    "product_touched",
)


def context_graph(graph: Graph, cp: int) -> Graph:
    """Return the graph of ``1 / cp`` of the positions of each sample.

    Causal attention is assumed to be balanced, i.e. each GPU has positions from both ends.
    """
    return replace(graph, **{name: getattr(graph, name) / cp for name in _PER_POSITION})


def context_training(training: Training, cp: int) -> Training:
    """Return the training in which a context group counts as ``cp`` replicas."""
    return replace(training, global_batch=training.global_batch * cp)


def exposed_ring_s(
    graph: Graph,
    training: Training,
    shape: Shape,
    candidates: Candidates,
    compute: PlanCompute,
    network: Network,
    cp: int,
    forwards: int,
) -> Floats:
    """Return the seconds of a micro-batch's rings that attention does not hide, shape (K,).

    ``forwards`` is the number of attention's forward passes. ``graph``, ``training`` and
    ``candidates`` are those of a context group. In a forward pass, keys and values make ``cp - 1``
    steps, each while attention on those of the step before is computed. In a backward pass their
    gradients travel with them, and attention takes twice as long.
    """
    settings, which = settings_of(candidates, training.micro_batch, shape)
    groups = settings.groups(np.full_like(settings.tp, cp), settings.tp)
    pairs = Groups(
        size=np.full_like(groups.size, 2),
        nodes=np.minimum(groups.nodes, 2),
        node_groups=groups.node_groups,
    )
    attention_s = compute.attention_s(graph, training, settings.samples, settings.tp)
    width = graph.element_bytes
    exposed_s = np.zeros_like(attention_s)
    for layer in np.flatnonzero(graph.keys_values):
        sent = width * settings.samples * graph.keys_values[layer] / settings.tp
        step_s = network.seconds(Primitive.SEND, sent, pairs)
        exposed_s[:, layer] = (cp - 1) * np.maximum(step_s - attention_s[:, layer] / cp, 0.0)
    running = np.concatenate([np.zeros((len(exposed_s), 1)), exposed_s.cumsum(axis=1)], axis=1)
    of_layers = running[which, candidates.end] - running[which, candidates.start]
    return np.asarray((forwards + 2) * of_layers, dtype=np.float64)
