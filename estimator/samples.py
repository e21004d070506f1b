"""Sample profiles of the papers' models on GPU types of the catalogue, from data sheets alone.

They let users try, benchmark and demonstrate a cluster before anything is measured on it. Only even
plans are considered, so that thousands of Cells are estimated in seconds.
``docs/estimator/planning.md`` says how much better the plans of a search are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np

from tessera.estimator.architectures.published import PublishedModel, published_models
from tessera.estimator.cells import COARSE_LAYERS, Setting, coarsen_graph, data_sheet_setting
from tessera.estimator.collectives import LinkNetwork, LinkRates
from tessera.estimator.hardware import ALL, Hardware
from tessera.estimator.memory import FUSED, States
from tessera.estimator.planning.even import EvenPlanKey, even_cuts, even_plans, least_times_s
from tessera.estimator.planning.search import latency_of
from tessera.estimator.plans import Shape, powers_dividing
from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.records.estimates import EstimateRecord

GPU_COUNTS: Final = (1, 2, 4, 8, 16, 24, 32)
PROVENANCE: Final = "analytic v2"


def sample_profiles(
    hardware: Iterable[Hardware] = ALL, gpu_counts: Iterable[int] = GPU_COUNTS
) -> list[EstimateRecord]:
    """Return the estimates of every workload on every type, count, shape and pipeline degree.

    If no plan fits a Cell, its ``iter_time_s`` is inf. Degrees above the number of coarse layers
    are left out.
    """
    counts = tuple(gpu_counts)
    return [record for kind in hardware for record in _of_type(kind, counts)]


@cache
def _of_type(hardware: Hardware, counts: tuple[int, ...]) -> tuple[EstimateRecord, ...]:
    asked = [
        (shape, d)
        for n in counts
        for shape in sample_shapes(hardware, n)
        for d in sample_degrees(n)
    ]
    records: list[EstimateRecord] = []
    for model in sampled_models():
        coarse = replace(model, graph=coarsen_graph(model.graph, COARSE_LAYERS).graph)
        for batch in coarse.batches:
            records += _records(coarse, batch, hardware, asked)
    return tuple(records)


def sampled_models() -> list[PublishedModel]:
    """Return the models of the samples, which were published with several batches (Arena, section
    5.1)."""
    return [model for model in published_models().values() if len(model.batches) > 1]


def sample_shapes(hardware: Hardware, gpus: int) -> list[Shape]:
    """Return the shape with the fewest nodes and one with twice as many, if they divide evenly."""
    fewest = math.ceil(gpus / hardware.gpus_per_node)
    return [
        Shape(nodes=nodes, gpus_per_node=gpus // nodes)
        for nodes in (fewest, 2 * fewest)
        if gpus % nodes == 0
    ]


def sample_degrees(gpus: int) -> list[int]:
    """Return the pipeline degrees: powers of two dividing ``gpus``, up to :data:`COARSE_LAYERS`."""
    return [degree for degree in powers_dividing(gpus) if degree <= COARSE_LAYERS]


def _records(
    model: PublishedModel, batch: int, hardware: Hardware, asked: Sequence[tuple[Shape, int]]
) -> Iterator[EstimateRecord]:
    """Yield the estimates of a workload on shapes at pipeline degrees.

    Its graph is already coarse.
    """
    asked = [(shape, degree) for shape, degree in asked if degree <= len(model.graph)]
    cuts: Mapping[int, list[list[int]]] = {}
    times_s: dict[tuple[int, bool], Mapping[EvenPlanKey, float]] = {}
    for largest in _largest_alike(shape for shape, _ in asked):
        setting = _setting(model, batch, hardware, largest)
        cuts = cuts or even_cuts(_loads(setting), {degree for _, degree in asked})
        alike = ((d, s.gpus // d) for s, d in asked if _likeness(s) == _likeness(largest))
        times_s[_likeness(largest)] = _times_s(setting, cuts, alike)
    work = Workload(model=model.model, params=model.params, global_batch=batch)
    for shape, degree in asked:
        yield EstimateRecord(
            workload=work,
            source=EstimateSource.ANALYTIC,
            provenance=PROVENANCE,
            cell=Cell(
                gpu_type=hardware.name, gpus=shape.gpus, pipeline_degree=degree, nodes=shape.nodes
            ),
            iter_time_s=times_s[_likeness(shape)][degree, shape.gpus // degree],
        )


def _likeness(shape: Shape) -> tuple[int, bool]:
    """Return the key of stage costs: GPUs per node, and whether a job has several nodes."""
    return shape.gpus_per_node, shape.nodes > 1


def _largest_alike(every: Iterable[Shape]) -> list[Shape]:
    """Return, among shapes with equal stage costs, the one with the most nodes.

    The table for this shape also contains all the others.
    """
    largest: dict[tuple[int, bool], Shape] = {}
    for shape in every:
        known = largest.get(_likeness(shape), shape)
        largest[_likeness(shape)] = max(known, shape, key=lambda s: s.nodes)
    return list(largest.values())


def _setting(model: PublishedModel, batch: int, hardware: Hardware, shape: Shape) -> Setting:
    """Return the setting in which a workload runs.

    Other jobs are assumed to use the other GPUs of its nodes with their part of the ports. A job
    therefore gains no network bandwidth when it is spread over more nodes.
    """
    rates = LinkRates.usual(hardware)
    part = min(shape.gpus_per_node / hardware.gpus_per_node, 1.0)
    own = replace(rates, network_bytes_per_s=part * rates.network_bytes_per_s)
    states = States(zero=model.zero)
    setting = data_sheet_setting(model.graph, model.at(batch), hardware, shape, states, FUSED)
    return replace(setting, network=LinkNetwork(hardware=hardware, shape=shape, rates=own))


def _times_s(
    setting: Setting, cuts: Mapping[int, list[list[int]]], asked: Iterable[EvenPlanKey]
) -> dict[EvenPlanKey, float]:
    """Return the seconds of the fastest even plans. A time is inf if no plan fits."""
    plans = even_plans(setting.graph, cuts, asked)
    costs = setting.costs(plans.candidates)
    training, runtime = setting.training, setting.runtime
    latency = latency_of(costs, training.micro_batches, runtime.overlap)
    memory = setting.hardware.memory_bytes
    return least_times_s(plans, costs, latency, training, memory, runtime.room)


def _loads(setting: Setting) -> list[Floats]:
    """Return the loads, each of shape (L,), by which layers are cut.

    Two loads are the times of layers on one GPU: with a micro-batch, and with an eighth of one, as
    on replicas. The third is parameters, for models that do not fit if they are cut evenly by time.
    """
    graph, training = setting.graph, setting.training
    samples = np.array([training.micro_batch, max(1, training.micro_batch // 8)], dtype=np.float64)
    ones = np.ones(len(samples), dtype=np.int64)
    forward_s, backward_s = setting.compute.layer_s(graph, training, samples, ones)
    passes_s = training.forwards * forward_s + backward_s
    return [*passes_s, graph.weights + graph.expert_weights + graph.shared_weights]
