"""Log records show their facts and ids, no secret, and nothing that could pass for another record."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.base.logs import (
    JSON,
    LOG_FORMATS,
    MAX_LISTED,
    MAX_VALUE_CHARS,
    TEXT,
    RecordFormatter,
    add_ids,
    begin_ids,
    make_handler,
    settings_in_use,
)
from tessera.service.agent import main as agent_main
from tessera.service.cli.servers import serve
from tessera.service.profiling import task as profiletask

TOKEN = "tessera_token_0123456789ab_" + "s" * 43
JSON_WEB_TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"
PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----"
PASSWORD_URL = "postgresql://ada:pa55word@db/tessera"
SECRETS = (TOKEN, JSON_WEB_TOKEN, PRIVATE_KEY, PASSWORD_URL)
SHOWN = ("ssss", "c2lnbmF0dXJl", "MIIEvQ", "pa55word")

HOSTILE = (
    "a\n2026-11-28T10:00:00.000Z ERROR round_refused forged",
    "a\r\x1b[2K\x1b[1Anothing happened",
    "a\u2028b\u202ec\u200bd\x85e\x9bf",
    'a" level=ERROR event="forged',
    "a\\",
    "a level=ERROR",
    "\ud800",
    "",
)

Log = tuple[logging.Logger, io.StringIO]


def make_log(form: str) -> Log:
    log, stream = logging.Logger("test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RecordFormatter(form))
    log.addHandler(handler)
    return log, stream


@pytest.fixture(params=LOG_FORMATS)
def log(request: pytest.FixtureRequest) -> Log:
    return make_log(request.param)


def read_facts(line: str) -> dict[str, str]:
    """Return the facts of a line of text; those in quotes are as in JSON."""
    pairs = re.findall(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)', line)
    return {key: json.loads(value) if value[:1] == '"' else value for key, value in pairs}


@pytest.mark.parametrize("secret", SECRETS)
def test_no_part_of_a_log_record_shows_a_secret(log: Log, secret: str) -> None:
    logger, stream = log
    logger.info("in the text: %s" % secret)  # noqa: UP031 - a message that is formatted early
    logger.info("as an argument: %s", secret)
    logger.info("inside of an argument: %s", {"token": [secret]})
    logger.info("the event", extra={"event": secret})
    logger.info(
        "a fact", extra={"event": "a", "url": secret, "urls": [secret], "by": {"a": secret}}
    )
    logger.info("at the cut", extra={"event": "a", "text": "x" * (MAX_VALUE_CHARS - 30) + secret})
    begin_ids(request_id=secret)
    logger.info("an id", extra={"event": "a"})
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
    assert text.count("***") >= 10


def test_a_line_of_text_has_the_time_the_level_the_event_the_message_and_the_facts() -> None:
    logger, stream = make_log(TEXT)
    logger.warning(
        "%d gangs run",
        3,
        extra={"event": "count", "job": "a b", "gap": 1 / 3, "ready": True, "left": None, "n": []},
    )
    logger.warning("no event")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING count 3 gangs run"
        r' job="a b" gap=0.333333 ready=true left=null n=""',
        first,
    )
    assert second.endswith(" WARNING - no event logger=test")


def test_json_has_the_same_facts_as_text() -> None:
    facts: dict[str, Any] = {
        "job": 'a "b"',
        "nodes": ["n 1", "n2"],
        "jobs": {"b", "a"},
        "gap": 1e-4,
        "late_s": float("inf"),
        "ready": False,
        "file": Path("/tmp/a b"),
        "error": ValueError("a = b"),
    }
    parsed = []
    for form in LOG_FORMATS:
        logger, stream = make_log(form)
        logger.info("a message", extra={"event": "something", **facts})
        (line,) = stream.getvalue().splitlines()
        parsed.append(json.loads(line) if form == JSON else read_facts(line))
    text, whole = parsed
    assert [whole.pop(key) for key in ("level", "event", "message")] == [
        "INFO",
        "something",
        "a message",
    ]
    whole.pop("time")
    assert whole == {
        "job": 'a "b"',
        "nodes": ["n 1", "n2"],
        "jobs": ["a", "b"],
        "gap": 1e-4,
        "late_s": "inf",
        "ready": False,
        "file": "/tmp/a b",
        "error": "a = b",
    }
    assert text == {
        **{key: str(value) for key, value in whole.items()},
        "nodes": "n 1,n2",
        "jobs": "a,b",
        "ready": "false",
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_no_value_can_forge_a_line_a_fact_or_an_escape_sequence(name: str) -> None:
    facts = {"event": "job_seen", "job": name, "jobs": [name, "b"]}
    for form in LOG_FORMATS:
        logger, stream = make_log(form)
        begin_ids(request_id=name)
        try:
            raise ValueError(name)
        except ValueError:
            logger.exception("failed", extra=facts)
        logger.warning(name)
        text = stream.getvalue()
        line, *rest, of_other_library = text.removesuffix("\n").split("\n")
        assert all(row.isprintable() for row in (line, *rest, of_other_library))
        if form == JSON:
            assert not rest
            parsed = json.loads(line)
            assert (parsed["job"], parsed["level"], parsed["event"]) == (name, "ERROR", "job_seen")
            assert name in parsed["traceback"]
        else:
            assert all(row.startswith("  ") for row in rest)  # so none of them is a record
            assert line.split(" ")[1:3] == ["ERROR", "job_seen"]
            assert of_other_library.split(" ")[1:3] == ["WARNING", "-"]
            assert read_facts(line) == {"job": name, "jobs": f"{name},b", "request_id": name}


def test_long_values_and_lists_are_cut() -> None:
    logger, stream = make_log(JSON)
    logger.info("a", extra={"event": "a", "text": "x" * 10**6, "jobs": list(range(10**5))})
    parsed = json.loads(stream.getvalue())
    assert (len(parsed["text"]), parsed["text"][-3:]) == (MAX_VALUE_CHARS, "...")
    assert parsed["jobs"] == [*range(MAX_LISTED), f"and {10**5 - MAX_LISTED} more"]
    logger, stream = make_log(TEXT)
    logger.info("a", extra={"event": "a", "jobs": ["x" * 900] * 50})
    assert len(stream.getvalue()) < MAX_VALUE_CHARS + 100


def test_records_have_the_ids_of_their_task_unless_they_have_facts_of_that_name() -> None:
    logger, stream = make_log(TEXT)
    begin_ids(request_id="r1")
    add_ids(cluster="lab", round=7)
    logger.info("a", extra={"event": "a"})
    logger.info("b", extra={"event": "b", "cluster": "other"})
    begin_ids(request_id="r2")
    logger.info("c", extra={"event": "c"})
    facts = [read_facts(line) for line in stream.getvalue().splitlines()]
    assert facts == [
        {"request_id": "r1", "cluster": "lab", "round": "7"},
        {"request_id": "r1", "cluster": "other", "round": "7"},
        {"request_id": "r2"},
    ]


@pytest.mark.parametrize("form", LOG_FORMATS)
def test_a_process_that_is_started_logs_as_its_parent(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    root = logging.Logger("root", logging.ERROR)
    root.addHandler(make_handler(form))
    monkeypatch.setattr(logging, "root", root)
    assert settings_in_use() == (logging.ERROR, form)


def run_agent(form: str) -> None:
    options = "--server a:1 --cluster - --data-dir / --node a:a100:1 --log-format"
    assert agent_main.main([*options.split(), form]) == agent_main.EXIT_INVALID


@pytest.mark.parametrize("set_up", [lambda form: serve._set_up_logging("INFO", form), run_agent])
@pytest.mark.parametrize("form", LOG_FORMATS)
def test_the_programs_log_in_the_chosen_form(
    set_up: Callable[[str], None], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = chosen_forms(monkeypatch)
    set_up(form)
    assert forms == [form]


def test_profiling_tasks_log_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chosen_forms(monkeypatch)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert profiletask.main() == 0
    assert forms == [TEXT]


def chosen_forms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each way to set up logging adds the forms of its handlers."""
    forms: list[str] = []

    def configure(handlers: list[logging.Handler], **_: Any) -> None:
        for handler in handlers:
            assert isinstance(handler.formatter, RecordFormatter)
            forms.append(handler.formatter.form)

    monkeypatch.setattr(logging, "basicConfig", configure)
    return forms
