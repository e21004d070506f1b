"""The form of log records: a line of text or a JSON object, with all facts and without secrets."""

from __future__ import annotations

import json
import logging
import math
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from tessera.formulation.base.secrets import hide_secrets

TEXT, JSON = "text", "json"
LOG_FORMATS: Final = (TEXT, JSON)

MAX_VALUE_CHARS: Final = 1000
MAX_LISTED: Final = 50
"""Largest size of a value and of a list in a record. What is longer is cut."""

NO_EVENT: Final = "-"
"""The event of records of other libraries."""

_IDS: Final = ContextVar[dict[str, Any] | None]("_IDS", default=None)

_NOT_FACTS: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "event"})
_PLAIN_VALUE: Final = re.compile(r'[^\s"=\\]+')


def begin_ids(**ids: Any) -> None:
    """Give all records of this task, and of the work that it begins, these ids as facts."""
    _IDS.set(ids)


def add_ids(**ids: Any) -> None:
    """Add ids to those of the task that waits for this work, if it has any."""
    if (known := _IDS.get()) is not None:
        known.update(ids)


def current_ids() -> dict[str, Any]:
    """Return the ids that records have now."""
    return dict(_IDS.get() or {})


class RecordFormatter(logging.Formatter):
    """A formatter that shows the facts of a record, and hides secrets wherever they are.

    Facts are what a call passes as ``extra``, and the ids of the task. ``form`` is one of
    ``LOG_FORMATS``. No value can end a line, begin another one, or send codes to a terminal.
    """

    def __init__(self, form: str = TEXT) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return the record in the chosen form."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname,
            "event": _clean(getattr(record, "event", NO_EVENT)),
            "message": hide_secrets(record.getMessage()),
        }
        facts = {key: _clean(value) for key, value in _find_facts(record).items()}
        traceback = hide_secrets(self._traceback(record))
        if self.form == JSON:
            ending = {"traceback": traceback} if traceback else {}
            return json.dumps({**head, **facts, **ending}, allow_nan=False)
        line = " ".join(map(_visible, (str(text) for text in head.values())))
        line += "".join(f" {key}={_logfmt(value)}" for key, value in facts.items())
        # Lines of a traceback are indented, so that none of them looks like a record.
        rows = traceback.split("\n") if traceback else []
        return line + "".join(f"\n  {_visible(row)}" for row in rows)

    def _traceback(self, record: logging.LogRecord) -> str:
        error = record.exc_info
        parts = [self.formatException(error) if error else "", record.stack_info or ""]
        return "\n".join(filter(None, parts))


def make_handler(form: str = TEXT) -> logging.Handler:
    """Return a handler that writes records to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(RecordFormatter(form))
    return handler


def settings_in_use() -> tuple[int, str]:
    """Return the level and the form of this process's log, for a process that it starts."""
    formatters = (handler.formatter for handler in logging.root.handlers)
    forms = (known.form for known in formatters if isinstance(known, RecordFormatter))
    return logging.root.level, next(forms, TEXT)


def log_as_parent(settings: tuple[int, str]) -> None:
    """Let this process log as the one that started it, by that one's ``settings_in_use``."""
    level, form = settings
    logging.basicConfig(level=level, handlers=[make_handler(form)])


def _find_facts(record: logging.LogRecord) -> dict[str, Any]:
    own = {key: value for key, value in vars(record).items() if key not in _NOT_FACTS}
    if not hasattr(record, "event"):
        own["logger"] = record.name
    return {**own, **{key: value for key, value in current_ids().items() if key not in own}}


def _clean(value: Any) -> Any:
    """Return a value as JSON has it: a number, a truth value, None, a text or a list of these."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        rest = [f"and {len(value) - MAX_LISTED} more"] if len(value) > MAX_LISTED else []
        return [*map(_clean, value[:MAX_LISTED]), *rest]
    return _cut(hide_secrets(str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def _logfmt(value: Any) -> str:
    """Return a value, in quotes as in JSON if it has blanks, quotes or control characters."""
    if isinstance(value, list):
        value = _cut(",".join(map(_bare, value)))
    text = _bare(value)
    if _PLAIN_VALUE.fullmatch(text) and text.isprintable():
        return text
    return _visible(json.dumps(text, ensure_ascii=False))


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _visible(text: str) -> str:
    """Return ``text`` with each character that a terminal might obey as JSON escapes it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
