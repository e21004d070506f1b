"""Rounds whose plans can all be listed: Tessera reaches the best plan, so no policy can beat it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.papers.bench_motivation import (
    NORMALISED_POLICY,
    POLICIES,
    RAW_POLICY,
    ROUNDING,
)
from tessera.benchmarks.papers.opening_cases import (
    OpeningCase,
    OpeningJob,
    OpeningScene,
    decide_openings,
)
from tessera.formulation.values import Workload
from tests.support.laws import examples
from tests.support.worlds import a_profile

COUNTS = (1, 2, 4)
RATES = st.floats(min_value=1.0, max_value=100.0)


@st.composite
def scenes(draw: st.DrawFn) -> OpeningScene:
    """Draw up to four jobs with any rates, some without some Cells, on one node each of one or two types."""
    kinds = draw(st.sampled_from([("a100",), ("a100", "v100")]))
    jobs, records = [], []
    for i in range(draw(st.integers(1, 4))):
        work = Workload(model=f"m{i}", params="1B", global_batch=64)
        requested_gpus = draw(st.sampled_from(COUNTS))
        kind = draw(st.sampled_from(kinds))
        jobs.append(OpeningJob(workload=work, gpus=requested_gpus, gpu_type=kind))
        for on in kinds:
            for gpus in COUNTS:
                if (on, gpus) == (kind, requested_gpus) or draw(st.booleans()):
                    rate = draw(RATES)
                    records.append(a_profile(gpus, 64 / rate, gpu_type=on, workload=work))
    opening = OpeningCase(
        name="drawn", nodes=tuple((k, 4) for k in kinds), jobs=tuple(jobs), plans=()
    )
    return OpeningScene.of(opening, records)


@examples(25)
@given(scenes())
def test_tessera_reaches_the_best_total_of_all_plans(scene: OpeningScene) -> None:
    raw = decide_openings(scene, RAW_POLICY, "estimates", None, 0)
    normalised = decide_openings(scene, NORMALISED_POLICY, "estimates", None, 0)
    assert scene.total(raw) >= max(map(scene.total, scene.plans())) * (1 - ROUNDING)
    assert scene.normalised(normalised) >= max(map(scene.normalised, scene.plans())) * (
        1 - ROUNDING
    )


@examples(8)
@given(scenes())
def test_every_policy_starts_one_of_the_enumerated_plans(scene: OpeningScene) -> None:
    plans = set(scene.plans())
    for policy in POLICIES:
        assert decide_openings(scene, policy, "estimates", None, 0) in plans
