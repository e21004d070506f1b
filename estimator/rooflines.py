"""Kernel times from data sheets, as sums of products, memory traffic, small products and launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.hardware import Hardware
from tessera.estimator.plans import Training
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Floats, Ints

ROOFLINE_PARTS: Final = ("compute", "memory", "rows", "launch")
"""The parts whose sum is a layer's seconds: the FLOPs of its products, its memory traffic, the loss
of products over few rows, and its launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRates:
    """The shares of a GPU's data sheet that kernels reach.

    They are chosen by judgement, and a calibration corrects them.
    """

    utilisation: float  # of the peak FLOP/s, by large kernels
    half_rows: float
    """Rows (samples times positions) at which products with weights reach half the utilisation."""
    memory_utilisation: float  # of the memory bandwidth, by large kernels
    launch_s: float  # of each kernel, in addition to its work
    backward: float = 2.0  # work of a backward pass in forward passes: two products for each one

    def __post_init__(self) -> None:
        shares = (self.utilisation, self.memory_utilisation)
        if not all(0 < share <= 1 for share in shares):
            raise TesseraError(
                f"utilisation and memory_utilisation must be above 0 and at most 1: {self}"
            )
        if self.half_rows < 0 or self.launch_s < 0 or self.backward <= 0:
            raise TesseraError(
                f"half_rows and launch_s must not be negative, and backward must be above 0: {self}"
            )


DEFAULT_RATES: Mapping[str, RooflineRates] = {
    # Products alone reach four fifths of the peak. With memory traffic and launches, training
    # reaches half of it (Narayanan et al., SC 2021, Table 1: 44-52 % of an A100's).
    "f16": RooflineRates(utilisation=0.8, half_rows=200.0, memory_utilisation=0.9, launch_s=1e-5),
    "bf16": RooflineRates(utilisation=0.8, half_rows=200.0, memory_utilisation=0.9, launch_s=1e-5),
    # This type does not use tensor cores, and models use it for convolutions. They read each
    # activation more than once, and lose speed below a thousand rows (late layers of a Wide-ResNet
    # have 49 positions per sample).
    "f32": RooflineRates(utilisation=0.8, half_rows=1000.0, memory_utilisation=0.8, launch_s=1e-5),
}
"""Rates by data type of compute. They are round numbers at which the mean of the kernel times that
the Arena artifact recorded on A40s is about right (``cell_modules.csv``). Estimates are judged on
other records, of iteration times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCompute:
    """Kernel times of one GPU type, as a :class:`tessera.estimator.plans.Compute`.

    They are a sum, not the roofline's maximum (Williams et al., CACM 2009), because the products of
    a layer and the element-wise kernels between them run one after another.
    """

    hardware: Hardware
    rates: Mapping[str, RooflineRates] = field(
        default_factory=lambda: DEFAULT_RATES
    )  # by data type

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L)."""
        forward_s = self.parts_s(graph, samples, tp).sum(axis=0)
        return forward_s, self.rates[graph.dtype].backward * forward_s

    def parts_s(self, graph: Graph, samples: Floats, tp: Ints) -> Floats:
        """Return the forward seconds of each of :data:`ROOFLINE_PARTS`, shape (4, D, L)."""
        rates = self.rates[graph.dtype]
        rate = self.hardware.flops(graph.dtype) * rates.utilisation
        share = (np.asarray(samples, dtype=np.float64) / tp)[:, None]
        weights = _weights(graph, tp)
        traffic = graph.element_bytes * (weights + graph.shared_weights + graph.touched * share)
        lost = 2 * rates.half_rows * weights * (graph.flops > 0)
        parts = (
            graph.flops * share / rate,
            traffic / (self.hardware.memory_bytes_per_s * rates.memory_utilisation),
            lost / rate,
            rates.launch_s * graph.kernels,
        )
        return np.stack(np.broadcast_arrays(*parts)).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePart:
    """Kernel times of one of :data:`ROOFLINE_PARTS`, as a :class:`tessera.estimator.plans.Compute`."""

    whole: RooflineCompute
    part: int

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L)."""
        forward_s = np.asarray(self.whole.parts_s(graph, samples, tp)[self.part])
        return forward_s, self.whole.rates[graph.dtype].backward * forward_s


def _weights(graph: Graph, tp: Ints) -> Floats:
    """Return the parameters in a GPU's products, shape (D, L).

    Only one expert is counted, because the number of experts on a GPU depends on the expert degree.
    """
    experts = np.maximum(graph.experts, tp[:, None])
    return np.asarray(graph.weights / tp[:, None] + graph.expert_weights / experts)
