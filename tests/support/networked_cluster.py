"""A cluster with a topology, and jobs that share its links."""

from __future__ import annotations

import json
from typing import Any

from tessera.db.clusters import network
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.store.store import Store
from tessera.formulation.state.topologies.described import decode_topology
from tessera.formulation.state.traffic import CellTraffic, StageTraffic
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    run,
    submit,
)

HOSTS = ["a100-0", "a100-2", "a100-1", "a100-3"]
"""The nodes in the order of their two ToRs. Nodes with consecutive names have different ToRs, so that
jobs on them share links above the ToRs."""


CLOS: dict[str, Any] = {
    "kind": "clos",
    "nodes": HOSTS,
    "tors": 2,
    "aggregations": 2,
    "tor_bytes_per_s": 12.5e9,
    "host": {
        "gpus": 4,
        "nics": 4,
        "pcie_switches": 4,
        "nic_bytes_per_s": 25e9,
        "pcie_bytes_per_s": 25e9,
        "nvlink_bytes_per_s": 300e9,
    },
}


BOTH = (("a100-0", range(4)), ("a100-1", range(4))), (("a100-2", range(4)), ("a100-3", range(4)))


def replica_traffic(data_bytes: float) -> CellTraffic:
    """Return the traffic of eight data-parallel replicas."""
    stage = StageTraffic(dp=8, tp=1, data=(data_bytes, 14))
    return CellTraffic(work_flop=1e15, compute_s=0.1, start_s=0.05, stages=(stage,))


def a_network(store: Store, **changes: object) -> None:
    """Store a topology of four nodes on two ToRs."""
    a_cluster(store, nodes=4)
    describe_network(store, CLOS | changes)
    store.change(upsert_estimates, C, [a_record(8, nodes=2, traffic=replica_traffic(5e9))])


def describe_network(store: Store, document: dict[str, Any]) -> None:
    text = json.dumps(document, sort_keys=True)
    store.change(network.set_topology, C, decode_topology(text), None)


def start_two_jobs(store: Store) -> None:
    """Start two jobs of eight GPUs, each under both ToRs."""
    submit(store, a_spec("one", requested_gpus=8), a_spec("two", requested_gpus=8))
    run(store, one=BOTH[0], two=BOTH[1])
