"""Reservations as requested and as stored: windows of time for some jobs, or for maintenance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.moments import format_rfc3339

LONGEST_S = 366 * 86_400.0
"""The longest window of a reservation. A longer one is a quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationSpec:
    """A reservation as requested: GPUs of a type, or nodes, from ``start_s`` until ``end_s``.

    It serves the jobs of ``tenant``, or those with the label ``label_key`` = ``label_value``, or no
    jobs at all if it is for maintenance. Times are in seconds since 1970.
    """

    name: str
    start_s: float
    end_s: float
    gpu_type: str = ""  # "" for one of nodes
    gpus: int = 0  # 0 for one of nodes
    nodes: tuple[str, ...] = ()
    tenant: str = ""
    label_key: str = ""
    label_value: str = ""
    maintenance: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s)):
            raise InvalidInput("start_time", "both the start and the end must be points in time")
        if self.end_s <= self.start_s:
            raise InvalidInput("end_time", f"{self.name} must end after it begins")
        if self.end_s - self.start_s > LONGEST_S:
            raise InvalidInput(
                "end_time", f"{self.name} lasts longer than a year; give the tenant a quota instead"
            )
        if bool(self.nodes) == bool(self.gpu_type or self.gpus):
            raise InvalidInput("gpus", "state either GPUs of a type, or nodes")
        if not self.nodes and not (self.gpu_type and self.gpus >= 1):
            raise InvalidInput("gpus", "state both the GPU type and how many GPUs, at least 1")
        if repeated := [name for name, count in Counter(self.nodes).items() if count > 1]:
            raise InvalidInput("nodes", f"{min(repeated)} is named twice; name each node once")
        served = bool(self.tenant) + bool(self.label_key)
        if self.maintenance and (served or not self.nodes):
            raise InvalidInput(
                "maintenance", "maintenance is of nodes, and serves neither a tenant nor a label"
            )
        if not self.maintenance and served != 1:
            raise InvalidInput(
                "tenant", "state which jobs it serves: those of a tenant, or those with a label"
            )

    def serves(self, tenants: Sequence[str], labels: Mapping[str, str]) -> bool:
        """Return whether it serves a job with ``labels`` of any of ``tenants``.

        These are the job's tenant and those above it.
        """
        if self.tenant:
            return self.tenant in tenants
        return bool(self.label_key) and labels.get(self.label_key) == self.label_value

    def overlaps(self, other: ReservationSpec) -> bool:
        """Return whether both windows have a moment in common."""
        return self.start_s < other.end_s and other.start_s < self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRecord:
    """A reservation as stored."""

    spec: ReservationSpec
    version: int
    created_s: float
    active: bool = False
    """Whether its window has begun and not ended, by the database's clock."""
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """The GPUs of a node, for checks of reservations."""

    gpu_type: str
    gpus: int


def require_room(
    spec: ReservationSpec, others: Sequence[ReservationSpec], nodes: Mapping[str, NodeSize]
) -> None:
    """Check that the cluster's ``nodes`` have what ``spec`` and the ``others`` reserve together.

    All nodes count, drained and silent ones, too.

    Raises:
        InvalidInput: a node or a type that the cluster lacks, more GPUs than it has of the type, or
            a moment at which ``spec`` and others exceed it. The others are named.
    """
    if unknown := [name for name in spec.nodes if name not in nodes]:
        raise InvalidInput("nodes", f"the cluster has no node {min(unknown)}")
    sizes = [size for size in nodes.values() if size.gpu_type == spec.gpu_type]
    if spec.gpu_type and spec.gpus > sum(size.gpus for size in sizes):
        raise InvalidInput(
            "gpus",
            f"{spec.gpus} x {spec.gpu_type} are requested, but the cluster has"
            f" {sum(size.gpus for size in sizes)}",
        )
    meeting = [other for other in others if other.name != spec.name and other.overlaps(spec)]
    for other in meeting:
        if both := set(spec.nodes) & set(other.nodes):
            raise InvalidInput(
                "nodes",
                f"{min(both)} is reserved by {_in_words(other)}; choose another time or node",
            )
    moments = sorted({spec.start_s, *(max(o.start_s, spec.start_s) for o in meeting)})
    for kind in sorted({spec.gpu_type, *(nodes[name].gpu_type for name in spec.nodes)} - {""}):
        there = sum(size.gpus for size in nodes.values() if size.gpu_type == kind)
        for moment_s in moments:
            then = [o for o in meeting if o.start_s <= moment_s < o.end_s and _gpus(o, kind, nodes)]
            left = there - sum(_gpus(other, kind, nodes) for other in then)
            if _gpus(spec, kind, nodes) > left:
                raise InvalidInput(
                    "gpus",
                    f"only {max(0, left)} of {there} x {kind} are not reserved at"
                    f" {format_rfc3339(moment_s)}, next to {', '.join(map(_in_words, then))}",
                )


def _gpus(spec: ReservationSpec, kind: str, nodes: Mapping[str, NodeSize]) -> int:
    """Return the GPUs of type ``kind`` that a reservation takes."""
    if spec.gpu_type:
        return spec.gpus if spec.gpu_type == kind else 0
    known = [nodes[name] for name in spec.nodes if name in nodes]
    return sum(size.gpus for size in known if size.gpu_type == kind)


def _in_words(spec: ReservationSpec) -> str:
    return f"{spec.name} ({format_rfc3339(spec.start_s)} to {format_rfc3339(spec.end_s)})"
