"""Times of reservations on the command line: with and without dates and time zones."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.clusters.reservations import find_time_zone, format_moment, parse_moment

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-12-01 09:00", "2026-12-01T08:00:00+00:00"),
        ("2026-12-01T09:00:00Z", "2026-12-01T09:00:00+00:00"),
        ("2026-12-01 09:00+05:00", "2026-12-01T04:00:00+00:00"),
        ("2026-07-01 09:00", "2026-07-01T07:00:00+00:00"),
        ("17:00", "2026-11-30T16:00:00+00:00"),
        ("12:59", "2026-12-01T11:59:00+00:00"),  # it has passed today in Berlin
        ("2h", "2026-11-30T14:00:00+00:00"),
    ],
)
def test_a_time_is_in_the_zone_unless_it_has_one(text: str, expected: str) -> None:
    moment = parse_moment("--from", text, NOON, BERLIN)
    assert moment.astimezone(UTC).isoformat() == expected


def test_times_are_shown_in_the_zone() -> None:
    moment = Timestamp()
    moment.FromDatetime(NOON)
    assert format_moment(moment, BERLIN) == "2026-11-30 13:00 +0100"
    for text in ("", "tuesday", "25:00", "2026-13-01 09:00", "99999999d"):
        with pytest.raises(InvalidInput):
            parse_moment("--from", text, NOON, BERLIN)
    with pytest.raises(InvalidInput, match="Europe/Berlin"):
        find_time_zone("Europe/Nowhere")
