"""Page tokens: each continues only the list for which it was issued."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.errors import InvalidInput
from tessera.service.rpc.paging import PageRequest, page_of
from tessera.v1 import jobs_pb2 as pb


def page(request: pb.ListJobsRequest, *, counts: bool = False) -> PageRequest:
    return page_of(request, request.page_size, request.page_token, most=1000, counts=counts)


@given(st.text(min_size=1, max_size=100))
def test_a_token_decodes_to_its_cursor(cursor: str) -> None:
    first = page(pb.ListJobsRequest(parent="clusters/c"))
    token = first.token(cursor)
    assert page(pb.ListJobsRequest(parent="clusters/c", page_size=7, page_token=token)).cursor == (
        cursor
    )


def test_a_token_of_another_filter_or_parent_is_refused() -> None:
    token = page(pb.ListJobsRequest(parent="clusters/c")).token("x")
    for other in (
        pb.ListJobsRequest(parent="clusters/d", page_token=token),
        pb.ListJobsRequest(parent="clusters/c", page_token=token, states=[pb.QUEUED]),
    ):
        with pytest.raises(InvalidInput, match="page_token"):
            page(other)


@given(st.text(min_size=1, max_size=50))
def test_any_other_text_is_not_a_token(text: str) -> None:
    with pytest.raises(InvalidInput, match="page_token"):
        page(pb.ListJobsRequest(parent="clusters/c", page_token=text))


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 10_000, '{"a":' * 500, "[1e999, NaN]"])
def test_a_token_with_a_broken_content_is_refused(content: str) -> None:
    forged = base64.urlsafe_b64encode(content.encode()).decode()
    with pytest.raises(InvalidInput, match="page_token"):
        page(pb.ListJobsRequest(page_token=forged))


@pytest.mark.parametrize("cursor", ["x", "-1", "1" * 19, "٣"])
def test_a_counting_cursor_must_be_a_number(cursor: str) -> None:
    binding = page(pb.ListJobsRequest()).binding
    forged = base64.urlsafe_b64encode(json.dumps([cursor, binding]).encode()).decode()
    with pytest.raises(InvalidInput, match="page_token"):
        page(pb.ListJobsRequest(page_token=forged), counts=True)


@pytest.mark.parametrize(
    ("requested", "given_size"), [(0, 100), (7, 7), (1000, 1000), (5000, 1000)]
)
def test_a_page_size_is_capped(requested: int, given_size: int) -> None:
    assert page(pb.ListJobsRequest(page_size=requested)).size == given_size


def test_a_negative_page_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="page_size"):
        page(pb.ListJobsRequest(page_size=-1))


def test_the_last_page_has_no_token() -> None:
    assert page(pb.ListJobsRequest()).token("") == page(pb.ListJobsRequest()).token(0) == ""
