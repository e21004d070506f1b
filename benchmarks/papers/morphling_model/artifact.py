"""The model of Morphling's artifact, which differs from the one in the paper: a named baseline.

It adds up what the paper overlaps: ``k_off`` and ``k_swap`` are seconds, not exponents. It is that of
the public artifact (module ``71_performance_model``), written again from its formulas. The product
does not use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from tessera.estimator.reconfiguration.appendix import combine_overlapping
from tessera.estimator.reconfiguration.configurations import ConfigurationTable
from tessera.estimator.reconfiguration.fitting import MeasuredRun
from tessera.formulation.execution_plan import ZeroStage
from tessera.formulation.tables import Floats

MIB_PER_MS: Final = 2**20 * 1000.0
"""A GB/s of the artifact, which divides MiB by GB/s and takes the result as ms, in bytes per second."""
_NETWORK: Final = 20 * MIB_PER_MS
"""Bandwidth between nodes of 3D plans: a constant of the artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactParameters:
    """The seven parameters, in seconds and seconds per Mi parameters (2^20)."""

    k_bwd: float
    k_sync: float
    k_opt: float
    k_os_offload: float
    k_const: float
    k_off: float
    k_swap: float


def artifact_parts_s(
    table: ConfigurationTable, k: ArtifactParameters, repeat: float = 1.0
) -> tuple[Floats, Floats, Floats]:
    """Return seconds of iterations, of passes with synchronisation, and of optimizers.

    ``repeat`` is the share of a forward pass that checkpointing repeats. The artifact has 1, but 0.8
    in its validation of BERT.
    """
    is_3d = table.tp * table.pp > 1
    plain = _replicas_s(table, k, repeat)
    divided = _divided_s(table, k)
    iteration, busy, update = (np.where(is_3d, b, a) for a, b in zip(plain, divided, strict=True))
    return iteration, busy, update


def _replicas_s(
    table: ConfigurationTable, k: ArtifactParameters, repeat: float
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of plain replicas, with and without ZeRO.

    Their bandwidth is that inside a node on any placement. The artifact has another constant for
    several nodes, 2 GB/s, which its policy never asks for, and which is far too low.
    """
    forward, steps = table.forward_s, table.accumulation
    mi = table.parameters / 2**20
    backward = k.k_bwd * forward
    volume = 8 * table.parameters * (table.dp - 1) / table.dp
    sent_s = steps * volume / table.intra_bytes_per_s
    sync = combine_overlapping(backward, sent_s, k.k_sync)
    moved = np.where(table.offload, 4 * table.parameters / table.dp / table.pcie_bytes_per_s, 0.0)
    sync = sync + np.where(table.offload, k.k_off + moved, 0.0)
    partition = np.where(table.zero > ZeroStage.NONE, table.dp, 1)
    update = np.where(
        table.offload,
        k.k_os_offload * mi / (table.dp * table.cpus_per_gpu),
        k.k_opt * mi / partition,
    )
    update = update + k.k_swap + moved
    forwards = steps + np.where(table.checkpointing, repeat, 0.0)
    busy = forwards * forward + (steps - 1) * backward + sync
    return busy + update + k.k_const, busy, update


def _divided_s(table: ConfigurationTable, k: ArtifactParameters) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of 3D plans, whose forward time is that of the whole configuration."""
    t, p, d = table.tp, table.pp, table.dp
    samples = table.global_batch // d
    tokens = samples * table.sequence * table.hidden
    tensor = 32 * tokens * table.layers * (t - 1) / t / table.intra_bytes_per_s
    pipeline = np.where(p > 1, 16 * tokens / t * p / _NETWORK, 0.0)
    is_inside = (table.fewest_gpus > t) & (p == table.nodes)
    volume = 8 * (d - 1) / d * table.parameters / t / p
    replicas = volume / np.where(is_inside, table.intra_bytes_per_s, _NETWORK)
    update = k.k_opt * table.parameters / 2**20 / (t * p)
    sync = combine_overlapping(k.k_bwd * table.forward_s, replicas, k.k_sync)
    busy = table.forward_s + sync + pipeline + tensor
    return busy + update + k.k_const, busy, update


_START: Final = np.array([1.5, 1.1, 1e-6, 1e-3, 1e-3, 1e-3, 1e-3])
_LOWEST: Final = np.array([1.0, 1.0, 1e-11, 1e-11, 1e-11, 0.0, 0.0])
_HIGHEST: Final = np.array([10.0, 100.0, np.inf, np.inf, np.inf, np.inf, np.inf])
"""Start and bounds of the artifact, in seconds; it has no upper bound of ``k_sync``."""
_SCALES: Final = np.array([1.0, 1.0, 1e-4, 1e-3, 1e-2, 1e-2, 1e-2])


def fit_artifact(runs: Sequence[MeasuredRun]) -> ArtifactParameters:
    """Return the parameters with the lowest sum of squared log errors of the three recorded parts."""
    table = ConfigurationTable.of([run.configuration for run in runs])
    recorded = [(run.iter_time_s, run.busy_s, run.update_s) for run in runs]
    log_times = np.log(np.array(recorded, dtype=np.float64)).T

    def log_errors(scaled: Floats) -> Floats:
        parts = artifact_parts_s(table, _parameters(scaled * _SCALES))
        errors = np.log(np.stack(parts)) - log_times
        return np.asarray(errors[np.isfinite(log_times)], dtype=np.float64)

    found = least_squares(
        log_errors,
        _START / _SCALES,
        bounds=(_LOWEST / _SCALES, _HIGHEST / _SCALES),
        max_nfev=400,
    )
    return _parameters(found.x * _SCALES)


def _parameters(values: Floats) -> ArtifactParameters:
    bwd, sync, opt, host, const, off, swap = values.tolist()
    return ArtifactParameters(
        k_bwd=bwd,
        k_sync=sync,
        k_opt=opt,
        k_os_offload=host,
        k_const=const,
        k_off=off,
        k_swap=swap,
    )
