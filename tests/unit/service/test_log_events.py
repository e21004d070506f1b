"""Every log call names its event and its facts, and ``docs/events.md`` lists exactly these events."""

from __future__ import annotations

import ast
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("formulation", "solvers", "modelling", "estimator", "db", "service", "simulator")
LEVELS = {name: name.upper() for name in ("debug", "info", "warning", "error")}
LEVELS |= {"exception": "ERROR", "log": ""}
TOKEN = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LOGGER = re.compile(r"(self\.)?_?log(ger)?", re.IGNORECASE)
RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime", "time", "level", "traceback"}
ROW = re.compile(r"\n\| ((?:`[a-z0-9_]+`(?:, )?)+) \| ([A-Z, ]+) \| [^|]+ \|")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a module's tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def log_calls(nodes: list[ast.AST]) -> Iterator[tuple[ast.Call, set[str]]]:
    """Yield the log calls of a module, each with the levels that it may have."""
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=logger, attr=attr)) if attr in LEVELS:
                if not LOGGER.fullmatch(ast.unparse(logger)):
                    continue
                if LEVELS[attr]:
                    yield node, {LEVELS[attr]}
                    continue
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                yield node, set(re.findall(r"logging\.([A-Z]+)", ast.unparse(around[-1])))


def calls_of(*rooms: str) -> list[tuple[str, ast.Call, set[str]]]:
    return [
        (f"{path.relative_to(ROOT)}:{call.lineno}", call, levels)
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        if "log" in path.read_text(encoding="utf-8")
        for call, levels in log_calls(nodes_of(path))
    ]


def facts_of(call: ast.Call) -> dict[str, ast.expr]:
    (extra,) = [keyword.value for keyword in call.keywords if keyword.arg == "extra"]
    assert isinstance(extra, ast.Dict), "write the facts as a dict in the call"
    pairs = zip(extra.keys, extra.values, strict=True)
    return {str(ast.literal_eval(key)): value for key, value in pairs if key is not None}


@cache
def events_of_tasks() -> set[str]:
    """Return the events with which tasks are created that log for themselves."""
    return {
        str(ast.literal_eval(keyword.value))
        for path in (ROOT / "service").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "event" and isinstance(keyword.value, ast.Constant)
    }


def fault_of(call: ast.Call) -> str:
    """Return what is wrong with a log call, or ""."""
    message = call.args[-1]
    texts = [str(n.value) for n in ast.walk(message) if isinstance(n, ast.Constant)]
    is_plain = isinstance(message, ast.Constant | ast.IfExp | ast.Attribute)
    if not is_plain or any("%" in text for text in texts):
        return "the message must be a text; pass what varies as facts"
    if len(call.args) != 1 + (LEVELS[call.func.attr] == ""):  # type: ignore[attr-defined]
        return "pass what varies as facts, not as arguments"
    if not any(keyword.arg == "extra" for keyword in call.keywords):
        return "pass extra with the event and the facts"
    facts = facts_of(call)
    event = facts.get("event")
    if not isinstance(event, ast.Attribute) and not (
        isinstance(event, ast.Constant) and TOKEN.fullmatch(str(event.value))
    ):
        return "name an event in snake case"
    if wrong := [key for key in facts if key in RESERVED or not TOKEN.fullmatch(key)]:
        return f"no fact may be called {', '.join(wrong)}"
    return ""


def test_every_log_call_has_a_plain_message_and_names_its_event_and_facts() -> None:
    calls = calls_of(*PRODUCT, "benchmarks")
    assert len(calls) > 100
    assert [f"{place}: {fault}" for place, call, _ in calls if (fault := fault_of(call))] == []


@pytest.mark.parametrize(
    "text",
    [
        'log.info("a %s", b, extra={"event": "a"})',
        'log.info("a", b, extra={"event": "a"})',
        'log.info(f"a {b}", extra={"event": "a"})',
        'log.info("a")',
        'log.info("a", extra={"job": b})',
        'self._log.warning("a", extra={"event": "answer-dropped"})',
        'log.info("a", extra={"event": "a", "message": b})',
    ],
)
def test_a_call_that_hides_its_facts_is_found(text: str) -> None:
    ((call, _),) = log_calls(list(ast.walk(ast.parse(text))))
    assert fault_of(call)


def test_the_documented_events_are_those_of_the_code_with_their_levels() -> None:
    levels: defaultdict[str, set[str]] = defaultdict(set)
    for _, call, some in calls_of(*PRODUCT):
        event = facts_of(call)["event"]
        of_call = {event.value} if isinstance(event, ast.Constant) else events_of_tasks()
        for name in of_call:
            levels[str(name)] |= some
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert len(rows) == page.count("\n| `")
    pairs = [
        (name.strip("`"), set(text.split(", ")))
        for names, text in rows
        for name in names.split(", ")
    ]
    documented = dict(pairs)
    assert len(pairs) == len(documented), "list each event once"
    assert documented == dict(levels)
