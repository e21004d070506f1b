"""What a published policy is: a choice of Cells from what it may see of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from formulation.columns import first_draft
from formulation.draft import Draft
from formulation.policy import Policy
from formulation.problem import Problem
from formulation.promises import PHYSICAL
from formulation.snapshot import Snapshot
from formulation.tables import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What a policy looks at.

    ``draft.snapshot`` has the estimates that the policy's information lets it see, and ``draft`` one column
    for each of their Cells, dominated ones too. ``capacity`` is int64[types], schedulable GPUs.
    """

    draft: Draft
    capacity: Ints
    seed: int = 0


def seen(snapshot: Snapshot, policy: Policy, seed: int = 0) -> Seen:
    """Return what a policy sees of ``snapshot``, whose estimates are those of its information."""
    draft = first_draft(snapshot, policy, every_cell=True)
    for rule in PHYSICAL:
        draft = rule(draft)
    return Seen(draft=draft, capacity=snapshot.schedulable_gpus(), seed=seed)


class Published(Protocol):
    """A published scheduler. It keeps no state: all that it knows between rounds is in the snapshot."""

    @property
    def name(self) -> str:
        """Return its name, e.g. ``fcfs``."""
        ...

    def choose(self, seen: Seen) -> Ints:
        """Return the column of ``seen.draft`` that each job is to run, int64[jobs]; -1: it waits.

        Together they fit the capacity of each type.
        """
        ...


def carried(draft: Draft, problem: Problem, choice: Ints) -> Ints:
    """Return ``choice`` (columns of ``draft``) in the columns of ``problem``, int64[jobs]; -1: waits.

    The job gets the GPU type and count that the policy chose, and of the true Cells there the one that
    it named if there is such a one, else the fastest. A Cell that does not truly run leaves it waiting.
    """
    found = np.full(len(choice), -1, dtype=np.int64)
    seen, true = draft.cells, problem.cells
    for job in np.flatnonzero(choice >= 0).tolist():
        mine = int(draft.cell[choice[job]])
        columns = np.array(problem.columns_of(job), dtype=np.int64)
        cells = problem.cell[columns]
        same = (true.gpu_type[cells] == seen.gpu_type[mine]) & (true.gpus[cells] == seen.gpus[mine])
        if not same.any():
            continue
        named = (
            same
            & (true.pipeline_degree[cells] == seen.pipeline_degree[mine])
            & (true.plan[cells] == seen.plan[mine])
        )
        among = np.flatnonzero(named if named.any() else same)
        found[job] = columns[among[np.argmax(true.rate[cells[among]])]]
    return found
