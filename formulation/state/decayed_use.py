"""The decayed use of tenants: what they held on average, the recent past first.

A moment counts half as much for each half-life of its age (docs/mathematics.md, Eq. 9b).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np

from tessera.formulation.base.resources import HOST_NAMES
from tessera.formulation.base.tables import Floats, Ints, Table

HOST_CODES: Final = tuple(range(-1, -1 - len(HOST_NAMES), -1))
"""The resources of ``DecayedUse`` that stand for resources of hosts, in the order of their table."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecayedUse(Table):
    """The decayed use of tenants, by tenant and resource. A resource that was not used has no row."""

    INDEX: ClassVar[str] = "decayed use"
    tenant: tuple[str, ...]
    resource: Ints  # index into Snapshot.gpu_types, or one of HOST_CODES
    amount: Floats  # GPUs, cores or bytes, held on average over the past


NO_DECAYED_USE: Final = DecayedUse.from_rows([])


def tabulate_uses(amounts: Mapping[tuple[str, int], float]) -> DecayedUse:
    """Return the table of the ``amounts``, by tenant and resource, without those of 0."""
    rows = sorted((key, amount) for key, amount in amounts.items() if amount > 0)
    return DecayedUse(
        tenant=tuple(tenant for (tenant, _), _ in rows),
        resource=np.array([resource for (_, resource), _ in rows], dtype=np.int64),
        amount=np.array([amount for _, amount in rows], dtype=np.float64),
    )


class Stint(NamedTuple):
    """A time in which a job of ``tenant`` held GPUs of one type, and cores and memory with them."""

    tenant: str
    gpu_type: int  # index into Snapshot.gpu_types
    gpus: int
    needs: tuple[int, ...]  # amounts of host resources; 0 if they are not stated
    began_s: float  # seconds since 1970


class UseMeter:
    """A sum of stints that decays. Each tenant and resource takes one number, however long the past."""

    def __init__(
        self, half_life_s: float, before: DecayedUse = NO_DECAYED_USE, at_s: float = 0.0
    ) -> None:
        """Begin with what tenants had used ``before`` the time ``at_s``, in seconds since 1970."""
        self._half_life_s, self._at_s = half_life_s, at_s
        rows = zip(before.tenant, before.resource.tolist(), before.amount.tolist(), strict=True)
        self._amounts = {(tenant, resource): amount for tenant, resource, amount in rows}

    def add(self, stint: Stint, ended_s: float) -> None:
        """Add a stint that ended at ``ended_s``, which is not before the end of any earlier one."""
        self._amounts, self._at_s = self._amounts_at(ended_s), ended_s
        self._count(self._amounts, stint, ended_s)

    def read(self, now_s: float, lasting: Iterable[Stint]) -> DecayedUse:
        """Return the use until ``now_s`` by the stints that were added and those that last."""
        amounts = self._amounts_at(now_s)
        for stint in lasting:
            self._count(amounts, stint, now_s)
        return tabulate_uses(amounts)

    def _amounts_at(self, now_s: float) -> dict[tuple[str, int], float]:
        left = 2.0 ** -(max(0.0, now_s - self._at_s) / self._half_life_s)
        return {key: amount * left for key, amount in self._amounts.items()}

    def _count(self, amounts: dict[tuple[str, int], float], stint: Stint, ended_s: float) -> None:
        """Add the share of the past, weighted by its age, that the stint takes up at its end."""
        half_lives = max(0.0, ended_s - stint.began_s) / self._half_life_s
        share = -math.expm1(-half_lives * math.log(2.0))
        of_host = zip(HOST_CODES, stint.needs, strict=True)
        for resource, held in ((stint.gpu_type, stint.gpus), *of_host):
            if held > 0:
                key = (stint.tenant, resource)
                amounts[key] = amounts.get(key, 0.0) + held * share
