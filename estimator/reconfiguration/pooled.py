"""Our model of reconfigurable training: the parts of an iteration, added up, with shared rates.

It has the parts of the published model (Morphling, appendix A), and differs in five points.

* Rates of machines are of the cluster. All models share them, and each may deviate a little
  (:mod:`tessera.estimator.reconfiguration.pooling`).
* Ports of nodes are shared by neighbouring GPUs. What a group of replicas reaches over the network
  depends on its GPUs on each node, so uneven placements are slower.
* Launching kernels, starting ZeRO and passing activations on take time that does not shrink with
  the batch. The host's part of ZeRO-Offload has a part that replicas do not divide.
* Stages of a pipeline that share a node pass activations on over its own links.
* Nothing is assumed to overlap. What overlaps shows as a lower factor of the synchronisation.

Arrays have shape (K,), one value for each configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.estimator.reconfiguration.configurations import (
    HALF_BYTES,
    SINGLE_BYTES,
    ConfigurationTable,
)
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.execution_plan import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledParameter:
    """A positive parameter, with its usual value and spreads.

    The standard deviations are those of its logarithm: of the value that all models share, and of
    what a model deviates from it.
    """

    name: str
    value: float
    shared_sd: float
    model_sd: float


def _parameter(name: str, value: float, shared_sd: float, model_sd: float) -> PooledParameter:
    return PooledParameter(name=name, value=value, shared_sd=shared_sd, model_sd=model_sd)


POOLED_PARAMETERS: Final = (
    # Both passes over the forward pass: the backward pass has twice its products.
    _parameter("passes_ratio", 3.2, 0.2, 0.25),
    # Launching the kernels of both passes: some 2,000 kernels at 10 us.
    _parameter("launch_s", 0.02, 0.7, 0.7),
    _parameter("constant_s", 0.005, 0.7, 0.7),
    # Shares of the data sheet's bandwidths that collectives reach (NVLink, ports, tensor parts).
    _parameter("intra_share", 0.5, 0.5, 0.15),
    _parameter("port_share", 0.8, 0.3, 0.15),
    _parameter("tensor_share", 0.5, 0.5, 0.3),
    # Volume of the synchronisation over that of gradients in single precision.
    _parameter("sync_factor", 1.0, 0.1, 0.3),
    _parameter("zero_sync_factor", 1.0, 0.2, 0.2),
    # Slowdown of the synchronisation by each node beyond the second.
    _parameter("node_slowdown", 0.04, 0.7, 0.3),
    # An unfused Adam reads and writes some 30 bytes of a parameter three times, at 2 TB/s.
    _parameter("update_s_per_parameter", 5e-11, 0.5, 0.3),
    # A core reads and writes 32 bytes of a parameter at 16 GB/s.
    _parameter("host_core_s_per_parameter", 2e-9, 0.7, 1.0),
    # The part of the host's step that replicas do not divide, e.g. gathering and copying.
    _parameter("host_fixed_s_per_parameter", 2e-10, 0.7, 0.7),
    # Moved bytes over those of a copy of all gradients in single precision.
    _parameter("offload_factor", 0.8, 0.7, 0.5),
    # The passes of the runtime for tensor and pipeline parallelism over those of plain replicas.
    _parameter("runtime_ratio", 1.0, 0.3, 1.0),
    # Launching its kernels over launching those of plain replicas: it launches more of them, and
    # the ranks of a tensor group wait for the slowest in each layer.
    _parameter("runtime_launch_ratio", 3.0, 0.7, 1.0),
    # Time that a pipeline takes to pass activations on, over volume by a port's bandwidth.
    _parameter("pipeline_factor", 3.0, 0.7, 1.5),
    # Waiting of the ranks of two stages for each other, in both passes of an iteration.
    _parameter("handover_s", 0.01, 0.7, 1.0),
    # A forward pass that is computed again, over both passes.
    _parameter("repeat_share", 1 / 3, 0.1, 0.1),
    _parameter("zero_s", 0.005, 0.7, 0.7),
    # Factors of placements that leave pairs of GPUs divided: unequal nodes, and one GPU on each.
    _parameter("divided_factor", 1.0, 0.05, 0.25),
    _parameter("single_factor", 1.0, 0.05, 0.15),
    # The share of the synchronisation that a runtime counts to the passes, not to the optimizer.
    _parameter("zero_sync_in_passes", 0.5, 0.2, 0.1),
    _parameter("offload_sync_in_passes", 0.75, 0.2, 0.1),
    # What a runtime's breakdown leaves out, over the rest.
    _parameter("unrecorded_share", 0.02, 0.5, 0.3),
)
"""The parameters, in the order of columns. Values are orders of magnitude from data sheets; spreads
say how far they are trusted. None was fitted to measurements."""

ParameterValues = Mapping[str, Floats]
"""The values of the parameters by name, each of shape (K,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterationParts:
    """Seconds of iterations, and of the two parts that runtimes record, each of shape (K,)."""

    iteration_s: Floats
    busy_s: Floats  # passes, and the synchronisation that a runtime counts to them
    update_s: Floats  # optimizer, and the rest of the synchronisation


def pooled_parts(table: ConfigurationTable, values: ParameterValues) -> IterationParts:
    """Return the seconds of iterations and of their recorded parts."""
    passes, sync = passes_s(table, values), sync_s(table, values)
    moved = np.where(table.offload, offload_s(table, values), 0.0)
    has_zero = table.zero > ZeroStage.NONE
    update = np.where(table.offload, host_update_s(table, values), gpu_update_s(table, values))
    update = update + np.where(has_zero, values["zero_s"], 0.0)
    share = np.where(has_zero, values["zero_sync_in_passes"], 1.0)
    share = np.where(table.offload, values["offload_sync_in_passes"], share)
    share = np.where(has_model_parallelism(table), 0.0, share)
    factor = placement_factor(table, values)
    total = (passes + sync + moved + update + values["constant_s"]) * factor
    return IterationParts(
        iteration_s=total * (1 + values["unrecorded_share"]),
        busy_s=(passes + share * sync + moved) * factor,
        update_s=update + np.where(has_zero, (1 - share) * sync, 0.0),
    )


def has_model_parallelism(table: ConfigurationTable) -> Bools:
    """Return whether tensor or pipeline parallelism divides the model."""
    return np.asarray(table.tp * table.pp > 1, dtype=np.bool_)


def passes_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds of all passes with the communication of tensor and pipeline parts."""
    repeated = 1 + np.where(table.checkpointing, values["repeat_share"], 0.0)
    # A stated forward time is that of the runtime that runs here.
    is_other = has_model_parallelism(table) & ~table.is_stated
    computed = values["passes_ratio"] * np.where(is_other, values["runtime_ratio"], 1.0)
    computed = computed * table.forward_s
    turns = (table.micro_batches + table.pp - 1) / table.pp
    launched = values["launch_s"] * np.where(is_other, values["runtime_launch_ratio"], 1.0) * turns
    per_pass = (computed + launched) * repeated + turns * tensor_s(table, values)
    return np.asarray(table.accumulation * per_pass + pipeline_s(table, values), dtype=np.float64)


def tensor_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds of the all-reduces of a pass through all layers: four for each layer.

    Tensor parts on several nodes are as slow as a port.
    """
    activations = table.samples * table.sequence * table.hidden * table.layers
    volume = HALF_BYTES * 4 * 2 * (table.tp - 1) / table.tp * activations
    is_split = (table.nodes > 1) & (table.fewest_gpus % table.tp != 0)
    inside = values["tensor_share"] * table.intra_bytes_per_s
    rate = np.where(is_split, port_bytes_per_s(table, values), inside)
    return np.asarray(volume / rate, dtype=np.float64)


def pipeline_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds in which stages pass activations and their gradients on.

    Each boundary between stages has a part by volume and a constant one. As many boundaries as nodes
    allow are between nodes, where a port limits them. The others are inside.
    """
    volume = HALF_BYTES * 2 * table.samples * table.sequence * table.hidden
    boundaries = table.pp - 1
    outside = np.minimum(boundaries, table.nodes - 1)
    inside_rate = values["intra_share"] * table.intra_bytes_per_s
    by_volume = volume * (
        outside / port_bytes_per_s(table, values) + (boundaries - outside) / inside_rate
    )
    handed_s = values["pipeline_factor"] * by_volume + values["handover_s"] * boundaries
    return np.asarray(handed_s, dtype=np.float64)


def port_bytes_per_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return what collectives reach over a port of a node."""
    peak = table.inter_bytes_per_s / table.ports_per_node
    return np.asarray(values["port_share"] * peak, dtype=np.float64)


def reached_ports(table: ConfigurationTable) -> Floats:
    """Return the ports that a group of replicas has to itself on its tightest node.

    Neighbouring GPUs share a port. Replicas without tensor parts are in one group, which has every
    port near one of its GPUs. Otherwise neighbours are of different groups, and each GPU of a group
    has its part of a port.
    """
    per_port = table.gpus_per_node / table.ports_per_node
    alone = np.ceil(table.fewest_gpus / per_port)
    members = np.where(is_misaligned(table), 1, np.maximum(table.fewest_gpus // table.tp, 1))
    return np.asarray(np.where(table.tp == 1, alone, members / per_port), dtype=np.float64)


def is_misaligned(table: ConfigurationTable) -> Bools:
    """Return whether nodes cut the tensor parts or the stages of a plan at uneven places."""
    stage = table.dp * table.tp
    cuts_parts = table.fewest_gpus % table.tp != 0
    cuts_stages = (stage % table.fewest_gpus != 0) & (table.fewest_gpus % stage != 0)
    is_cut = (table.nodes > 1) & has_model_parallelism(table) & (cuts_parts | cuts_stages)
    return np.asarray(is_cut, dtype=np.bool_)


def sync_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds in which replicas exchange gradients, and gather parameters under ZeRO."""
    stage = table.dp * table.tp
    volume = SINGLE_BYTES * table.parameters * 2 * (table.dp - 1) / (stage * table.pp)
    spans = (table.nodes > 1) & ((stage > table.fewest_gpus) | is_misaligned(table))
    inside = values["intra_share"] * table.intra_bytes_per_s
    outside = np.minimum(port_bytes_per_s(table, values) * reached_ports(table), inside)
    nodes = np.where(
        has_model_parallelism(table), np.maximum(stage / table.fewest_gpus, 1), table.nodes
    )
    slowdown = 1 + np.where(spans, values["node_slowdown"] * np.maximum(nodes - 2, 0), 0.0)
    factor = np.where(
        table.zero > ZeroStage.NONE, values["zero_sync_factor"], values["sync_factor"]
    )
    return np.asarray(
        factor * slowdown * volume / np.where(spans, outside, inside), dtype=np.float64
    )


def gpu_update_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds of an optimizer on GPUs, which tensor parts, stages and ZeRO divide."""
    replicas = np.where(table.zero > ZeroStage.NONE, table.dp, 1)
    updated = table.parameters / (table.tp * table.pp * replicas)
    return np.asarray(values["update_s_per_parameter"] * updated, dtype=np.float64)


def host_update_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds of an optimizer on hosts: a part by replicas and cores, and a fixed one."""
    divided = values["host_core_s_per_parameter"] / (table.dp * table.update_cores)
    per_parameter = values["host_fixed_s_per_parameter"] + divided
    return np.asarray(per_parameter * table.parameters, dtype=np.float64)


def offload_s(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the seconds in which gradients go to the host during the passes."""
    volume = SINGLE_BYTES * table.parameters
    return np.asarray(values["offload_factor"] * volume / table.pcie_bytes_per_s, dtype=np.float64)


def placement_factor(table: ConfigurationTable, values: ParameterValues) -> Floats:
    """Return the slowdown where pairs of GPUs that share a port are divided between jobs.

    It is not applied to ZeRO-Offload or to tensor and pipeline parallelism.
    """
    applies = (table.nodes > 1) & ~table.offload & ~has_model_parallelism(table)
    is_single = table.is_even & (table.fewest_gpus == 1)
    factor = np.where(table.has_odd_node & ~table.is_even, values["divided_factor"], 1.0)
    factor = np.where(is_single, values["single_factor"], factor)
    return np.asarray(np.where(applies, factor, 1.0), dtype=np.float64)
