"""Resource names are parsed strictly and say what form they should have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulation.errors import InvalidInput
from service.rpc import names

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", fullmatch=True)


@given(ids, ids, st.integers(0, 10**18 - 1))
def test_a_formatted_name_parses_back(cluster: str, other: str, number: int) -> None:
    assert names.parse_cluster("name", names.cluster_name(cluster)) == cluster
    assert names.parse_node("name", names.node_name(cluster, other)) == (cluster, other)
    assert names.parse_job("name", names.job_name(cluster, other)) == (cluster, other)
    assert names.parse_round("name", names.round_name(cluster, number)) == (cluster, number)


@given(st.text(max_size=60).map("clusters/c/jobs/{}".format) | st.text(max_size=60))
def test_any_text_is_a_name_or_is_refused(text: str) -> None:
    try:
        cluster, job = names.parse_job("job.name", text)
    except InvalidInput:
        return
    assert names.job_name(cluster, job) == text


@pytest.mark.parametrize(
    "name",
    ["", "c", "clusters/", "clusters/c/", "clusters//jobs/j", "clusters/c/jobs/..", "clusters/c/jobs/-x",
     "clusters/c/nodes/n", "/clusters/c/jobs/j", "clusters/c/jobs/j\n", "clusters/c/jobs/" + "x" * 101],
)  # fmt: skip
def test_a_malformed_job_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        names.parse_job("name", name)


@pytest.mark.parametrize("number", ["01", "-1", "x", "1" * 19])
def test_a_round_is_named_by_a_plain_number(number: str) -> None:
    with pytest.raises(InvalidInput):
        names.parse_round("name", f"clusters/c/rounds/{number}")
