"""DSCP tags of jobs: their assignment, their priorities and the environment that sets them."""

from __future__ import annotations

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.tags import (
    CONTROL_TAG,
    RESERVED_TAGS,
    FabricCapabilities,
    TagSettings,
    assign_tags,
)
from tessera.service.agent.network.launch import (
    LaunchSettings,
    find_overridden_marks,
    marking_environment,
    traffic_class,
)


def jobs_at_level(count: int, level: int = 0) -> dict[str, int]:
    return {f"j{number:03d}": level for number in range(count)}


def test_jobs_get_distinct_unreserved_tags_and_priorities_by_level() -> None:
    assignment = assign_tags({"a": 2, "b": 0, "c": 1}, 3)
    assert len(set(assignment.tags.values())) == 3
    assert not set(assignment.tags.values()) & {*RESERVED_TAGS, CONTROL_TAG}
    assert {job: assignment.priorities[tag] for job, tag in assignment.tags.items()} == {
        "a": 2,
        "b": 0,
        "c": 1,
    }
    assert assignment.priorities[CONTROL_TAG] == 7
    assert assignment.remarks == ()


def test_new_levels_change_the_map_but_no_tag() -> None:
    before = assign_tags({"a": 1, "b": 0}, 2)
    after = assign_tags({"a": 0, "b": 1}, 2, before.tags)
    assert after.tags == before.tags
    assert after.priorities[after.tags["a"]] == 0
    assert after.priorities[after.tags["b"]] == 1


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


@pytest.mark.parametrize("levels", [0, 9, -1])
def test_a_number_of_levels_that_the_fabric_lacks_is_refused(levels: int) -> None:
    with pytest.raises(InvalidInput, match="must be 1 to 8"):
        assign_tags({"a": 0}, levels)


def test_levels_and_tags_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be 0 to 2, not 3"):
        assign_tags({"a": 3}, 3)
    with pytest.raises(InvalidInput, match="0 to 63, not 64"):
        assign_tags({"a": 0}, 1, {"a": 64})
    with pytest.raises(InvalidInput, match="reserve fewer"):
        assign_tags(
            {"a": 0}, 1, fabric=FabricCapabilities(reserved=dict.fromkeys(range(64), "all"))
        )
    with pytest.raises(InvalidInput, match="different numbers"):
        FabricCapabilities(priorities=(1, 1))


def test_the_environment_marks_a_job_and_its_control_messages_with_their_tags() -> None:
    settings = TagSettings(tags={"a": 26}, priorities={26: 3, CONTROL_TAG: 7})
    assert marking_environment("a", settings) == {
        "NCCL_IB_TC": "106",  # the value that NVIDIA's guides give for DSCP 26
        "NCCL_IB_SL": "3",
        "NCCL_IB_FIFO_TC": str(CONTROL_TAG * 4 + 2),
    }


def test_a_job_without_a_tag_has_no_environment() -> None:
    assert marking_environment("b", TagSettings(tags={"a": 1}, priorities={1: 0})) == {}


def test_other_libraries_get_variables_on_request_and_hccl_without_ecn_bits() -> None:
    settings = TagSettings(tags={"a": 10}, priorities={10: 2})
    environment = marking_environment(
        "a", settings, LaunchSettings(queue_pairs=4, ucx=True, hccl=True)
    )
    assert environment["NCCL_IB_QPS_PER_CONNECTION"] == "4"
    assert environment["UCX_IB_TRAFFIC_CLASS"] == environment["NCCL_IB_TC"] == "42"
    assert environment["HCCL_RDMA_TC"] == "40"
    assert environment["UCX_IB_SL"] == environment["HCCL_RDMA_SL"] == "2"


def test_impossible_launch_options_are_refused() -> None:
    with pytest.raises(InvalidInput, match="ecn"):
        LaunchSettings(ecn=4)
    with pytest.raises(InvalidInput, match="queue_pairs"):
        LaunchSettings(queue_pairs=129)
    with pytest.raises(InvalidInput, match="0 to 63"):
        traffic_class(64, 0)


def test_a_forced_traffic_class_is_reported_unless_it_matches_the_job() -> None:
    settings = TagSettings(tags={"a": 26}, priorities={26: 3})
    assert find_overridden_marks("a", settings, {"mlx5_0": 106}) == ()
    (finding,) = find_overridden_marks("a", settings, {"mlx5_0": 236})
    assert "mlx5_0 forces traffic class 236" in finding
    assert find_overridden_marks("b", settings, {"mlx5_0": 236}) == ()
