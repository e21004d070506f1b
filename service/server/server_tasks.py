"""The tasks of a server for its clusters, apart from periodic rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.service.server.rounds.cluster_task import ClusterTask
from tessera.service.server.rounds.forecaster import Forecaster, forecast_rhythm
from tessera.service.server.rpc.serving.server import Server
from tessera.service.server.settings.config import Config
from tessera.service.server.tasks.retention import PERIOD_S as RETENTION_PERIOD_S
from tessera.service.server.tasks.retention import Pruner

NETWORK_PERIOD_S: Final = 60.0
"""Seconds between checks of network plans. They are also checked when allocations change."""

_Watch: TypeAlias = "partial[ClusterTask]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTasks:
    """The tasks of a server for its clusters. ``others`` need not be woken."""

    cells: ClusterTask
    networks: ClusterTask
    others: Sequence[ClusterTask]


def make_server_tasks(
    config: Config, store: Store, clock: Clock, server: Server, holder: str
) -> ServerTasks:
    """Return the tasks that the settings ask for, none of them started.

    They run while ``holder`` has the lease of a cluster.
    """
    watch = partial(ClusterTask, store, clock, calls=server.threads.leases, holder=holder)
    others = [_pruning(config, store, server, watch)]
    if config.forecast_period_s > 0 and config.period_s > 0:
        others.append(_forecasts(config, store, server, watch))
    return ServerTasks(
        cells=_cells(config, store, server, watch),
        networks=_networks(server, watch),
        others=others,
    )


def _cells(config: Config, store: Store, server: Server, watch: _Watch) -> ClusterTask:
    deriver = CellDeriver(
        store,
        config.catalogue(),
        config.estimate_multiples(),
        derives=config.estimate_cells,
        learns=config.learn,
        profiling=config.profiling(),
    )
    return watch(
        deriver.derive,
        work=server.threads.background,
        period_s=config.estimate_period_s,
        fails="no estimates were updated",
        event="estimating_failed",
        forget=deriver.forget,
    )


def _networks(server: Server, watch: _Watch) -> ClusterTask:
    return watch(
        server.planner.keep,
        work=server.threads.background,
        period_s=NETWORK_PERIOD_S,
        fails="no network plan was made",
        event="network_failed",
        again_in_s=server.planner.again_in_s,
        forget=server.planner.forget,
    )


def _pruning(config: Config, store: Store, server: Server, watch: _Watch) -> ClusterTask:
    return watch(
        Pruner(store, config.retention()).prune,
        work=server.threads.background,
        period_s=RETENTION_PERIOD_S,
        fails="no old rows were deleted",
        event="prune_failed",
        idle_too=True,
    )


def _forecasts(config: Config, store: Store, server: Server, watch: _Watch) -> ClusterTask:
    forecaster = Forecaster(
        store,
        server.policies,
        forecast_rhythm(config.round_spacing_s, config.period_s),
        config.forecast_share * config.forecast_period_s,
        config.clock_factor,
    )
    return watch(
        forecaster.refresh,
        work=server.threads.background,
        period_s=config.forecast_period_s,
        fails="no jobs were forecast",
        event="forecast_failed",
    )
