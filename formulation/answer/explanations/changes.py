"""The changes that could help a job: to itself, its tenant, the cluster, the policy, or in time.

A change is flat, so that it can travel as text and be tried by anyone on the round's snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.formulation.base.texts import Name, Text


class ChangeKind(StrEnum):
    """The kind of a change, a stable code. ``subject`` and ``amount`` of the change depend on it."""

    # By the job's user.
    WEIGHT = "WEIGHT"  # amount: the job's weight
    PRIORITY = "PRIORITY"  # amount: the job's priority
    DEADLINE = "DEADLINE"  # amount: the job's deadline in seconds since 1970; inf for none
    ANY_TYPE = "ANY_TYPE"  # the job is no longer pinned to its GPU type
    ANY_NODE = "ANY_NODE"  # the job avoids no node
    ANY_LABELS = "ANY_LABELS"  # the job requires no labels of its nodes
    ALLOW_TYPE = "ALLOW_TYPE"  # subject: the GPU types that the job may run on, "TYPE,TYPE"
    MIN_GPUS = "MIN_GPUS"  # amount: the job's least GPUs; 0 for no bound
    MAX_GPUS = "MAX_GPUS"  # amount: the job's most GPUs; 0 for no bound
    STAY = "STAY"  # the job is not moved to reduce fragmentation
    RELEASE = "RELEASE"  # a held job is released
    RETRY = "RETRY"  # the job's back-off ends now
    REQUEST = "REQUEST"  # amount: the GPUs that the job requests
    REQUEST_TYPE = "REQUEST_TYPE"  # subject: the GPU type that the job requests
    BEST_EFFORT = "BEST_EFFORT"  # the job is not guaranteed
    ANY_PLAN = "ANY_PLAN"  # the job states no execution plan
    # By the cluster's operator.
    QUOTA = "QUOTA"  # subject: "TENANT" or "TENANT/TYPE"; amount: GPUs
    BORROW = "BORROW"  # subject: the tenant; amount: GPUs that it may borrow
    LEND = "LEND"  # subject: the tenant, which lends its quota
    TENANT_WEIGHT = "TENANT_WEIGHT"  # subject: the tenant; amount: its weight
    UNDRAIN = "UNDRAIN"  # subject: the node, which is schedulable again
    LOSE = "LOSE"  # subject: the node, which is away
    ADD_GPUS = "ADD_GPUS"  # subject: the GPU type; amount: GPUs, on nodes of `size`
    ADD_CPUS = "ADD_CPUS"  # subject: the node; amount: the CPU cores that jobs may use there
    ADD_HOST_MEMORY = "ADD_HOST_MEMORY"  # subject: the node; amount: bytes that jobs may use there
    ADD_CELL = "ADD_CELL"  # subject: the GPU type; amount: GPUs; size: samples/s
    POLICY = "POLICY"  # subject: the option of the policy; amount: its value
    # By nobody.
    END = "END"  # subject: the job that has ended
    WAIT = "WAIT"  # amount: the time until which the job waits, in seconds since 1970


class Actor(StrEnum):
    """The person who can make a change, or time."""

    USER = "user"
    OPERATOR = "operator"
    TIME = "time"


_OF_OPERATOR: Final = frozenset(
    {
        ChangeKind.QUOTA,
        ChangeKind.BORROW,
        ChangeKind.LEND,
        ChangeKind.TENANT_WEIGHT,
        ChangeKind.UNDRAIN,
        ChangeKind.LOSE,
        ChangeKind.ADD_GPUS,
        ChangeKind.ADD_CPUS,
        ChangeKind.ADD_HOST_MEMORY,
        ChangeKind.ADD_CELL,
        ChangeKind.POLICY,
    }
)
_OF_TIME: Final = frozenset({ChangeKind.END, ChangeKind.WAIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change. ``before`` is the present amount, or NaN if the kind has no amount.

    ``tenant`` is the tenant that the subject is, or belongs to. None if it belongs to none.
    """

    kind: ChangeKind
    subject: str = ""
    amount: float = 0.0
    size: float = 0.0
    before: float = float("nan")
    tenant: str | None = None

    @property
    def named_subject(self) -> Text:
        """Return the subject as it is in texts."""
        return self.subject if self.tenant is None else Name(self.subject, self.tenant)

    @property
    def actor(self) -> Actor:
        """Return who can make the change."""
        if self.kind in _OF_TIME:
            return Actor.TIME
        return Actor.OPERATOR if self.kind in _OF_OPERATOR else Actor.USER
