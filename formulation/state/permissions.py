"""The GPU types and nodes that jobs may run on, as tables of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tessera.formulation.base.selectors import Requirement, stored_selector
from tessera.formulation.base.tables import Bools, Ints, Table, usual
from tessera.formulation.job.runtime_offers import RuntimeLack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AvoidedNodes(Table):
    """Nodes that jobs must not run on (anti-affinity)."""

    INDEX: ClassVar[str] = "avoided nodes"
    job: Ints  # index into Snapshot.jobs
    node: Ints  # index into Snapshot.nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllowedGpuTypes(Table):
    """The GPU types that jobs may run on. A job that is absent may run on all."""

    INDEX: ClassVar[str] = "allowed types"
    job: Ints  # index into Snapshot.jobs
    gpu_type: Ints  # index into Snapshot.gpu_types

    def choices(self, jobs: int, types: int) -> tuple[Ints, Bools]:
        """Return the sets of GPU types that jobs may run on, of the numbers of jobs and types.

        The result is the set of each job, int64[jobs], and the types in each set, bool[sets, types].
        """
        if not len(self):
            return np.zeros(jobs, np.int64), np.ones((1, types), np.bool_)
        may = np.ones((jobs, types), dtype=np.bool_)
        may[self.job] = False
        may[self.job, self.gpu_type] = True
        sets, which = np.unique(may, axis=0, return_inverse=True)
        return which.ravel().astype(np.int64), sets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selectors(Table):
    """The distinct selectors of jobs (``formulation.base.selectors``), each with a runtime.

    Nodes must offer ``runtime``, unless it is "". ``cause`` and ``alternatives`` are from its
    ``RuntimeLack``.
    """

    INDEX: ClassVar[str] = "selectors"
    text: tuple[str, ...]
    runtime: tuple[str, ...] = usual("")
    cause: tuple[str, ...] = usual("")
    alternatives: tuple[str, ...] = usual("")

    def in_words(self, selector: int) -> str:
        """Return the properties that nodes need, e.g. ``zone=a and the runtime jax``."""
        runtime = self.runtime[selector]
        needs = self.text[selector], f"the runtime {runtime}" if runtime else ""
        return " and ".join(filter(None, needs))

    def without_labels(self, selector: int) -> int:
        """Return the selector with the same runtime and no requirement on labels, or -1."""
        rows = list(zip(self.text, self.runtime, strict=True))
        target = ("", self.runtime[selector]) if selector >= 0 else None
        return rows.index(target) if target in rows else -1

    def lack_of(self, selector: int) -> RuntimeLack:
        """Return the reasons why nodes lack the selector's runtime."""
        names = ("runtime", "cause", "alternatives")
        return RuntimeLack(**{name: getattr(self, name)[selector] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnmatchedNodes(Table):
    """The nodes whose labels do not match selectors."""

    INDEX: ClassVar[str] = "unmatched nodes"
    selector: Ints  # index into Snapshot.selectors
    node: Ints  # index into Snapshot.nodes

    def matches(self, selectors: int, nodes: int) -> Bools:
        """Return the nodes that match each selector, bool[selectors, nodes]."""
        matches = np.ones((selectors, nodes), dtype=np.bool_)
        matches[self.selector, self.node] = False
        return matches


NO_AVOIDED_NODES: Final = AvoidedNodes.from_rows([])
NO_ALLOWED_GPU_TYPES: Final = AllowedGpuTypes.from_rows([])
NO_SELECTORS: Final = Selectors.from_rows([])
NO_UNMATCHED_NODES: Final = UnmatchedNodes.from_rows([])


def match_selectors(
    texts: Iterable[str], labels: Sequence[Mapping[str, str]]
) -> tuple[Selectors, UnmatchedNodes]:
    """Return the distinct selectors of ``texts``, in order, and the nodes that do not match them.

    ``labels`` are those of the nodes. Texts that are empty are left out.
    """
    distinct = sorted(set(texts) - {""})
    values = _LabelValues(labels)
    matches = np.ones((len(distinct), len(labels)), dtype=np.bool_)
    for row, text in zip(matches, distinct, strict=True):
        for requirement in stored_selector(text).requirements:
            row &= values.meet(requirement)
    selector, node = np.nonzero(~matches)
    return Selectors(text=tuple(distinct)), UnmatchedNodes(selector=selector, node=node)


def tabulate_selectors(
    required: Sequence[str], preferred: Sequence[str], labels: Sequence[Mapping[str, str]]
) -> tuple[Selectors, UnmatchedNodes, dict[str, Ints]]:
    """Return the selectors of jobs, the nodes that do not match them, and those of each job.

    ``required`` and ``preferred`` are texts by job, "" for none, and ``labels`` those of the nodes.
    The last result has the columns of ``Jobs`` by name, int64[jobs].
    """
    texts = {"required_selector": required, "preferred_selector": preferred}
    selectors, unmatched = match_selectors((*required, *preferred), labels)
    index = {text: i for i, text in enumerate(selectors.text)} | {"": -1}
    columns = {
        name: np.array([index[text] for text in column], dtype=np.int64)
        for name, column in texts.items()
    }
    return selectors, unmatched, columns


class _LabelValues:
    """The values of labels by node, as numbers. Each key is looked up once for all selectors."""

    def __init__(self, labels: Sequence[Mapping[str, str]]) -> None:
        self._labels = labels
        self._of_key: dict[str, tuple[Ints, dict[str, int]]] = {}

    def meet(self, requirement: Requirement) -> Bools:
        """Return the nodes that meet the requirement, bool[nodes]."""
        if requirement.key not in self._of_key:
            numbers: dict[str, int] = {}
            found = [labels.get(requirement.key) for labels in self._labels]
            of_node = [
                -1 if value is None else numbers.setdefault(value, len(numbers)) for value in found
            ]
            self._of_key[requirement.key] = np.array(of_node, dtype=np.int64), numbers
        values, numbers = self._of_key[requirement.key]
        wanted = [numbers[value] for value in requirement.values if value in numbers]
        has: Bools = np.isin(values, wanted)
        return has ^ requirement.negated
