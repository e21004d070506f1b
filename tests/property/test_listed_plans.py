"""Rounds whose plans can all be listed: Tessera reaches the best plan, so no policy can beat it."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.values import Workload
from tests.support.laws import examples
from tests.support.oracles.listed_plans import NODE_GPUS, ListedRound, WaitingJob
from tests.support.worlds import a_profile

RAW_POLICY: Final = "ilp:throughput@raw_throughput=true@promise_starts=false@gap=1e-9"
NORMALISED_POLICY: Final = "ilp:throughput@promise_starts=false@gap=1e-9"
POLICIES: Final = (
    "fcfs",
    "gavel",
    "sia",
    "arena",
    RAW_POLICY,
    NORMALISED_POLICY,
    "ilp:jct@gap=1e-9",
)
CLUSTERS: Final = (("a100",), ("a100", "a100"), ("a100", "v100"))
"""The GPU types of the nodes, which have four GPUs each."""
COUNTS: Final = (1, 2, 4, 8)
RATES: Final = st.floats(min_value=1.0, max_value=100.0)
ROUNDING: Final = 1e-6


@st.composite
def listed_rounds(draw: st.DrawFn) -> ListedRound:
    """Draw up to four jobs with any rates, some without some Cells, on one or two nodes."""
    nodes = draw(st.sampled_from(CLUSTERS))
    jobs, records = [], []
    for i in range(draw(st.integers(1, 4))):
        workload = Workload(model=f"m{i}", params="1B", global_batch=64)
        cells = [
            (kind, gpus)
            for kind in dict.fromkeys(nodes)
            for gpus in COUNTS
            if gpus <= NODE_GPUS * nodes.count(kind)
        ]
        requested = draw(st.sampled_from(cells))
        jobs.append(WaitingJob(workload=workload, gpu_type=requested[0], gpus=requested[1]))
        for kind, gpus in cells:
            if (kind, gpus) == requested or draw(st.booleans()):
                seconds = workload.global_batch / draw(RATES)
                records.append(a_profile(gpus, seconds, gpu_type=kind, workload=workload))
    return ListedRound.of(nodes, jobs, records)


@examples(25)
@given(listed_rounds())
def test_tessera_reaches_the_best_total_of_all_plans(listed: ListedRound) -> None:
    plans = list(listed.plans())
    raw, normalised = (listed.decided_by(policy) for policy in (RAW_POLICY, NORMALISED_POLICY))
    assert listed.total(raw) >= max(map(listed.total, plans)) * (1 - ROUNDING)
    assert listed.normalised(normalised) >= max(map(listed.normalised, plans)) * (1 - ROUNDING)


@examples(8)
@given(listed_rounds())
def test_every_policy_starts_one_of_the_listed_plans(listed: ListedRound) -> None:
    plans = set(listed.plans())
    for policy in POLICIES:
        assert listed.decided_by(policy) in plans
