"""The terms of our model of reconfigurable training that concern 3D plans."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.estimator.reconfiguration.configurations import ConfigurationTable
from tessera.estimator.reconfiguration.pooled import (
    POOLED_PARAMETERS,
    passes_s,
    pipeline_s,
    port_bytes_per_s,
)
from tessera.formulation.base.tables import Floats
from tests.support.configurations import RATES, a_configuration, a_table


def values_of(**changed: float) -> dict[str, Floats]:
    """Return the usual values of the parameters, apart from those that are given."""
    usual = {parameter.name: parameter.value for parameter in POOLED_PARAMETERS}
    return {name: np.array([value]) for name, value in (usual | changed).items()}


def pipeline_seconds(*node_gpus: int, **changed: float) -> float:
    """Return the seconds that a pipeline of one GPU for each stage takes to pass activations on."""
    table = a_table(a_configuration(*node_gpus, pp=sum(node_gpus)))
    return float(pipeline_s(table, values_of(**changed))[0])


def test_only_boundaries_between_nodes_use_the_network() -> None:
    table = a_table(a_configuration(4, pp=4))
    values = values_of(handover_s=0.0)
    bytes_passed = 2 * 2 * 16 * 500 * 1000 * values["pipeline_factor"][0]
    inside_s = bytes_passed / (values["intra_share"][0] * RATES.intra_bytes_per_s)
    outside_s = bytes_passed / port_bytes_per_s(table, values)[0]

    one, two, four = (
        pipeline_seconds(*nodes, handover_s=0.0) for nodes in ((4,), (2, 2), (1, 1, 1, 1))
    )

    assert one == pytest.approx(3 * inside_s)
    assert two == pytest.approx(2 * inside_s + outside_s)
    assert four == pytest.approx(3 * outside_s)


def test_stages_wait_for_each_other_at_each_boundary() -> None:
    without, waiting = (pipeline_seconds(4, handover_s=s) for s in (0.0, 0.02))

    assert waiting - without == pytest.approx(3 * 0.02)
    assert pipeline_seconds(1, handover_s=0.02) == 0.0


@pytest.mark.parametrize(
    ("fields", "ratio"),
    [
        ({"tp": 4}, 5.0),
        ({}, 1.0),  # plain replicas
        ({"tp": 4, "forward_s": 0.04}, 1.0),  # a stated time is that of the runtime itself
    ],
)
def test_the_other_runtime_launches_more_slowly(fields: dict[str, float], ratio: float) -> None:
    table: ConfigurationTable = a_table(a_configuration(4, **fields))

    base, slow = (
        float(passes_s(table, values_of(runtime_launch_ratio=r, launch_s=0.01))[0])
        for r in (1.0, 5.0)
    )

    assert slow - base == pytest.approx(0.01 * (ratio - 1))
