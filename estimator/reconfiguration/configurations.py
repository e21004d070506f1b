"""Configurations of a job: a plan on a placement, as the models of reconfigurable training read it.

A configuration says what the published model reads (Morphling, Table 5): facts of the trained
model, the degrees and switches of an execution plan, the GPUs of each node, CPU cores, and the
bandwidths of the machines. :class:`ConfigurationTable` holds many of them as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np

from tessera.estimator.hardware import Hardware
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints, Table
from tessera.formulation.job.execution_plan import ZeroStage

HALF_BYTES = 2
"""Bytes of an activation in half precision."""
SINGLE_BYTES = 4
"""Bytes of a parameter, and of a gradient, without mixed precision (Morphling, appendix A.2)."""
PORT_BYTES_PER_S = 25e9
"""Bandwidth of a port of a node in one direction: HDR InfiniBand, 200 Gb/s (ConnectX-6 brief)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerFacts:
    """Sizes of a transformer, and the time of one profiled forward pass."""

    name: str
    parameters: float
    hidden: int
    sequence: int  # tokens of a sample
    layers: int
    forward_s_per_sample: float
    """Seconds of the forward pass of one sample on one GPU, from a profile (Morphling, A.1)."""

    def __post_init__(self) -> None:
        for name in ("parameters", "hidden", "sequence", "layers", "forward_s_per_sample"):
            _require_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Bandwidths of equal nodes, in bytes per second and one direction (Morphling, Table 5)."""

    intra_bytes_per_s: float  # B_intra: from a GPU to the others of its node
    inter_bytes_per_s: float  # B_inter: from a node to the others
    pcie_bytes_per_s: float  # B_pcie: from a GPU to its host
    gpus_per_node: int = 8
    ports_per_node: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive(field.name, getattr(self, field.name))

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Return the rates of a GPU type's data sheets, and of copies as measured if they were."""
        return cls(
            intra_bytes_per_s=hardware.link_bytes_per_s,
            inter_bytes_per_s=hardware.network_bytes_per_s,
            pcie_bytes_per_s=hardware.copied_bytes_per_s or hardware.host_bytes_per_s,
            gpus_per_node=hardware.gpus_per_node,
            ports_per_node=max(1, round(hardware.network_bytes_per_s / PORT_BYTES_PER_S)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A model, the plan that trains it, and the resources that it has."""

    facts: TransformerFacts
    rates: MachineRates
    global_batch: int
    pp: int = 1
    tp: int = 1
    dp: int = 1
    zero: ZeroStage = ZeroStage.NONE
    offload: bool = False  # ZeRO-Offload: optimizer states are kept and updated by the host
    checkpointing: bool = False
    accumulation: int = 1
    """Passes of a replica before its gradients are synchronised (a)."""
    micro_batches: int = 1
    """Micro-batches of a pipeline (m)."""
    node_gpus: tuple[int, ...]
    """GPUs on each node, in any order."""
    update_cores: float = 1.0
    """CPU cores that update the states of a GPU's partition under ZeRO-Offload (c)."""
    forward_s: float | None = None
    """Seconds of the forward passes of one accumulation step, if they were measured here. If None,
    the profiled pass is scaled (Morphling, A.1)."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "pp", "tp", "dp", "accumulation", "micro_batches"):
            _require_positive(name, getattr(self, name))
        _require_positive("update_cores", self.update_cores)
        if self.forward_s is not None:
            _require_positive("forward_s", self.forward_s)
        if not self.node_gpus or min(self.node_gpus) < 1:
            raise InvalidInput("node_gpus", "must have at least one GPU on each node")
        if self.gpus != self.pp * self.tp * self.dp:
            raise InvalidInput(
                "node_gpus",
                f"has {self.gpus} GPUs, but the plan needs pp x tp x dp ="
                f" {self.pp} x {self.tp} x {self.dp} = {self.pp * self.tp * self.dp}",
            )
        if self.offload and self.zero is ZeroStage.NONE:
            raise InvalidInput("offload", "needs a ZeRO stage of at least 1, which divides states")

    @property
    def gpus(self) -> int:
        """Return the number of GPUs (g)."""
        return sum(self.node_gpus)

    @property
    def plan_name(self) -> str:
        """Return the family of the plan, e.g. ``zero2+offload``: the switches, not the degrees."""
        replicas = f"zero{self.zero.value}" if self.zero else "dp"
        words = ["3d" if self.pp * self.tp > 1 else replicas]
        words += ["offload"] * self.offload + ["gc"] * self.checkpointing
        return "+".join(words)


_FACTS: Final = ("parameters", "hidden", "sequence", "layers")
_RATES: Final = tuple(field.name for field in fields(MachineRates))
_OWN: Final = (
    "global_batch",
    "pp",
    "tp",
    "dp",
    "zero",
    "offload",
    "checkpointing",
    "accumulation",
    "micro_batches",
    "update_cores",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConfigurationTable(Table):
    """Configurations as columns of shape (K,). Seconds, bytes and bytes per second."""

    parameters: Floats
    hidden: Floats
    sequence: Floats
    layers: Floats
    global_batch: Floats
    pp: Floats
    tp: Floats
    dp: Floats
    zero: Ints
    offload: Bools
    checkpointing: Bools
    accumulation: Floats
    micro_batches: Floats
    nodes: Ints
    fewest_gpus: Ints  # GPUs of the node that has the fewest
    is_even: Bools  # all nodes have equally many GPUs
    has_odd_node: Bools  # some node has an odd number of GPUs
    is_stated: Bools  # the forward time was measured here, not scaled
    update_cores: Floats
    forward_s: Floats
    intra_bytes_per_s: Floats
    inter_bytes_per_s: Floats
    pcie_bytes_per_s: Floats
    gpus_per_node: Ints
    ports_per_node: Ints

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> Self:
        """Return the table of configurations, in their order."""
        columns: dict[str, Any] = {n: [getattr(c, n) for c in configurations] for n in _OWN}
        columns |= {n: [getattr(c.facts, n) for c in configurations] for n in _FACTS}
        columns |= {n: [getattr(c.rates, n) for c in configurations] for n in _RATES}
        columns |= {
            "nodes": [len(c.node_gpus) for c in configurations],
            "fewest_gpus": [min(c.node_gpus) for c in configurations],
            "is_even": [len(set(c.node_gpus)) == 1 for c in configurations],
            "has_odd_node": [any(gpus % 2 for gpus in c.node_gpus) for c in configurations],
            "is_stated": [c.forward_s is not None for c in configurations],
            "forward_s": [scaled_forward_s(c) for c in configurations],
        }
        return cls(**columns)

    @property
    def samples(self) -> Floats:
        """Return the samples of one forward pass of a replica: a micro-batch's part."""
        passes = self.dp * self.accumulation * self.micro_batches
        return np.asarray(self.global_batch / passes, dtype=np.float64)


def scaled_forward_s(configuration: Configuration) -> float:
    """Return T_fwd of one accumulation step: the stated one, or the profiled one scaled (A.1).

    The time is linear in the samples, in the tensor shard and in the layers of a stage. A pipeline
    takes ``t_p * g_p / p * (m + p - 1)``, with the profile of one GPU (g_p = 1).
    """
    if configuration.forward_s is not None:
        return configuration.forward_s
    c = configuration
    samples = c.global_batch / (c.dp * c.accumulation * c.micro_batches)
    micro_batch_s = c.facts.forward_s_per_sample * samples / c.tp
    return micro_batch_s / c.pp * (c.micro_batches + c.pp - 1)


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidInput(name, f"must be a finite number above 0, not {value}")
