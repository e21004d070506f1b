"""A campaign of the testbed, decided again by our own policy and compared with the record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.benchmarks.papers.testbed.records import ROUND_S, RecordedJob
from tessera.benchmarks.papers.testbed.replay import (
    CLUSTER,
    held_steps,
    mean_by_round,
    recorded_rates,
)
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.clusters import preset_cluster
from tessera.simulator.comparison.judges import PausableClock
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival

OUR_POLICIES: Final[Mapping[str, str]] = {
    "crius": "arena",
    "elasticflow-l": "elasticflow-ls",
    "fcfs": "fcfs",
    "gandiva": "gandiva",
    "gavel": "gavel",
}
"""A map of the testbed's schedulers to our policies.

Ours follow the papers and not the artifact's code.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedCampaign:
    """A campaign that was decided again until the record's end.

    JCT is the mean over the ``jobs`` jobs that ended in both.
    """

    policy: str
    done_recorded: int
    done: int
    jobs: int
    jct_recorded_s: float
    jct_s: float
    throughput_recorded: float
    throughput: float


def decide_again(
    jobs: Sequence[RecordedJob],
    requests: Mapping[str, tuple[float, JobSpec]],
    profiles: Sequence[EstimateRecord],
    overheads: Overheads,
) -> DecidedCampaign:
    """Run all requests of the trace under our policy, with the testbed's rounds of 300 s.

    The policy sees the profiles. Throughput is the mean until the record's end, as in the
    ``ReplayErrors`` of a replay.
    """
    policy, origin_s = OUR_POLICIES[jobs[0].policy], jobs[0].origin_s
    came = [
        Arrival(at_s - origin_s, replace(spec, name=name, deadline_s=math.inf))
        for name, (at_s, spec) in sorted(requests.items(), key=lambda pair: (pair[1][0], pair[0]))
    ]
    gpu_types, nodes = preset_cluster(CLUSTER)
    scenario = Scenario(gpu_types=gpu_types, nodes=nodes, profiles=profiles, arrivals=came)
    until_s = max(job.runs[-1].end_s for job in jobs)
    result = simulate(
        scenario,
        Decider(options_of(policy)),
        Conditions(overheads=overheads, round_s=ROUND_S, horizon_s=until_s),
        PausableClock(),
    )
    jct_s = dict(zip((one.spec.name for one in came), result.end_s - result.arrival_s, strict=True))
    ended = {name: float(t) for name, t in jct_s.items() if math.isfinite(t)}
    recorded = {j.name: j.runs[-1].end_s - requests[j.name][0] + origin_s for j in jobs if j.done}
    both = sorted(ended.keys() & recorded.keys())
    batch = [one.spec.workload.global_batch for one in came]
    return DecidedCampaign(
        policy=policy,
        done_recorded=len(recorded),
        done=len(ended),
        jobs=len(both),
        jct_recorded_s=_mean([recorded[name] for name in both]),
        jct_s=_mean([ended[name] for name in both]),
        throughput_recorded=float(mean_by_round(recorded_rates(jobs).held, until_s).mean()),
        throughput=float(mean_by_round(held_steps(result.segments, batch), until_s).mean()),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
