"""Arrays of jobs: their expansion in a submission, and the calls on whole arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tessera.db.jobs.arrays import get_array
from tessera.db.jobs.job_changes import apply_event_to_array
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput, NotFound
from tessera.formulation.job.arrays import ArrayRange, ArrayRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import workflows as convert
from tessera.v1 import jobs_pb2 as pb

LONGEST_SUFFIX: Final = 11
"""The characters of a job's id after its array's id, at most: a point and ten digits."""


def ranges_of(requests: Sequence[pb.SubmitJobRequest], most: int) -> list[ArrayRange | None]:
    """Return the indices of each request, or None for a single job.

    Raises:
        InvalidInput: an array is invalid, or there are more than ``most`` jobs in all. Nothing is
            expanded before this is known.
    """
    ranges = [
        convert.to_array_range(f"requests[{i}].array", request.array)
        if request.HasField("array")
        else None
        for i, request in enumerate(requests)
    ]
    total = sum(1 if one is None else one.size for one in ranges)
    if total > most:
        raise InvalidInput(
            "requests",
            f"has {total:,} jobs with those of arrays, but one call takes at most {most:,}; split it",
        )
    return ranges


def expand_array(field: str, spec: JobSpec, indices: ArrayRange) -> list[JobSpec]:
    """Return the jobs of an array, of which ``spec`` has the id and all that they share."""
    names.require_identifier(f"{field}.job_id", spec.name + LONGEST_SUFFIX * "0")
    members = indices.members(spec.name)
    specs = [replace(spec, name=member.name, array=member) for member in members]
    require_schedulable_deadline(f"{field}.job.deadline", specs[0])
    return specs


def require_schedulable_deadline(field: str, spec: JobSpec) -> None:
    """Refuse a deadline of a job in a limited array, whose start its schedule could not promise."""
    if spec.array is not None and spec.array.max_running and math.isfinite(spec.deadline_s):
        raise InvalidInput(
            field, "cannot be promised to jobs whose array has a limit; leave out one of them"
        )


class ArrayCalls:
    """The calls on whole arrays. An array that the caller may not see counts as missing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, request: pb.GetArrayRequest) -> pb.JobArray:
        """Return an array. Raises NotFound."""
        cluster, array = names.parse_array("name", request.name)
        return convert.of_array(_require_visible(self._store.read(get_array, cluster, array)))

    def change(self, request: pb.ChangeArrayRequest) -> pb.JobArray:
        """Apply an event to all jobs of an array to which it may happen. Raises NotFound."""
        cluster, array = names.parse_array("name", request.name)
        event = convert.to_event("change", request.change)
        key = fields.request_key(request, request.request_id)
        if IDENTITY.get().tenants is not None:  # no work is done for the array of another tenant
            _require_visible(self._store.read(get_array, cluster, array))

        def work(connection: Connection) -> bytes:
            record = _require_visible(apply_event_to_array(connection, cluster, array, event))
            return convert.of_array(record).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.JobArray.FromString(kept)


def _require_visible(record: ArrayRecord) -> ArrayRecord:
    """Return ``record`` if the caller may see its tenant. A raised error undoes what was changed."""
    if not IDENTITY.get().sees_tenant(record.tenant):
        raise NotFound(names.array_name(record.cluster, record.name))
    return record
