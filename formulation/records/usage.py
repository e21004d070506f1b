"""The use of a cluster by its tenants, as records."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

GROUPS: Final = ("tenant", "type", "user", "day")
"""The ways to group use. ``label:KEY`` is another one for each key of labels."""

LABEL: Final = "label:"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A question for the use of a cluster in [from_s, to_s), in seconds since 1970.

    If ``tenants`` is None, all of them count. ``groups`` are among ``GROUPS`` or labels.
    """

    from_s: float
    to_s: float
    groups: tuple[str, ...] = ()
    tenants: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """The use of GPUs and cores by the jobs of one group."""

    group: Mapping[str, str]  # from the query's groups to their values
    gpu_s: float  # GPU-seconds
    effective_gpu_s: float
    cpu_s: float  # core-seconds
    lost_gpu_s: float  # the part of ``gpu_s`` before jobs trained
    preemptions: int  # by rounds
    jobs_ended: int
    jobs_finished: int  # of those that ended
    waited_s: float  # in all, from the submission of jobs that ended to their first training


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUsage:
    """The answer to a ``UsageQuery``.

    ``capacity`` has the GPUs that the cluster has at present by type, and ``quotas`` those of the
    tenants by type, "" for any type.
    """

    to_s: float  # the end of the query, or now if that is earlier
    rows: tuple[UsageRecord, ...]
    capacity: Mapping[str, int]
    quotas: Mapping[str, Mapping[str, int]]
