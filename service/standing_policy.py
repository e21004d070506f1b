"""The standing policy of rounds, compared with what a job asks for."""

from __future__ import annotations

import math

from tessera.formulation.policy import MODES_WITHOUT_PROMISES
from tessera.formulation.records.jobs import JobRecord
from tessera.solvers.rounds.options import RoundOptions


def unheeded_wishes(job: JobRecord, standing: RoundOptions) -> list[str]:
    """Return one message for each wish of a job that rounds under the ``standing`` policy ignore.

    Each message says what to do.
    """
    if not math.isfinite(job.spec.deadline_s):
        return []
    if standing.scheduler:
        why = f"the scheduler {standing.scheduler!r} decides rounds and promises no deadline"
    elif standing.deadline_mode not in MODES_WITHOUT_PROMISES:
        return []
    elif job.admitted and standing.deadline_mode != "ignore":
        return []  # it was promised before, and the promise is kept
    else:
        why = f"the standing policy (deadlines: {standing.deadline_mode}) promises no new deadline"
    return [
        f"rounds will ignore this job's deadline: {why}; decide rounds with"
        " `tessera round --objective 'deadline then throughput'`, or set the server's standing policy:"
        " TESSERA_POLICY='{objective: deadline then throughput}'"
    ]
