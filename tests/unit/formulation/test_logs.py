"""Log messages show no secret, wherever in the message it is."""

from __future__ import annotations

import io
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tessera.formulation.logs import DiscreetFormatter
from tessera.service import profiletask
from tessera.service.agent import main as agent_main
from tessera.service.cli import serve

TOKEN = "tessera_token_0123456789ab_" + "s" * 43
JSON_WEB_TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"
PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----"
PASSWORD_URL = "postgresql://ada:pa55word@db/tessera"
SECRETS = (TOKEN, JSON_WEB_TOKEN, PRIVATE_KEY, PASSWORD_URL)
SHOWN = ("ssss", "c2lnbmF0dXJl", "MIIEvQ", "pa55word")


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    log, stream = logging.Logger("test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(DiscreetFormatter())
    log.addHandler(handler)
    yield log, stream
    handler.close()


@pytest.mark.parametrize("secret", SECRETS)
def test_no_part_of_a_log_message_shows_a_secret(
    log: tuple[logging.Logger, io.StringIO], secret: str
) -> None:
    logger, stream = log
    logger.info("in the text: %s" % secret)  # noqa: UP031 - a message that is formatted early
    logger.info("as an argument: %s", secret)
    logger.info("inside of an argument: %s", {"token": [secret]})
    logger.info("the action", extra={"action": secret})
    try:
        try:
            raise ValueError(f"a cause with {secret}")
        except ValueError as error:
            raise RuntimeError(secret) from error
    except RuntimeError:
        logger.exception("failed with a traceback")
    text = stream.getvalue()
    assert not any(part in text for part in SHOWN)
    assert "Traceback" in text
    assert "a cause with" in text
    assert text.count("***") >= 6


def test_a_message_without_secrets_is_shown_unchanged(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, stream = log
    logger.warning("%d gangs run", 3, extra={"action": "count"})
    logger.warning("no action")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" WARNING count: 3 gangs run")
    assert second.endswith(" WARNING -: no action")


@pytest.mark.parametrize(
    "set_up", [lambda: serve._set_up_logging("INFO"), lambda: agent_main._set_up_logging("INFO")]
)
def test_the_programs_log_without_secrets(
    set_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **kw: handlers.extend(kw["handlers"]))
    set_up()
    assert [type(handler.formatter) for handler in handlers] == [DiscreetFormatter]


def test_profiling_tasks_log_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **kw: handlers.extend(kw["handlers"]))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert profiletask.main() == 0
    assert [type(handler.formatter) for handler in handlers] == [DiscreetFormatter]
