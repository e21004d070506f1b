"""ElasticFlow: the least share that meets each deadline, and then the rest where it gains most."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.promises.deadlines import finishes_in_time
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions, OptionPacking, options_of


class ElasticFlow:
    """ElasticFlow (ASPLOS'23); with ``loosened`` deadlines ElasticFlow-LS, as in Arena and Crius.

    Admission: jobs get their minimum satisfactory share, which is the least count whose rate meets
    the deadline. The order is: running jobs with deadlines, waiting ones with deadlines (by
    deadline, then arrival), running jobs without, waiting ones without. Without a deadline, or with
    ``loosened`` deadlines, the share is the least count that runs at all. A waiting job whose
    deadline no count meets is not admitted; a running one is treated as if it had none.

    Then the remaining GPUs are given out, one step of counts at a time. Each step goes to the job
    whose normalized throughput gains most by each added GPU (marginal return). That goes on while
    it gains at all and the restart leaves the job in time. For all schedulers, Arena's Eq. (6),
    restarts included, decides what is in time.

    The paper's cluster has one GPU type. Here each type is such a cluster. A running job stays on
    its type. A waiting job goes to the type that it requested or, if it takes any, to the type with
    most free GPUs that can meet its deadline. The paper lets a share change from slot to slot up to
    the deadline; here one share holds for all slots. Requested counts are ignored.
    """

    def __init__(self, *, loosened: bool = False) -> None:
        self.name = "elasticflow-ls" if loosened else "elasticflow"
        self._loosened = loosened

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        packing = OptionPacking(options, seen.capacity)
        deadline_s = np.array(seen.draft.snapshot.jobs.deadline_s)
        meets: Bools = finishes_in_time(seen.draft)[options.column]
        if self._loosened:
            deadline_s[:], meets = np.inf, np.ones(len(options), dtype=np.bool_)
        hopeless = options.runs.copy()
        hopeless[options.job[meets]] = False
        deadline_s = np.where(hopeless, np.inf, deadline_s)
        meets = meets | hopeless[options.job]
        shares = _shares(options, meets)
        kind = options.gpu_type.tolist()
        for job in _order(options, deadline_s).tolist():
            packing.take_first(sorted(shares[job], key=lambda o: -packing.free[kind[o]]))
        return_of = (options.rate / seen.draft.requested_rate[options.job]).tolist()
        gpus, in_time_on = options.gpus.tolist(), meets.tolist()

        def marginal_return(a: int, b: int) -> float:
            gain: float = (return_of[b] - return_of[a]) / (gpus[b] - gpus[a])
            return gain if in_time_on[b] else 0.0

        packing.grow(marginal_return)
        return packing.choice


def _shares(options: JobOptions, meets: Bools) -> list[list[int]]:
    """Return the minimum satisfactory share of each job on each type where it may run."""
    runs, now = options.runs[options.job], options.current[options.job]
    here = options.gpu_type == options.gpu_type[now] if len(options) else runs
    usable = meets & np.where(runs, here, options.on_type)
    picked = np.flatnonzero(usable)
    first = np.ones(len(picked), dtype=np.bool_)  # options of a job rise by type, then by count
    job, kind = options.job[picked], options.gpu_type[picked]
    first[1:] = (job[1:] != job[:-1]) | (kind[1:] != kind[:-1])
    least = np.zeros(len(options), dtype=np.bool_)
    least[picked[first]] = True
    return options.grouped(least)


def _order(options: JobOptions, deadline_s: Floats) -> Ints:
    """Return the jobs in the order of admission."""
    rank = 2 * np.isinf(deadline_s) + ~options.runs
    return np.lexsort((np.arange(len(rank)), deadline_s, rank))
