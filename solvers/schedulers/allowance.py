"""The GPUs that tenants may still claim for guaranteed jobs."""

from __future__ import annotations

from tessera.formulation.state.hierarchy import lines_of_snapshot
from tessera.formulation.state.snapshot import Snapshot


class Allowance:
    """The GPUs left of each quota; a tenant without a quota has no limit.

    GPUs are charged to the quotas of all tenants above, too. Published schedulers know no
    borrowing, so the GPUs that a tenant lends or borrows are left out.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._left: dict[str, list[tuple[int, list[int]]]] = {}  # tenant -> (type or -1, [left])
        quotas, self._lines = snapshot.quotas, lines_of_snapshot(snapshot)
        for tenant, gpu_type, gpus in zip(
            quotas.tenant.tolist(), quotas.gpu_type.tolist(), quotas.gpus.tolist(), strict=True
        ):
            name = snapshot.tenants.name[tenant]
            self._left.setdefault(name, []).append((gpu_type, [gpus]))

    def charge(self, tenant: str, gpu_type: int, gpus: int) -> None:
        """Charge ``gpus`` of ``gpu_type`` to ``tenant``. The rest of a quota may become negative."""
        for counter in self._counters(tenant, gpu_type):
            counter[0] -= gpus

    def claim(self, tenant: str, gpu_type: int, gpus: int) -> bool:
        """Charge the GPUs if all quotas of ``tenant`` have that many left.

        Return whether they had.
        """
        if any(counter[0] < gpus for counter in self._counters(tenant, gpu_type)):
            return False
        self.charge(tenant, gpu_type, gpus)
        return True

    def _counters(self, tenant: str, gpu_type: int) -> list[list[int]]:
        line = self._lines.get(tenant, (tenant,))
        counters = (counter for above in line for counter in self._left.get(above, ()))
        return [left for t, left in counters if t in (-1, gpu_type)]
