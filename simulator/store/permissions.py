"""The GPU types and nodes that the jobs of a scenario may run on, as tables of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tessera.formulation.base.selectors import stored_selector
from tessera.formulation.base.tables import Ints
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.permissions import (
    AllowedGpuTypes,
    AvoidedNodes,
    Selectors,
    UnmatchedNodes,
    tabulate_selectors,
)
from tessera.formulation.state.snapshot import Nodes


def avoids_of(specs: Sequence[JobSpec], nodes: Nodes) -> AvoidedNodes:
    """Return the nodes that jobs avoid, by the indices of both."""
    index = {name: i for i, name in enumerate(nodes.name)}
    pairs = [
        (job, index[name]) for job, s in enumerate(specs) for name in sorted(set(s.avoid_nodes))
    ]
    job, node = _columns(pairs)
    return AvoidedNodes(job=job, node=node)


def types_of(specs: Sequence[JobSpec], names: Sequence[str]) -> AllowedGpuTypes:
    """Return the GPU types that jobs may run on. ``names`` are those of all types, in order."""
    pairs = [
        (job, kind)
        for job, s in enumerate(specs)
        for kind in sorted(map(names.index, s.allowed_gpu_types))
    ]
    job, gpu_type = _columns(pairs)
    return AllowedGpuTypes(job=job, gpu_type=gpu_type)


def selectors_of(
    specs: Sequence[JobSpec], labels: Sequence[Mapping[str, str]]
) -> tuple[Selectors, UnmatchedNodes, dict[str, Ints]]:
    """Return the selectors of jobs, the nodes that do not match them, and those of each job.

    ``labels`` are those of the nodes. The last result has the columns of ``Jobs`` by name.
    """
    texts = [tuple(str(stored_selector(text)) for text in spec.selectors) for spec in specs]
    return tabulate_selectors(
        [requirement for requirement, _ in texts], [preference for _, preference in texts], labels
    )


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return columns[:, 0].copy(), columns[:, 1].copy()
