"""The tenants of a cluster and their quotas, as tables of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tessera.formulation.base.tables import Bools, Floats, Ints, Table, usual


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tenants(Table):
    """Tenants that have settings. A tenant that is absent has weight 1 and no limits."""

    INDEX: ClassVar[str] = "tenants"
    name: tuple[str, ...]
    weight: Floats
    borrow_gpus: Ints  # GPUs that it may hold beyond its quota; -1 for any number
    keeps_idle_quota: Bools  # if true, others may not use the quota even while the tenant does not
    parent: Ints = usual(-1)  # index into Snapshot.tenants; -1 without one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quotas(Table):
    """GPUs that tenants are entitled to."""

    INDEX: ClassVar[str] = "quotas"
    tenant: Ints  # index into Snapshot.tenants
    gpu_type: Ints  # -1 for any type
    gpus: Ints


NO_TENANTS: Final = Tenants.from_rows([])
NO_QUOTAS: Final = Quotas.from_rows([])
