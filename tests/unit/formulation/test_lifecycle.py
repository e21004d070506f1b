"""The table of job states and their transitions."""

from __future__ import annotations

import pytest

from tessera.formulation.base.errors import NotAllowed
from tessera.formulation.job.lifecycle import (
    LEAVING,
    TERMINAL,
    JobEvent,
    JobState,
    advance_state,
    is_allowed,
    next_states,
)


def test_every_state_can_be_reached_from_queued() -> None:
    seen, todo = set(), [JobState.QUEUED]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo.extend(next_states()[state])
    assert seen == set(JobState)


def test_every_nonterminal_state_can_be_cancelled_or_is_ending() -> None:
    ending = {JobState.CANCELLING, JobState.FAILING}
    for state in set(JobState) - TERMINAL - ending:
        assert is_allowed(state, JobEvent.CANCEL), state


def test_a_leaving_job_has_left_when_its_agents_report_it_gone() -> None:
    for state in LEAVING:
        assert advance_state(state, JobEvent.GONE) not in LEAVING


def test_an_illegal_transition_is_refused_with_both_state_names() -> None:
    with pytest.raises(NotAllowed, match="succeeded cannot cancel"):
        advance_state(JobState.SUCCEEDED, JobEvent.CANCEL)
