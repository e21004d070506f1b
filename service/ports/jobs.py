"""Jobs and arrays of jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tessera.formulation.arrays import ArrayRecord
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.jobs import JobEventRecord, JobRecord, JobSpec
from tessera.formulation.records.rounds import JobRound


class JobWriter(Protocol):
    """Changes of jobs in one transaction.

    If a version is None, it matches any stored version.
    """

    def submit_jobs(
        self, cluster: str, jobs: Sequence[JobSpec], tenants: Collection[str] | None = None
    ) -> list[JobRecord]:
        """Queue jobs, all or none.

        Jobs of other ``tenants`` that they wait for count as unknown, unless it is None.

        Raises:
            NotFound: the cluster. AlreadyExists: a job.
            InvalidInput: unknown GPU type, node or dependency; jobs that wait for each other; a
                deadline that has passed; a pinned GPU type on which the workload has no Cells
                although it has some on others; or its Cells do not fit the cluster.
            LimitReached: a tenant would have too many live jobs.
        """
        ...

    def update_job(
        self, cluster: str, spec: JobSpec, fields: Sequence[str], version: int | None
    ) -> JobRecord:
        """Change the named fields (of JobSpec) of a job.

        A change that asks for more withdraws a promised deadline.

        Raises:
            NotFound, StaleEtag, NotAllowed (ended), InvalidInput and LimitReached (as
                ``submit_jobs``).
        """
        ...

    def job_event(self, cluster: str, name: str, event: JobEvent, version: int | None) -> JobRecord:
        """Apply a user's event (cancel, hold, release). Raises NotFound, StaleEtag, NotAllowed."""
        ...

    def array_event(self, cluster: str, name: str, event: JobEvent) -> ArrayRecord:
        """Apply a user's event to all jobs of an array to which it may happen. Raises NotFound."""
        ...


class JobFinder(Protocol):
    """The part of a store that finds a job by its name."""

    def get_job(self, cluster: str, name: str) -> JobRecord:
        """Return a job. Raises NotFound."""
        ...


class JobStore(JobFinder, Protocol):
    """The part of a store that keeps jobs, their history and their execution plans."""

    def get_array(self, cluster: str, name: str) -> ArrayRecord:
        """Return an array of jobs, with the numbers of its jobs. Raises NotFound."""
        ...

    def list_jobs(
        self,
        cluster: str,
        states: Sequence[JobState],
        after: int,
        limit: int,
        *,
        tenants: Collection[str] | None = None,
    ) -> tuple[list[JobRecord], int]:
        """Return jobs in order of submission after the cursor ``after``, and the next cursor.

        A cursor of 0 means the start as an argument, and no more jobs as a result. If ``states`` is
        empty, jobs in all states are returned. If ``tenants`` is None, jobs of all tenants are
        returned, and otherwise only those of these tenants. Raises NotFound (the cluster).
        """
        ...

    def tenants_of_jobs(self, cluster: str, names: Collection[str]) -> dict[str, str]:
        """Return the tenant of each of these jobs that exists. A missing cluster has no jobs.

        The names may be any texts.
        """
        ...

    def job_history(self, cluster: str, name: str) -> list[JobEventRecord]:
        """Return the events of a job, oldest first. Raises NotFound."""
        ...

    def rounds_of_job(self, cluster: str, name: str, last: int, most: int) -> list[JobRound]:
        """Return the decisions on a job of up to ``most`` rounds that are kept, newest first.

        They are of round ``last`` and the ones before it, or of all rounds if it is 0. Raises
        NotFound.
        """
        ...

    def execution_plans(self, cluster: str, digests: Collection[str]) -> dict[str, str]:
        """Return the canonical JSON of execution plans by digest, without those that are not stored."""
        ...
