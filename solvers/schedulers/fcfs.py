"""First come, first served: each job gets its request, in the order of arrival."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.policy import Policy
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import OptionPacking, options_of


class Fcfs:
    """Rigid scheduling in order of arrival (Arena section 5.1, baseline i).

    A running job keeps its GPUs until it ends. A waiting job gets the GPU count and type that it
    requested, once there is room. The first job that finds none blocks its type for all later ones.
    The papers leave open what happens to a job that takes any type. Here it gets the fastest type
    that has room and is not blocked; without such a type, it blocks every type that it could use. A
    job whose request has no Cell blocks no job, since no GPU that becomes free would ever help it.
    """

    name = "fcfs"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen, requested_only=True)
        packing = OptionPacking(options, seen.capacity)
        packing.keep_running()
        waits = np.array(packing.option, dtype=np.int64) < 0
        wanted = options.as_requested & options.on_type & waits[options.job]
        kind = options.gpu_type.tolist()
        blocked: set[int] = set()
        for own in options.grouped(wanted):
            possible = [o for o in own if kind[o] not in blocked]
            if possible and not packing.take_first(possible):
                blocked.update([kind[o] for o in possible])
        return packing.choice

    def lasts(self, policy: Policy) -> bool:
        """Return True, since only arrival and free GPUs matter."""
        return True
