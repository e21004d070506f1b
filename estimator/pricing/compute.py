"""Kernel times under a plan's precision, and those of attention, which a plan may repeat.

They are ratios of data-sheet times, with which the seconds of any source are multiplied.
``docs/estimator/iteration-time.md`` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.hardware import Hardware
from tessera.estimator.plans import Compute, Training
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import Precision

CAST_BYTES = 4.0
"""Bytes that move to cast a scalar of 16 bits to fp8: it is read, and written in two layouts, because
products in fp8 read both operands along the summed axis (Transformer Engine, user guide)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCompute:
    """Kernel times of ``base`` under a plan, as a :class:`tessera.estimator.plans.Compute`."""

    base: Compute
    roofline: RooflineCompute
    precision: Precision
    fp8_flops: float = 0.0  # per second, if the precision is fp8

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L)."""
        forward_s, backward_s = self.base.layer_s(graph, training, samples, tp)
        if self.precision is Precision.FP8:
            saved, cast = self._fp8_shares(graph, samples, tp)
            # A forward pass casts the inputs of products, a backward pass the gradients of their
            # outputs. It has two products for each of the forward pass.
            casts_s = cast * forward_s / 2
            forward_s = forward_s * (1 - saved) + casts_s
            backward_s = backward_s * (1 - saved) + casts_s
        return forward_s, backward_s

    def attention_s(self, graph: Graph, training: Training, samples: Floats, tp: Ints) -> Floats:
        """Return the forward seconds of each layer's attention, shape (D, L).

        Attention is never computed in fp8.
        """
        forward_s, _ = self.base.layer_s(graph, training, samples, tp)
        return self._attention_share(graph, samples, tp) * forward_s

    def _attention_share(self, graph: Graph, samples: Floats, tp: Ints) -> Floats:
        none = np.zeros(len(graph))
        scores = replace(
            graph,
            flops=graph.attention_flops,
            touched=graph.attention_touched,
            kernels=graph.attention_kernels,
            weights=none,
            expert_weights=none,
            shared_weights=none,
        )
        return self._share(self._seconds(scores, samples, tp), graph, samples, tp)

    def _fp8_shares(self, graph: Graph, samples: Floats, tp: Ints) -> tuple[Floats, Floats]:
        """Return the seconds that products save in fp8, and those of both passes' casts.

        Both are shares of a layer's forward seconds, shape (D, L). Only products with weights in
        layers with attention are in fp8: neither attention nor the output projection is.
        """
        hardware, dtype = self.roofline.hardware, graph.dtype
        rates = self.roofline.rates[dtype]
        per_sample = (np.asarray(samples, dtype=np.float64) / tp)[:, None]
        products = (graph.flops - graph.attention_flops) * (graph.attention_flops > 0) * per_sample
        gain_s = 1 / hardware.flops(dtype) - 1 / self.fp8_flops
        saved_s = products * gain_s / rates.utilisation
        touched = graph.product_touched * (graph.attention_flops > 0) * per_sample
        bandwidth = hardware.memory_bytes_per_s * rates.memory_utilisation
        cast_s = CAST_BYTES * touched / bandwidth
        return (
            self._share(saved_s, graph, samples, tp),
            self._share(cast_s, graph, samples, tp),
        )

    def _share(self, part_s: Floats, graph: Graph, samples: Floats, tp: Ints) -> Floats:
        whole_s = self._seconds(graph, samples, tp)
        share = np.divide(part_s, whole_s, out=np.zeros_like(whole_s), where=whole_s > 0)
        return np.asarray(share, dtype=np.float64)

    def _seconds(self, graph: Graph, samples: Floats, tp: Ints) -> Floats:
        return np.asarray(self.roofline.parts_s(graph, samples, tp).sum(axis=0), dtype=np.float64)


def plan_compute(
    base: Compute, hardware: Hardware, precision: Precision = Precision.BF16
) -> PlanCompute:
    """Return the kernel times of ``base`` under a plan's precision."""
    if isinstance(base, PlanCompute):
        return base
    return PlanCompute(
        base=base,
        roofline=base if isinstance(base, RooflineCompute) else RooflineCompute(hardware=hardware),
        precision=precision,
        fp8_flops=hardware.fp8_flops or 0.0,
    )
