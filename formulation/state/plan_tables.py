"""The execution plans of a cluster that runtimes refuse, and those of one kind, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tessera.formulation.base.tables import Bools, Ints, Table, usual


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runtimes(Table):
    """The runtimes of jobs that cannot run every execution plan, alone or by a job's techniques.

    The same runtime with other techniques is another row.
    """

    INDEX: ClassVar[str] = "runtimes"
    name: tuple[str, ...]
    """One of job.runtimes.RESTRICTED_RUNTIMES. "" for one that is restricted by techniques alone."""
    pipelines: Bools  # whether it can run plans of several pipeline stages
    techniques: tuple[str, ...] = usual("")
    """The techniques that its jobs can use, e.g. "dp, zero1". "" for all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RefusedPlans(Table):
    """The recorded execution plans that runtimes cannot run."""

    INDEX: ClassVar[str] = "refused plans"
    runtime: Ints  # index into Snapshot.runtimes
    plan: Ints  # index into Snapshot.plans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanKinds(Table):
    """The execution plans that differ from others in nothing but their data-parallel degree."""

    INDEX: ClassVar[str] = "plan kinds"
    plan: Ints  # index into Snapshot.plans
    kind: tuple[str, ...]  # the plan's name without its data-parallel degree


NO_RUNTIMES: Final = Runtimes.from_rows([])
NO_REFUSED_PLANS: Final = RefusedPlans.from_rows([])
NO_PLAN_KINDS: Final = PlanKinds.from_rows([])
