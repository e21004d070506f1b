"""The certificate of a port: it is read again when its files change, and only then."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.service.security.serving import ServingCertificate
from tests.support.certificates import DAY_S, LOG, Site, make_site
from tests.support.hand_clock import HandClock
from tests.support.logged import logged_lines

NOW_S = 1.8e9


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path, NOW_S)


@pytest.fixture
def clock() -> HandClock:
    return HandClock(NOW_S)


@pytest.fixture
def served(site: Site, clock: HandClock) -> ServingCertificate:
    return ServingCertificate(site.files(mutual=True), clock, LOG)


def messages(caplog: pytest.LogCaptureFixture, least: int = logging.WARNING) -> list[str]:
    lines = [
        line
        for line in logged_lines(caplog)
        if logging.getLevelName(line.partition(" ")[0]) >= least
    ]
    caplog.clear()
    return lines


def test_unchanged_files_are_not_read_again(served: ServingCertificate, site: Site) -> None:
    assert served.fetch() is None
    site.renew_server()
    assert served.fetch() is not None
    assert served.fetch() is None


def test_files_that_are_wrong_at_the_start_are_refused(site: Site, clock: HandClock) -> None:
    site.renew_server(now_s=NOW_S - 50 * DAY_S, days=10)
    with pytest.raises(InvalidInput, match="expired at"):
        ServingCertificate(site.files(), clock, LOG)


@pytest.mark.parametrize("name", ["server.pem", "server.key", "ca.pem"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "other"])
def test_each_wrong_state_is_logged_once_and_the_old_certificate_stays(
    served: ServingCertificate,
    site: Site,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    path = site.folder / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other" and name == "server.key":
        path.write_bytes((site.folder / "ca.key").read_bytes())
    else:
        path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2]}.get(damage, b"hello"))
    assert [served.fetch() for _ in range(3)] == [None] * 3
    (error,) = messages(caplog, logging.ERROR)
    assert str(path) in error
    assert "the earlier certificate stays in use" in error
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    path.chmod(0o600)
    assert served.fetch() is not None


def test_a_key_whose_rights_are_corrected_is_taken_up(
    served: ServingCertificate, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.renew_server()
    key = site.folder / "server.key"
    key.chmod(0o644)
    assert served.fetch() is None
    assert "chmod 600" in messages(caplog)[0]
    key.chmod(0o600)
    assert served.fetch() is not None


def test_a_certificate_from_the_future_is_taken_up_once_it_is_valid(
    served: ServingCertificate,
    site: Site,
    clock: HandClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.renew_server(now_s=NOW_S + 400.0)
    for elapsed_s in (0.0, 59.0, 61.0):
        clock.now_s = NOW_S + elapsed_s
        assert served.fetch() is None
    (error,) = messages(caplog)
    assert "which is 100 s from now" in error
    clock.now_s = NOW_S + 130.0
    assert served.fetch() is not None


def test_a_new_certificate_is_logged_with_its_end(
    served: ServingCertificate, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.renew_server(days=30)
    with caplog.at_level(logging.INFO):
        served.fetch()
    (line,) = messages(caplog, logging.INFO)
    assert line.startswith("INFO certificate_replaced ")
    assert line.endswith(' ends="2027-02-14 08:00 UTC"')


def test_the_last_week_is_warned_of_once_a_day(
    served: ServingCertificate, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    for day in (82.9, 83.1, 83.5, 84.0, 84.2, 90.5):
        clock.now_s = NOW_S + day * DAY_S
        served.fetch()
    lines = messages(caplog)
    assert [line.partition(" ")[0] for line in lines] == ["WARNING", "WARNING", "ERROR"]
    left_s = [float(line.partition("left_s=")[2].partition(" ")[0]) for line in lines]
    assert [left // DAY_S for left in left_s] == [6, 5, -1]
