"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckResult(StrEnum):
    """The results of a check. Only ``fail`` makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check: its result, what was found, and what to do about it ("" for nothing)."""

    name: str
    result: CheckResult
    found: str
    advice: str = ""
