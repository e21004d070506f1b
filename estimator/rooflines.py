"""Seconds of kernels from data sheets: compute, memory traffic, saturation and launches of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from estimator.graph import Graph
from estimator.hardware import Hardware
from estimator.plans import Training
from formulation.errors import TesseraError
from formulation.tables import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What share of a GPU's data sheet kernels reach. Chosen by judgement; a calibration replaces them."""

    utilisation: float  # of the peak FLOP/s, by large kernels
    half_flops: float  # a kernel of this many FLOPs reaches half of the utilisation
    memory_utilisation: float  # of the memory bandwidth, by large kernels
    launch_s: float  # of each kernel, beyond its work
    serial: float = 0.5
    """Share of the lesser of compute and traffic that is not hidden behind the greater: matrix products
    hide their own traffic, the element-wise kernels between them run by themselves. 0: a pure roofline."""
    backward: float = 2.0  # a backward pass' work in forward passes: two products for each one

    def __post_init__(self) -> None:
        shares = (self.utilisation, self.memory_utilisation)
        if not all(0 < share <= 1 for share in shares) or not 0 <= self.serial <= 1:
            raise TesseraError(
                f"rates are shares of a data sheet, in (0, 1] (serial in [0, 1]), not {self}"
            )
        if self.half_flops < 0 or self.launch_s < 0 or self.backward <= 0:
            raise TesseraError(
                f"half_flops and launch_s must not be negative, backward not 0: {self}"
            )

    def scaled(self, *, compute: float = 1.0, memory: float = 1.0, launch: float = 1.0) -> Rates:
        """Return rates at which compute, memory traffic and launches take this many times as long.

        A utilisation stays at most 1: what a data sheet promises is not exceeded.
        """
        return replace(
            self,
            utilisation=min(1.0, self.utilisation / compute),
            memory_utilisation=min(1.0, self.memory_utilisation / memory),
            launch_s=self.launch_s * launch,
        )


DEFAULT_RATES: Mapping[str, Rates] = {
    # Half-precision products: half of the peak in training (Narayanan et al., SC 2021, Table 1: 44-52 % of
    # an A100's). A product of 1,024^3 (2 GFLOP) reaches about half of what large ones do; a layer's
    # other kernels, which have no FLOPs to speak of, bring the mean of a layer's kernels below that.
    "f16": Rates(utilisation=0.5, half_flops=0.5e9, memory_utilisation=0.8, launch_s=5e-6),
    "bf16": Rates(utilisation=0.5, half_flops=0.5e9, memory_utilisation=0.8, launch_s=5e-6),
    # fp32 without tensor cores: a convolution or product comes nearer to the peak, and saturates sooner
    "f32": Rates(utilisation=0.6, half_flops=0.1e9, memory_utilisation=0.8, launch_s=5e-6),
}
"""By type of compute. Memory: 0.8 of the data sheet (STREAM-like kernels reach 0.8 to 0.9). Launch: about
5 us from one kernel's end to the next one's start where the queue does not hide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCompute:
    """A roofline (Williams et al., CACM 2009) of one GPU type; meets :class:`estimator.plans.Compute`."""

    hardware: Hardware
    rates: Mapping[str, Rates] = field(default_factory=lambda: DEFAULT_RATES)  # by type

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L)."""
        rates = self.rates[graph.dtype]
        peak = self.hardware.flops(graph.dtype)
        share = (np.asarray(samples, dtype=np.float64) / tp)[:, None]
        saturating = graph.flops * share + rates.half_flops * graph.kernels * (graph.flops > 0)
        compute_s = saturating / (peak * rates.utilisation)
        rate = self.hardware.memory_bytes_per_s * rates.memory_utilisation
        memory_s = _traffic_bytes(graph, share, tp) / rate
        launches_s = rates.launch_s * graph.kernels
        hidden, shown = np.minimum(compute_s, memory_s), np.maximum(compute_s, memory_s)
        forward_s = shown + rates.serial * hidden + launches_s
        return forward_s, rates.backward * forward_s


def _traffic_bytes(graph: Graph, share: Floats, tp: Ints) -> Floats:
    """Return bytes of weights and activations that a forward pass reads and writes, shape (D, L).

    Of the experts one is counted: how many more a GPU reads depends on the expert degree.
    """
    experts = np.maximum(graph.experts, tp[:, None])
    weights = graph.weights / tp[:, None] + graph.expert_weights / experts + graph.shared_weights
    return graph.element_bytes * (weights + graph.touched * share)
