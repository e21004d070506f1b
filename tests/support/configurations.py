"""Builders of configurations of reconfigurable training, and of their measured runs."""

from __future__ import annotations

from typing import Any, Final

from tessera.estimator.reconfiguration.appendix import AppendixParameters, appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import (
    Configuration,
    ConfigurationTable,
    MachineRates,
    TransformerFacts,
)
from tessera.estimator.reconfiguration.fitting import MeasuredRun
from tessera.formulation.job.execution_plan import ZeroStage

RATES: Final = MachineRates(intra_bytes_per_s=100e9, inter_bytes_per_s=40e9, pcie_bytes_per_s=20e9)


def a_transformer(**fields: Any) -> TransformerFacts:
    """Return a transformer of a billion parameters, whose forward pass takes 10 ms a sample."""
    facts: dict[str, Any] = {
        "name": "m",
        "parameters": 1e9,
        "hidden": 1000,
        "sequence": 500,
        "layers": 20,
        "forward_s_per_sample": 0.01,
    }
    return TransformerFacts(**(facts | fields))


def a_configuration(*node_gpus: int, **fields: Any) -> Configuration:
    """Return data parallelism on ``node_gpus`` with a batch of 16, unless ``fields`` say otherwise."""
    gpus = sum(node_gpus)
    degrees = fields.get("pp", 1) * fields.get("tp", 1)
    given: dict[str, Any] = {
        "facts": a_transformer(),
        "rates": RATES,
        "global_batch": 16,
        "dp": gpus // degrees,
        "node_gpus": node_gpus,
    }
    return Configuration(**(given | fields))


def an_offloaded(*node_gpus: int, **fields: Any) -> Configuration:
    """Return ZeRO-Offload on ``node_gpus``, with four CPU cores a GPU."""
    given = {"zero": ZeroStage.GRADIENTS, "offload": True, "update_cores": 4.0}
    return a_configuration(*node_gpus, **(given | fields))


def a_table(*configurations: Configuration) -> ConfigurationTable:
    """Return the table of configurations."""
    return ConfigurationTable.of(configurations)


def runs_of(
    parameters: AppendixParameters, configurations: list[Configuration]
) -> list[MeasuredRun]:
    """Return runs that take exactly as long as the published model says."""
    times = appendix_iteration_s(ConfigurationTable.of(configurations), parameters)
    return [
        MeasuredRun(configuration=configuration, iter_time_s=time_s)
        for configuration, time_s in zip(configurations, times.tolist(), strict=True)
    ]


TRUE = AppendixParameters(
    backward_ratio=2.3,
    sync_overlap=1.5,
    update_s_per_parameter=8e-11,
    host_update_s_per_parameter=3e-9,
    offload_overlap=2.0,
    swap_overlap=3.0,
    constant_s=0.02,
)
"""The parameters by which tests make times."""

SEVEN = [
    a_configuration(1),
    a_configuration(8),
    a_configuration(2, 2),
    a_configuration(4, zero=ZeroStage.GRADIENTS),
    an_offloaded(1),
    an_offloaded(8),
    an_offloaded(4, 4),
]
"""Runs that suffice to fit the published model."""
