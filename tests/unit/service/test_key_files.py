"""Files of keys and certificates: problems that say what to do, and files that change while serving."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.security.authority import create_authority
from tessera.service.server.security.key_files import (
    parse_certificates,
    parse_key,
    read_authority,
    read_file,
    require_authorities,
    require_current,
    write_private,
    write_public,
)
from tessera.service.server.security.serving import ServingCertificate
from tests.support.certificates import DAY_S, LOG, Site, make_site, read_pair
from tests.support.hand_clock import HandClock
from tests.support.logged import logged_lines

NOW_S = 1.8e9


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path, NOW_S)


def problem_of(path: Path, read: Callable[[Path], object]) -> str:
    """Return the problem, which is one line that begins with the path."""
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return caught.value.problem


def read_certificates(path: Path) -> object:
    return parse_certificates(path, read_file(path))


def read_key(path: Path) -> object:
    return parse_key(path, read_file(path, private=True))


def test_a_missing_empty_or_foreign_file_is_named(site: Site) -> None:
    path = site.folder / "x"
    assert "does not exist" in problem_of(path, read_file)
    path.write_text("\n", encoding="utf-8")
    assert "is empty" in problem_of(path, read_file)
    path.write_text("hello", encoding="utf-8")
    path.chmod(0o600)
    assert "must be PEM" in problem_of(path, read_certificates)
    assert "must be PEM" in problem_of(path, read_key)
    assert "Is a directory" in problem_of(site.folder, read_file)
    pipe = site.folder / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in problem_of(pipe, read_file)


def test_a_key_and_a_certificate_in_each_other_s_place_are_recognised(site: Site) -> None:
    site.folder.joinpath("server.pem").chmod(0o600)
    assert "holds a private key, where" in problem_of(site.folder / "server.key", read_certificates)
    assert "holds a certificate, where" in problem_of(site.folder / "server.pem", read_key)


def test_a_key_that_others_can_read_or_change_is_refused(site: Site) -> None:
    path = site.folder / "server.key"
    for mode in (0o604, 0o620, 0o602, 0o644, 0o666):
        path.chmod(mode)
        assert f"run chmod 600 {path}" in problem_of(path, read_key)
    for mode in (0o400, 0o600, 0o640, 0o440):
        path.chmod(mode)
        pair = read_pair(site.folder / "server.pem", path)
        assert pair.key.public_key() == pair.certificate.public_key()


def test_a_key_of_another_certificate_is_refused(site: Site) -> None:
    path = site.folder / "ca.key"
    problem = problem_of(path, lambda p: read_pair(site.folder / "server.pem", p))
    assert "does not belong to the certificate in" in problem


def test_half_a_certificate_is_recognised_even_after_a_whole_one(site: Site) -> None:
    path = site.folder / "ca.pem"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:200])
    assert "ends in the middle of a certificate" in problem_of(path, read_certificates)
    path.write_bytes(whole.replace(b"M", b"N", 3))
    assert "cannot be read" in problem_of(path, read_certificates)


def test_a_certificate_out_of_its_time_is_refused_with_the_difference(site: Site) -> None:
    path = site.folder / "server.pem"
    certificate = parse_certificates(path, read_file(path))[0]
    require_current(certificate, path, NOW_S)
    late = problem_of(path, lambda p: require_current(certificate, p, NOW_S + 90 * DAY_S))
    assert late == "expired at 2027-04-15 08:00 UTC; replace it with a new certificate"
    early = problem_of(path, lambda p: require_current(certificate, p, NOW_S - 3900.0))
    assert "which is 60 min from now" in early
    assert "clocks may disagree" in early


def test_only_certificates_of_authorities_are_trusted_also_next_to_an_expired_one(
    site: Site,
) -> None:
    path = site.folder / "server.pem"
    server = parse_certificates(path, read_file(path))
    problem = problem_of(path, lambda p: require_authorities(server, p, NOW_S))
    assert "not an authority's" in problem
    path, old = site.folder / "ca.pem", create_authority(NOW_S - 3651 * DAY_S)
    both = [old.certificate, site.authority.certificate]
    require_authorities(both, path, NOW_S)
    assert "expired" in problem_of(path, lambda p: require_authorities(both[:1], p, NOW_S))


def test_an_authority_is_the_first_of_the_authorities(site: Site) -> None:
    path = site.folder / "ca.pem"
    both = path.read_bytes() + create_authority(NOW_S).certificate_pem()
    write_public(path, both)
    authority, content = read_authority(path, site.folder / "ca.key", NOW_S)
    assert authority.certificate == site.authority.certificate
    assert content == both


def test_half_of_a_rotation_leaves_the_authority_whose_key_is_there(site: Site) -> None:
    path, old = site.folder / "ca.pem", site.authority
    new = create_authority(NOW_S)
    write_public(path, new.certificate_pem() + old.certificate_pem())
    authority, _ = read_authority(path, site.folder / "ca.key", NOW_S)
    assert authority.certificate == old.certificate
    write_private(site.folder / "ca.key", new.key_pem())
    authority, _ = read_authority(path, site.folder / "ca.key", NOW_S)
    assert authority.certificate == new.certificate


def test_private_files_are_for_their_owner_alone_and_directories_stay_as_they_are(
    tmp_path: Path,
) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    open_folder.chmod(0o755)
    path = open_folder / "a" / "b" / "key"
    write_private(path, b"one")
    write_private(path, b"two")
    modes = [p.stat().st_mode & 0o777 for p in (path, path.parent, path.parents[1], open_folder)]
    assert modes == [0o600, 0o700, 0o700, 0o755]
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["key"]
    assert "cannot be written" in problem_of(path / "x", lambda p: write_private(p, b""))


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


def test_files_that_are_wrong_at_the_start_are_refused(site: Site, clock: HandClock) -> None:
    site.renew_server(now_s=NOW_S - 50 * DAY_S, days=10)
    with pytest.raises(InvalidInput, match="expired at"):
        ServingCertificate(site.files(), clock, LOG)


@pytest.mark.parametrize("name", ["server.pem", "server.key", "ca.pem"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "other"])
def test_each_wrong_state_is_logged_once_and_the_old_certificate_stays(
    served: ServingCertificate, site: Site, caplog: pytest.LogCaptureFixture, name: str, damage: str
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
    served: ServingCertificate, site: Site, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    site.renew_server(now_s=NOW_S + 400.0)
    for elapsed_s in (0.0, 59.0, 61.0):
        clock.now_s = NOW_S + elapsed_s
        assert served.fetch() is None
    (error,) = messages(caplog)
    assert "which is 100 s from now" in error
    clock.now_s = NOW_S + 130.0
    assert served.fetch() is not None


def test_a_new_certificate_is_read_once_and_logged_with_its_end(
    served: ServingCertificate, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.renew_server(days=30)
    with caplog.at_level(logging.INFO):
        served.fetch()
    (line,) = messages(caplog, logging.INFO)
    assert line.startswith("INFO certificate_replaced ")
    assert line.endswith(' ends="2027-02-14 08:00 UTC"')
    assert served.fetch() is None


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
