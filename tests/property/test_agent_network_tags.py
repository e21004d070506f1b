from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.network.tags import CONTROL_TAG, RESERVED_TAGS, assign_tags

LEVELS = 4
JOBS = st.dictionaries(
    st.integers(0, 90).map(lambda n: f"j{n}"), st.integers(0, LEVELS - 1), max_size=80
)


@given(st.lists(JOBS, min_size=1, max_size=4))
def test_tags_stay_through_any_history_and_no_job_is_served_below_its_level(
    history: list[dict[str, int]],
) -> None:
    tags: dict[str, int] = {}
    for jobs in history:
        assignment = assign_tags(jobs, LEVELS, tags)
        assert assignment.tags.keys() == jobs.keys()
        assert all(assignment.tags[job] == tag for job, tag in tags.items() if job in jobs)
        assert not set(assignment.tags.values()) & {*RESERVED_TAGS, CONTROL_TAG}
        for job, tag in assignment.tags.items():
            assert assignment.priorities[tag] >= jobs[job]
            alone = list(assignment.tags.values()).count(tag) == 1
            assert not alone or assignment.priorities[tag] == jobs[job]
        assert set(assignment.priorities) == {*assignment.tags.values(), CONTROL_TAG}
        tags = dict(assignment.tags)


@given(JOBS)
def test_assigning_the_same_jobs_again_changes_nothing(jobs: dict[str, int]) -> None:
    once = assign_tags(jobs, LEVELS)
    assert assign_tags(jobs, LEVELS, once.tags) == once
