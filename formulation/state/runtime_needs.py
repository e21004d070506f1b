"""The jobs that need a runtime of their nodes, as selectors of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from tessera.formulation.job.runtime_offers import NodeOffers, describe_lack
from tessera.formulation.state.permissions import Selectors, UnmatchedNodes
from tessera.formulation.state.snapshot import Jobs

NO_LABELS: Final = -1
"""The selector of a job that states none."""


class RuntimeNeed(NamedTuple):
    """A job that needs a runtime which some nodes lack, with the nodes whose GPUs it holds."""

    job: int  # index into Snapshot.jobs
    runtime: str
    holders: tuple[int, ...]  # indices into Snapshot.nodes


class _RuntimeSelector(NamedTuple):
    """A selector by labels, with a runtime. ``exceptions`` are nodes that may lack the runtime."""

    labels: int
    runtime: str
    exceptions: frozenset[int] = frozenset()


class RuntimeRequirements:
    """The runtimes that jobs need and some nodes lack.

    ``offers`` are from nodes that lack some runtime, and ``nodes`` has the indices of all nodes by
    name.
    """

    def __init__(
        self,
        needs: Sequence[RuntimeNeed],
        offers: Sequence[NodeOffers],
        nodes: Mapping[str, int],
    ) -> None:
        runtimes = sorted({need.runtime for need in needs})
        self._needs, self._nodes = needs, len(nodes)
        self._lacks = {runtime: describe_lack(runtime, offers) for runtime in runtimes}
        self._lacking_nodes = {
            runtime: frozenset(
                nodes[name] for o in offers if runtime not in o.versions for name in o.nodes
            )
            for runtime in runtimes
        }

    def add_to(
        self, jobs: Jobs, selectors: Selectors, unmatched_nodes: UnmatchedNodes
    ) -> tuple[Jobs, Selectors, UnmatchedNodes]:
        """Return the jobs with selectors that include their needs, and these selectors.

        A job that runs is not moved because its node lacks its runtime now.
        """
        of_jobs, keys = np.array(jobs.required_selector), dict[_RuntimeSelector, int]()
        for runtime in self._lacks:
            keys[_RuntimeSelector(NO_LABELS, runtime)] = len(selectors) + len(keys)
        for need in self._needs:
            exceptions = self._lacking_nodes[need.runtime].intersection(need.holders)
            key = _RuntimeSelector(int(of_jobs[need.job]), need.runtime, exceptions)
            of_jobs[need.job] = keys.setdefault(key, len(selectors) + len(keys))
        return (
            replace(jobs, required_selector=of_jobs),
            self._with_rows(selectors, keys),
            self._with_nodes(unmatched_nodes, len(selectors), keys),
        )

    def _with_rows(self, selectors: Selectors, keys: Iterable[_RuntimeSelector]) -> Selectors:
        lacks = [self._lacks[key.runtime] for key in keys]
        texts = ("" if key.labels < 0 else selectors.text[key.labels] for key in keys)
        blank = ("",) * len(selectors)
        return Selectors(
            text=(*selectors.text, *texts),
            runtime=(*blank, *(lack.runtime for lack in lacks)),
            cause=(*blank, *(lack.cause for lack in lacks)),
            alternatives=(*blank, *(lack.alternatives for lack in lacks)),
        )

    def _with_nodes(
        self, unmatched_nodes: UnmatchedNodes, selectors: int, keys: Mapping[_RuntimeSelector, int]
    ) -> UnmatchedNodes:
        matches = unmatched_nodes.matches(selectors, self._nodes)
        rows, nodes = [unmatched_nodes.selector], [unmatched_nodes.node]
        for key, row in keys.items():
            wrong = np.zeros(self._nodes, np.bool_)
            wrong[sorted(self._lacking_nodes[key.runtime] - key.exceptions)] = True
            if key.labels >= 0:
                wrong |= ~matches[key.labels]
            nodes.append(np.flatnonzero(wrong))
            rows.append(np.full(int(wrong.sum()), row, np.int64))
        return replace(unmatched_nodes, selector=np.concatenate(rows), node=np.concatenate(nodes))
