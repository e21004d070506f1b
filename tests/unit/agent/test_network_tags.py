"""DSCP tags of jobs: who shares one, who gets a spare one, and the priorities of a fabric."""

from __future__ import annotations

import pytest

from tessera.formulation.answer.network.tags import CONTROL_TAG, FabricCapabilities, assign_tags
from tessera.formulation.base.errors import InvalidInput


def jobs_at_level(count: int, level: int = 0) -> dict[str, int]:
    return {f"j{number:03d}": level for number in range(count)}


def test_a_tag_just_released_is_the_last_to_be_reused() -> None:
    before = assign_tags({"a": 0, "b": 0}, 1)
    after = assign_tags({"b": 0, "c": 0}, 1, before.tags)
    assert after.tags["c"] not in before.tags.values()


def test_jobs_of_the_lowest_level_share_tags_if_tags_run_out_with_a_remark() -> None:
    free = len(FabricCapabilities().free_tags)
    jobs = jobs_at_level(100) | {f"u{n}": 1 for n in range(8)}
    assignment = assign_tags(jobs, 2)
    urgent = [assignment.tags[f"u{n}"] for n in range(8)]
    assert len(set(urgent)) == 8
    assert not set(urgent) & {assignment.tags[job] for job in jobs_at_level(100)}
    assert len(set(assignment.tags.values())) == free - 8  # all but the spare tags
    assert all(assignment.priorities[assignment.tags[job]] == jobs[job] for job in jobs)
    assert any("share DSCP tag" in remark for remark in assignment.remarks)


def test_an_urgent_new_job_gets_a_spare_tag_of_its_own() -> None:
    before = assign_tags(jobs_at_level(100), 2)
    after = assign_tags(jobs_at_level(100) | {"new": 1}, 2, before.tags)
    assert list(after.tags.values()).count(after.tags["new"]) == 1
    assert all(after.tags[job] == tag for job, tag in before.tags.items())


def test_a_job_raised_by_another_job_on_its_tag_is_named() -> None:
    assignment = assign_tags({"a": 0, "b": 2}, 3, {"a": 5, "b": 5})
    assert assignment.priorities[5] == 2
    assert assignment.remarks == (
        "jobs a, b share DSCP tag 5 at level 2, which raises the level of a",
    )


def test_a_running_job_keeps_a_reserved_tag_with_a_remark() -> None:
    assignment = assign_tags({"a": 0}, 1, {"a": 46})
    assert assignment.tags == {"a": 46}
    assert "reserved for expedited forwarding" in assignment.remarks[0]


def test_fewer_levels_than_priorities_reserve_the_highest_for_control_messages() -> None:
    assignment = assign_tags({"a": 1, "b": 0}, 2, fabric=FabricCapabilities(priorities=(1, 3, 6)))
    assert assignment.priorities == {
        assignment.tags["a"]: 3,
        assignment.tags["b"]: 1,
        CONTROL_TAG: 6,
    }


@pytest.mark.parametrize(
    ("jobs", "levels", "before", "text"),
    [
        ({"a": 0}, 0, {}, "must be 1 to 8"),
        ({"a": 0}, 9, {}, "must be 1 to 8"),
        ({"a": 3}, 3, {}, "must be 0 to 2, not 3"),
        ({"a": 0}, 1, {"a": 64}, "0 to 63, not 64"),
    ],
)
def test_levels_and_tags_out_of_range_are_refused(
    jobs: dict[str, int], levels: int, before: dict[str, int], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        assign_tags(jobs, levels, before)


def test_a_fabric_without_tags_or_with_equal_priorities_is_refused() -> None:
    nothing_free = FabricCapabilities(reserved=dict.fromkeys(range(64), "all"))
    with pytest.raises(InvalidInput, match="reserve fewer"):
        assign_tags({"a": 0}, 1, fabric=nothing_free)
    with pytest.raises(InvalidInput, match="different numbers"):
        FabricCapabilities(priorities=(1, 1))
