"""Durations as people write them: one syntax for options, files and the standing policy."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.durations import MAX_DURATION_S, parse_duration_s
from tessera.service.settings.sources import load_config
from tessera.solvers.rounds.options import RoundOptions

WRITTEN = [
    ("90s", 90.0),
    ("500ms", 0.5),
    ("5m", 300.0),
    ("1.5h", 5400.0),
    ("2h", 7200.0),
    ("1h30m", 5400.0),
    (" 1h 30m ", 5400.0),
    ("1d12h", 129_600.0),
    ("1m0.5s", 60.5),
]


@pytest.mark.parametrize(("text", "seconds"), WRITTEN)
def test_options_and_the_standing_policy_parse_durations_alike(text: str, seconds: float) -> None:
    assert options.parse_seconds("--min-run", text) == seconds
    policy = f"{{min_run: {text!r}, promoteAfter: {text!r}}}"
    standing = load_config(None, {"TESSERA_POLICY": policy}).round_options()
    assert (standing.min_run_s, standing.promote_after_s) == (seconds, seconds)


def test_a_policy_may_name_durations_in_proto_json_or_as_never() -> None:
    policy = "{min_run: 0, promote_after: never, round: 7200s, reserve_after: 1.5s}"
    options = load_config(None, {"TESSERA_POLICY": policy}).round_options()
    assert options == RoundOptions(
        min_run_s=0.0, promote_after_s=math.inf, round_s=7200.0, reserve_after_s=1.5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("30m1h", "policy.min_run: '30m1h' is not a duration; write e.g. 90s, 5m, 2h, 1h30m or 1d"),
        ("1h1h", "is not a duration"),
        ("soon", "is not a duration"),
        ("-5s", "is not a duration"),
        ("600", "policy.min_run: 600 has no unit; write e.g. 600s, 600m, 600h or 600d"),
        ("1.50", "1.50 has no unit; write e.g. 1.50s"),
        ("010", "010 has no unit"),
        ("22:30", "'22:30' is not a duration"),
        ("9" * 200 + "s", "is not a duration"),
        ("9999999d", "must lie in 0 to"),
        ("true", "min_run"),
        ("[1h]", "min_run"),
    ],
)
def test_an_invalid_duration_is_refused_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_POLICY": f"min_run: {text}"})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@given(
    st.integers(0, 999),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.integers(0, 999),
)
def test_units_add_up(days: int, hours: int, minutes: int, seconds: int, millis: int) -> None:
    text = f"{days}d{hours}h{minutes}m{seconds}s{millis}ms"
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds + millis / 1000
    assert parse_duration_s("x", text) == pytest.approx(total)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert 0 <= parse_duration_s("x", text) <= MAX_DURATION_S
