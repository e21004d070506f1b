"""Workloads without estimates do not wait until the estimates of all others are renewed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera.db.store import PostgresStore
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.values import GpuType, Workload
from tessera.service.cells.deriver import CellDeriver
from tests.support.stored_cluster import C, a_spec, do, submit

OLD = [Workload(model="bert", params="760M", global_batch=n) for n in (64, 128, 256)]
NEW = Workload(model="moe", params="690M", global_batch=256)


def test_new_workloads_are_estimated_between_lease_renewals(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(store, lambda w: w.upsert_cluster(C, [GpuType(name="a100", memory_bytes=2**35)], None))
    do(store, lambda w: w.upsert_nodes(C, [NodeSpec(name="n", gpu_type="a100", gpus=1)]))
    submit(store, *(a_spec(f"old-{i}", workload=w) for i, w in enumerate(OLD)))
    deriving = CellDeriver(store, catalogue_of(), (1.0, 2.0))
    assert deriving.derive(C) == 3
    do(store, lambda w: w.upsert_nodes(C, [NodeSpec(name="m", gpu_type="a100", gpus=2)]))
    estimated: list[Workload] = []
    wake_ups: list[str] = []
    real = Estimator.cells

    def cells(self: Estimator, workload: Workload, *args: Any, **options: Any) -> Any:
        estimated.append(workload)
        if not wake_ups:
            submit(store, a_spec("new", workload=NEW))
            wake_ups.append("woken")
        return real(self, workload, *args, **options)

    monkeypatch.setattr(Estimator, "cells", cells)

    def woken() -> bool:
        if wake_ups != ["woken"]:
            return False
        wake_ups.append("taken")
        return True

    assert deriving.derive(C, woken=woken) == 4
    assert list(dict.fromkeys(estimated)) == [OLD[0], NEW, OLD[1], OLD[2]]


def test_a_type_that_is_dropped_and_added_back_is_estimated_again(
    store: PostgresStore,
) -> None:
    types = [GpuType(name=t, memory_bytes=2**35) for t in ("a100", "v100")]
    nodes = [NodeSpec(name=t.name, gpu_type=t.name, gpus=1) for t in types]
    do(store, lambda w: w.upsert_cluster(C, types, None))
    do(store, lambda w: w.upsert_nodes(C, nodes))
    submit(store, a_spec("j", workload=OLD[0]))
    deriving = CellDeriver(store, catalogue_of(), (1.0,))
    deriving.derive(C)
    do(store, lambda w: w.upsert_nodes(C, [replace(n, gpu_type="a100") for n in nodes]))
    do(store, lambda w: w.upsert_cluster(C, types[:1], None))
    do(store, lambda w: w.upsert_cluster(C, types, None))
    do(store, lambda w: w.upsert_nodes(C, nodes))
    assert deriving.derive(C) == 1
    estimates, _ = store.list_estimates(C, "bert", "760M", OLD[0].global_batch, 0, 10)
    assert {e.cell.gpu_type for e in estimates} == {"a100", "v100"}
