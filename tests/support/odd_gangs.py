"""Rounds of gangs that each run on one GPU count, which may leave gaps on nodes."""

from __future__ import annotations

from typing import Any

from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes


def gangs(
    *gpus: int, nodes: int = 3, running: dict[int, Gang] | None = None, **job: Any
) -> Snapshot:
    """Return jobs that each run on one GPU count, on nodes of 8; those in ``running`` run already."""
    running = running or {}
    rows = [
        a_job(
            f"j{k}",
            k,
            **(
                {"state": JobState.RUNNING, "cell": (0, n, 1), "generation": 1}
                if k in running
                else {}
            ),
            **job,
        )
        for k, n in enumerate(gpus)
    ]
    return a_snapshot(
        nodes=some_nodes((0, nodes, 8)),
        jobs=rows,
        estimates=[an_estimate(k, 0, n, -(-n // 8), iter_time_s=8 / n) for k, n in enumerate(gpus)],
        gangs=running,
    )
