"""Jobs so small that all divisions of their models can be listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import strategies as st

from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import A10, GIB
from tessera.estimator.memory import States
from tessera.estimator.plans import Candidates, Shape, Training, powers_dividing
from tessera.estimator.pricing.divisions import Divisions
from tessera.formulation.job.execution_plan import PlanStage
from tests.support.estimates import a_graph, a_layer


@st.composite
def small_jobs(draw: st.DrawFn, layers: Sequence[int] = range(1, 6), min_gpus: int = 1) -> Setting:
    """Draw a job of up to 8 samples on up to 4 GPUs, whose memory may be scarce."""
    scale = st.sampled_from([0.25, 1.0, 3.0])
    attention, experts = draw(st.booleans()), draw(st.sampled_from([0.0, 6.0, 8.0]))
    rows = []
    for _ in range(draw(st.sampled_from(layers))):
        work, size, layer_experts = draw(scale), draw(scale), experts * draw(st.booleans())
        rows.append(
            a_layer(
                flops=1e12 * work,
                weights=1e8 * size,
                shared_weights=1e5,
                kept=3e7 * work,
                unsplit=1e7 * work,
                tensor_limit=draw(st.sampled_from([1.0, 2.0, 8.0])),
                experts=layer_experts or 1.0,
                expert_weights=2e8 * size * bool(layer_experts),
                exchanged=4e6 * bool(layer_experts),
                attention_flops=3e11 * work * attention,
                attention_kept=1e7 * work * attention,
            )
        )
    shapes = [(n, m) for n in (1, 2, 4) for m in (1, 2, 3, 4) if min_gpus <= n * m <= 4]
    nodes, node_gpus = draw(st.sampled_from(shapes))
    batch = draw(st.sampled_from([n for n in (1, 4, 6, 8) if n >= min_gpus]))
    return data_sheet_setting(
        a_graph(*rows, dtype=draw(st.sampled_from(["f16", "bf16"]))),
        Training(global_batch=batch, micro_batches=batch),
        replace(A10, memory_bytes=draw(st.sampled_from([3, 8, 40])) * GIB),
        Shape(nodes=nodes, gpus_per_node=node_gpus),
        States(),
    )


def every_stage(graph: Graph, start: int, end: int, gpus: int) -> Iterator[PlanStage]:
    """Yield all stages of some layers and GPUs, with degrees that are powers of two."""
    experts = [count for count in graph.experts[start:end].tolist() if count > 1]
    for tp, ep in product(powers_dividing(gpus), powers_dividing(gpus)):
        fits = tp <= graph.tensor_limit[start:end].min() and (ep == 1 or experts)
        if fits and not any(count % ep for count in experts):
            for sp in {False, tp > 1}:
                yield PlanStage(start=start, end=end, dp=gpus // tp, tp=tp, ep=ep, sp=sp)


def every_division(job: Setting) -> Divisions:
    """Return all divisions of a small job.

    They have any cuts and any equal micro-batches. The GPUs of a stage are a power of two, or all.
    """
    graph, gpus, batch = job.graph, job.shape.gpus, job.training.global_batch
    divisions: list[tuple[tuple[PlanStage, ...], int]] = []
    for degree in range(1, min(gpus, len(graph)) + 1):
        cuts = combinations(range(1, len(graph)), degree - 1)
        shares = [s for s in product({1, 2, 4, gpus}, repeat=degree) if sum(s) == gpus]
        for inner, share in product(cuts, shares):
            bounds = zip(pairwise((0, *inner, len(graph))), share, strict=True)
            for stages in product(*(every_stage(graph, *ends, n) for ends, n in bounds)):
                counts = [n for n in range(1, batch + 1) if batch % n == 0]
                divisions += [
                    (stages, n) for n in counts if not any(batch // n % s.dp for s in stages)
                ]
    return as_divisions(divisions)


def as_divisions(plans: Sequence[tuple[tuple[PlanStage, ...], int]]) -> Divisions:
    """Return the divisions with some stages and numbers of micro-batches."""
    rows = [(s.start, s.end, s.dp, s.tp, s.ep, s.sp) for stages, _ in plans for s in stages]
    start, end, dp, tp, ep, sp = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    lengths = np.array([len(stages) for stages, _ in plans], dtype=np.int64)
    return Divisions(
        candidates=Candidates(start=start, end=end, dp=dp, tp=tp, ep=ep, sp=sp.astype(bool)),
        first_row=np.cumsum(lengths) - lengths,
        accumulation=np.array([count for _, count in plans], dtype=np.int64),
        chunks=np.ones_like(lengths),
        kind=np.arange(len(plans)),
    )
