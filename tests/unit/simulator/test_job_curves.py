"""The sensitivity curves of a simulated job, whose estimates state CPU cores and host memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.focus import focus_on
from tessera.formulation.job_curves import curves_of_job
from tessera.formulation.policy import Policy
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.store.memory import MemoryStore
from tests.support.worlds import a_profile, a_scenario, an_arrival, some_specs

GIB = 2**30


def by_plan(plan: str, gpus: int, iter_time_s: float, cpus: int, gib: int) -> EstimateRecord:
    profile = a_profile(gpus, iter_time_s)
    cell = replace(profile.cell, plan=plan)
    return replace(profile, cell=cell, cpus=cpus, host_bytes=gib * GIB)


def test_cores_and_host_memory_of_a_trace_are_in_the_curves_of_its_jobs() -> None:
    profiles = [
        by_plan("dp", 2, 1.0, 2, 4),
        by_plan("offload", 2, 0.8, 16, 96),
        by_plan("offload", 1, 0.9, 32, 96),
    ]
    nodes = [replace(node, cpus=64, host_bytes=256 * GIB) for node in some_specs(("a100", 1, 4))]
    scenario = a_scenario(
        an_arrival("j", requested_gpus=2, requested_cpus=32, submitted_plan="dp"),
        nodes=nodes,
        profiles=profiles,
    )
    store = MemoryStore(scenario, np.zeros(1))
    store.arrive(0, 0.0)

    focus = focus_on(store.snapshot(0.0), 0)
    found = curves_of_job(focus, Policy())

    (own,) = found.types
    batch = focus.workloads[0].global_batch
    assert [(s.amount, s.best_rate) for s in own.cpus] == [(2, batch), (16, batch / 0.8)]
    assert [s.amount for s in own.host_bytes] == [4 * GIB, 96 * GIB]
    assert found.guaranteed_rate == pytest.approx(batch)
    assert own.minimum is not None
    assert (own.minimum.demand.gpus, focus.plans[own.minimum.plan]) == (1, "offload")
