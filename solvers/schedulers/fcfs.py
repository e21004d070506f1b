"""First come, first served: what was asked for, in the order of arrival."""

from __future__ import annotations

import numpy as np

from tessera.formulation.policy import Policy
from tessera.formulation.tables import Ints
from tessera.solvers.schedulers.base import Seen
from tessera.solvers.schedulers.packing import Packing, options_of


class Fcfs:
    """Rigid scheduling in order of arrival (Arena section 5.1, baseline i).

    A running job keeps what it has until it ends. A waiting job gets the GPU count that it requested on the
    type that it requested, once there is room; the first that finds none blocks its type for all that
    came later. Left open by the papers, and chosen here: a job that takes any type gets the fastest
    one that has room and is not blocked, and if there is none blocks every type that it could use. A
    job whose request has no Cell blocks nobody, since no GPU that comes free would ever help it.
    """

    name = "fcfs"

    def choose(self, seen: Seen) -> Ints:
        """Return the column of each job."""
        options = options_of(seen, requested_only=True)
        packing = Packing(options, seen.capacity)
        packing.keep_running()
        waits = np.array(packing.option, dtype=np.int64) < 0
        wanted = options.as_requested & options.on_type & waits[options.job]
        kind = options.gpu_type.tolist()
        blocked: set[int] = set()
        for mine in options.grouped(wanted):
            possible = [o for o in mine if kind[o] not in blocked]
            if possible and not packing.take_first(possible):
                blocked.update([kind[o] for o in possible])
        return packing.choice

    def lasts(self, policy: Policy) -> bool:
        """Return True: arrival and what is free are all that counts."""
        return True
