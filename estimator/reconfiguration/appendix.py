"""The published performance model of reconfigurable training, equation by equation.

The model is that of Morphling, appendix A. It adds up the seconds of computation, communication,
optimizer and offloading, and lets some of them overlap. Seven parameters are fitted for each model
(:mod:`tessera.estimator.reconfiguration.fitting`); the rest is known.

Arrays have shape (K,), one value for each configuration. P is the number of parameters times the
bytes of one in single precision, since the text counts volumes without mixed precision.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from tessera.estimator.reconfiguration.configurations import (
    HALF_BYTES,
    SINGLE_BYTES,
    ConfigurationTable,
)
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.execution_plan import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendixParameters:
    """The seven fitted parameters of a model (Morphling, Table 5), in the order of the table."""

    backward_ratio: float  # k_bwd: backward over forward computation
    sync_overlap: float  # k_sync: exponent of the overlap of backward pass and synchronisation
    update_s_per_parameter: float  # k_opt, on a GPU
    host_update_s_per_parameter: float  # k_opt_off, on one CPU core
    offload_overlap: float  # k_off: exponent of the overlap of synchronisation and offloading
    swap_overlap: float  # k_swap: exponent of the overlap of optimizer and offloading
    constant_s: float  # k_const

    @classmethod
    def from_array(cls, values: ArrayLike) -> Self:
        """Return the parameters with these values, shape (7,)."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, np.asarray(values, dtype=float).tolist(), strict=True)))


def combine_overlapping(x_s: Floats, y_s: Floats, exponent: float) -> Floats:
    """Return ``f(k; x, y) = (x^k + y^k)^(1/k)`` (A.3), the seconds of two parts that overlap.

    It is ``x + y`` at k = 1, and tends to the larger of both as k grows. The larger one is taken
    out of the sum, so that no power overflows.
    """
    large, small = np.maximum(x_s, y_s), np.minimum(x_s, y_s)
    share = np.divide(small, large, out=np.zeros_like(large), where=large > 0)
    return np.asarray(large * (1.0 + share**exponent) ** (1.0 / exponent), dtype=np.float64)


def spans_nodes(table: ConfigurationTable) -> Bools:
    """Return whether the replicas of a pipeline stage are on several nodes.

    Tensor parts are next to each other, then replicas, then stages (Narayanan et al. 2021). So a
    stage's ``d * t`` GPUs share a node if it has room for them.
    """
    return np.asarray((table.nodes > 1) & (table.dp * table.tp > table.fewest_gpus), dtype=np.bool_)


def data_comm_s(table: ConfigurationTable) -> Floats:
    """Return T_comm_dp: ``V_dp = P * 2 (d - 1) / (d t p)`` over the slowest bandwidth (A.1)."""
    volume = SINGLE_BYTES * table.parameters * 2 * (table.dp - 1)
    volume = volume / (table.dp * table.tp * table.pp)
    rate = np.where(spans_nodes(table), table.inter_bytes_per_s, table.intra_bytes_per_s)
    return np.asarray(volume / rate, dtype=np.float64)


def tensor_comm_s(table: ConfigurationTable) -> Floats:
    """Return T_comm_tp: ``V_tp = 4 * 2 (t - 1) b s h l / (d t)`` over the bandwidth (A.1).

    A tensor-parallel group that no node can hold uses the network.
    """
    elements = table.global_batch * table.sequence * table.hidden * table.layers
    volume = HALF_BYTES * 4 * 2 * (table.tp - 1) * elements / (table.dp * table.tp)
    is_split = (table.nodes > 1) & (table.tp > table.fewest_gpus)
    rate = np.where(is_split, table.inter_bytes_per_s, table.intra_bytes_per_s)
    return np.asarray(volume / rate, dtype=np.float64)


def pipeline_comm_s(table: ConfigurationTable) -> Floats:
    """Return T_comm_pp: ``V_pp = 2 p b s h / (d t)`` over the bandwidth; 0 at p = 1 (A.1)."""
    elements = table.global_batch * table.sequence * table.hidden
    volume = HALF_BYTES * 2 * table.pp * elements / (table.dp * table.tp)
    rate = np.where(table.nodes > 1, table.inter_bytes_per_s, table.intra_bytes_per_s)
    return np.asarray(np.where(table.pp > 1, volume / rate, 0.0), dtype=np.float64)


def backward_s(table: ConfigurationTable, parameters: AppendixParameters) -> Floats:
    """Return T_bwd = ``k_bwd * T_fwd``, plus T_fwd if activations are computed again (A.1)."""
    again = np.where(table.checkpointing, table.forward_s, 0.0)
    return np.asarray(parameters.backward_ratio * table.forward_s + again, dtype=np.float64)


def compute_and_sync_s(table: ConfigurationTable, parameters: AppendixParameters) -> Floats:
    """Return T_cc: ``a T_fwd + (a - 1) T_bwd + f(k_sync; T_bwd, T_comm_dp) + T_tp + T_pp`` (A.1).

    The volumes of TP and PP are those of the global batch, so accumulation does not change them.
    """
    backward = backward_s(table, parameters)
    last = combine_overlapping(backward, data_comm_s(table), parameters.sync_overlap)
    computed = table.accumulation * table.forward_s + (table.accumulation - 1) * backward + last
    return np.asarray(computed + tensor_comm_s(table) + pipeline_comm_s(table), dtype=np.float64)


def optimizer_s(table: ConfigurationTable, parameters: AppendixParameters) -> Floats:
    """Return T_opt: ``k_opt P / x``, or ``k_opt_off P / (d c)`` under ZeRO-Offload (A.2).

    x is ``t p`` for 3D parallelism, and d for ZeRO.
    """
    replicas = np.where(table.zero > ZeroStage.NONE, table.dp, 1)
    parts = table.tp * table.pp * replicas
    on_gpu = parameters.update_s_per_parameter * table.parameters / parts
    on_host = parameters.host_update_s_per_parameter * table.parameters
    on_host = on_host / (table.dp * table.update_cores)
    return np.asarray(np.where(table.offload, on_host, on_gpu), dtype=np.float64)


def raw_offload_s(table: ConfigurationTable) -> Floats:
    """Return T_off = ``P / (d B_pcie)`` under ZeRO-Offload, otherwise 0 (A.2)."""
    moved = SINGLE_BYTES * table.parameters / (table.dp * table.pcie_bytes_per_s)
    return np.asarray(np.where(table.offload, moved, 0.0), dtype=np.float64)


def update_and_offload_s(table: ConfigurationTable, parameters: AppendixParameters) -> Floats:
    """Return T_oo: ``f(k_off; T_comm_dp, T_off) + f(k_swap; T_opt, T_off)``, or T_opt (A.2).

    As in the text, T_comm_dp also counts in T_cc under ZeRO-Offload.
    """
    update, moved = optimizer_s(table, parameters), raw_offload_s(table)
    sent = combine_overlapping(data_comm_s(table), moved, parameters.offload_overlap)
    swapped = combine_overlapping(update, moved, parameters.swap_overlap)
    return np.asarray(np.where(table.offload, sent + swapped, update), dtype=np.float64)


def appendix_iteration_s(table: ConfigurationTable, parameters: AppendixParameters) -> Floats:
    """Return T_iter = ``T_cc + T_oo + k_const`` (Eq. 1), shape (K,)."""
    busy_s = compute_and_sync_s(table, parameters) + update_and_offload_s(table, parameters)
    return np.asarray(busy_s + parameters.constant_s, dtype=np.float64)
