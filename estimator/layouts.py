"""The groups of a stage's GPUs and their nodes. Tensor parts are neighbours, replicas are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.estimator.plans import Candidates, Groups, Shape
from tessera.formulation.base.tables import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelSettings:
    """The D distinct settings (dp, tp, ep, sp), as arrays of shape (D,)."""

    dp: Ints
    tp: Ints
    ep: Ints
    sp: Bools
    samples: Floats  # samples of a micro-batch on the fullest replica
    shape: Shape

    @property
    def gpus(self) -> Ints:
        """Return the GPUs of each setting."""
        return self.dp * self.tp

    def groups(self, size: Ints, stride: Ints) -> Groups:
        """Return the groups of every ``stride``-th GPU of the stage.

        A stage starts at the first GPU of a node or shares a node. A stride below the number of
        GPUs of a node puts ``stride`` groups on the same nodes. If groups do not fill nodes evenly,
        all groups of a stage on several nodes are assumed to be as slow as one on two nodes.
        """
        node = self.shape.gpus_per_node
        apart = np.minimum(stride, node)
        span = size * stride
        astride = (span < node) & (node % span > 0) & (self.gpus > node)
        nodes = np.minimum(size, np.where(astride, 2, -(-span // node)))
        inside = nodes == 1
        fitting = np.maximum(np.minimum(node, self.gpus) // np.maximum(size, 1), 1)
        return Groups(size=size, nodes=nodes, node_groups=np.where(inside, fitting, apart))

    @property
    def tensor(self) -> Groups:
        """Return the groups of tensor parts, which are neighbours."""
        return self.groups(self.tp, np.ones_like(self.tp))

    @property
    def data(self) -> Groups:
        """Return the groups of replicas, with one GPU of each."""
        return self.groups(self.dp, self.tp)

    @property
    def expert(self) -> Groups:
        """Return the groups over which experts are divided, which are neighbours."""
        return self.groups(self.ep, np.ones_like(self.ep))

    @property
    def expert_data(self) -> Groups:
        """Return the groups of GPUs that hold the same experts."""
        return self.groups(self.gpus // self.ep, self.ep)

    def without_samples(self) -> tuple[ParallelSettings, Ints]:
        """Return the settings that differ in more than their samples, and which one each is, (D,)."""
        first, which = _distinct_rows((self.dp, self.tp, self.ep))
        return replace(
            self,
            dp=self.dp[first],
            tp=self.tp[first],
            ep=self.ep[first],
            sp=self.sp[first],
            samples=self.samples[first],
        ), which

    @property
    def everyone(self) -> Groups:
        """Return all GPUs of a stage as one group."""
        return self.groups(self.gpus, np.ones_like(self.tp))


def settings_of(
    candidates: Candidates, micro_batch: int | Ints, shape: Shape
) -> tuple[ParallelSettings, Ints]:
    """Return the distinct settings and the index of each candidate's setting, shape (K,).

    ``micro_batch`` is the samples of a micro-batch, one number or one for each candidate.
    """
    samples = np.ceil(micro_batch / candidates.dp).astype(np.int64)
    columns = (candidates.dp, candidates.tp, candidates.ep, candidates.sp, samples)
    first, which = _distinct_rows(columns)
    settings = ParallelSettings(
        dp=candidates.dp[first],
        tp=candidates.tp[first],
        ep=candidates.ep[first],
        sp=candidates.sp[first],
        samples=samples[first].astype(np.float64),
        shape=shape,
    )
    return settings, which


_LARGEST_CODE: Final = 2**62


def _distinct_rows(columns: Sequence[Ints | Bools]) -> tuple[Ints, Ints]:
    """Return the first of each distinct row of some columns (K,), and which one each row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    largest = 1
    for column in columns:
        base = int(column.max(initial=0)) + 1
        largest *= base
        code = code * base + column
    if largest > _LARGEST_CODE:  # ranks are smaller than the numbers
        code = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].ravel()
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), which.astype(np.int64)
