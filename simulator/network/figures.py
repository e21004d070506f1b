"""The figures of contention in a run of the job simulator."""

from __future__ import annotations

import numpy as np

from tessera.simulator.network.slowdowns import ContentionRecord
from tessera.simulator.run import Result


def contention_figures(result: Result, seen: ContentionRecord) -> dict[str, float]:
    """Return the loss of a run by contention, from its segments, and the time of planning.

    ``contention_loss`` is the share of the GPU time held, over the whole run, that jobs would not
    have needed without contention. A job's slowdown is the time that it trained, divided by the
    time that the same training would have taken alone. Stragglers are not counted as contention.
    Mean and worst slowdown are over the jobs that trained.
    """
    rows = result.segments
    job = np.array([s.job for s in rows], dtype=np.int64)
    gpus = np.array([s.cell.gpus for s in rows], dtype=np.float64)
    held_s = np.array([s.end_s - s.start_s for s in rows], dtype=np.float64)
    trained_s = np.array([max(s.end_s - s.ready_s, 0.0) for s in rows], dtype=np.float64)
    alone_s = trained_s / np.array([s.network for s in rows], dtype=np.float64)
    held_gpu_s = float(gpus @ held_s)
    trained, alone = (np.bincount(job, weights=each) for each in (trained_s, alone_s))
    slowdown = trained[alone > 0] / alone[alone > 0]
    return {
        "contention_loss": float(gpus @ (trained_s - alone_s)) / held_gpu_s if held_gpu_s else 0.0,
        "jobs_met": float(len(seen.contended)),
        "jobs_trained": float(len(slowdown)),
        "slowdown_mean": float(slowdown.mean()) if len(slowdown) else 1.0,
        "slowdown_worst": float(slowdown.max(initial=1.0)),
        "network_plans": float(seen.plans),
        "network_plan_s": seen.plan_s,
        "network_plan_max_s": seen.slowest_plan_s,
    }
