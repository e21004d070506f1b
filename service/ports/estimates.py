"""Estimates of Cells, with the models and profiles that they are computed from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tessera.formulation.reasons import Reason
from tessera.formulation.records.estimates import (
    CellFilter,
    EstimateRecord,
    HostProfile,
    ModelSpec,
    ProfileGap,
    ProfileRow,
    TuningRecord,
)
from tessera.formulation.values import Cell, Workload


class EstimateWriter(Protocol):
    """Changes of estimates and of what they are computed from, in one transaction."""

    def upsert_estimates(self, cluster: str, estimates: Sequence[EstimateRecord]) -> int:
        """Create or replace estimates; return how many.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def delete_cells(self, cluster: str, cells: CellFilter) -> int:
        """Delete all matching estimates, including those of the service; return how many.

        Measurements stay.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type. InUse: jobs run on one of them.
        """
        ...

    def derive(
        self,
        cluster: str,
        estimates: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
        tunings: Sequence[TuningRecord] = (),
    ) -> int:
        """Store estimates that the service made; return how many were new or replaced another.

        Estimates of users are not changed, and no computed estimate is added next to one of them. A
        measured estimate of the service is not replaced by a computed one. ``derived_from`` maps
        each workload to the digest of the inputs of its estimates. The reason why such a workload
        has no estimates is deleted. ``tunings`` are plans that programs may try around those of
        the estimates.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def say_waiting(self, cluster: str, reasons: Mapping[Workload, Reason | None]) -> None:
        """Record why workloads have no estimates. None deletes the reason.

        The reason is shown with the workload's queued jobs.
        """
        ...

    def upsert_models(self, cluster: str, models: Sequence[ModelSpec]) -> int:
        """Create or replace users' models, all or none; return how many. Raises NotFound."""
        ...

    def delete_models(
        self, cluster: str, models: Collection[tuple[str, str]], *, allow_missing: bool
    ) -> None:
        """Delete users' models, by (model, params), and the estimates that were computed from them.

        Raises:
            NotFound: the cluster, or a model unless ``allow_missing``. InUse: live jobs train one
                of them.
        """
        ...

    def add_plans(self, cluster: str, planned_cells: Sequence[tuple[Cell, EstimateRecord]]) -> int:
        """Give users' estimates that have none an execution plan; return how many got one.

        Each Cell is as the user stated it, and the record has its plan, provenance and traffic.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def add_profiles(
        self,
        cluster: str,
        rows: Sequence[ProfileRow],
        gap: ProfileGap | None = None,
        host: HostProfile | None = None,
    ) -> int:
        """Store measured layers; return how many were new. Stored ones are never changed.

        ``gap`` has the sizes that the task left out. It replaces an earlier one of the task.
        Complete rows delete it. ``host`` are the rates of the node's host, of which each task has
        the latest.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def end_profiling(self, cluster: str, task: str, gap: ProfileGap | None) -> None:
        """Cancel a profiling task at a limit, and store what it left out with the reason.

        Raises:
            NotFound: the cluster, or the task. NotAllowed: it ends already. InvalidInput: unknown
                GPU type.
        """
        ...


class EstimateStore(Protocol):
    """The part of a store that keeps estimates and users' models."""

    def list_estimates(
        self, cluster: str, model: str, params: str, global_batch: int, after: int, limit: int
    ) -> tuple[list[EstimateRecord], int]:
        """Return estimates from a cursor, and the next cursor.

        They are those of one workload, or of all workloads if ``model`` is "".
        """
        ...

    def list_model_names(self, cluster: str) -> list[tuple[str, str]]:
        """Return the names and sizes of users' models and of those that have estimates.

        Raises NotFound (the cluster).
        """
        ...

    def list_models(self, cluster: str) -> list[ModelSpec]:
        """Return the users' models, by name. Raises NotFound (the cluster)."""
        ...
