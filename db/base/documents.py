"""JSON for data that is stored as a whole: rounds' summaries, reasons and past allocations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tessera.formulation.base.texts import plain_text, text_from
from tessera.formulation.base.values import cell_from_plain, cell_to_plain
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.records.jobs import AllocationRecord, PlannedStartRecord, SegmentRecord
from tessera.formulation.records.rounds import RoundSummary
from tessera.formulation.round.goals import GoalResult

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_plain_json(value: Any) -> Any:
    """Return ``value`` with every non-finite float as {"float": "inf"}, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {key: to_plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_json(item) for item in value]
    return value


def from_plain_json(plain: Any) -> Any:
    """Undo ``to_plain_json``. Lists come back as tuples."""
    if isinstance(plain, dict):
        if plain.keys() == {"float"} and isinstance(plain["float"], str):
            return float(plain["float"])
        return {key: from_plain_json(item) for key, item in plain.items()}
    return tuple(from_plain_json(item) for item in plain) if isinstance(plain, list) else plain


def dump_json(value: Any) -> str:
    """Return JSON without NaN and infinity, and without NUL, which PostgreSQL cannot hold."""
    text = _JSON.encode(value)
    return text.replace("\\u0000", "") if "\\u0000" in text else text


def summary_json(summary: RoundSummary) -> str:
    """Return a round's summary as JSON."""
    plain = asdict(summary)
    if math.isinf(summary.promises_due_s):  # tessera.db.clusters.outlook reads a number
        del plain["promises_due_s"]
    return dump_json(to_plain_json(plain))


def summary_from(plain: dict[str, Any]) -> RoundSummary:
    """Return the summary that ``summary_json`` wrote."""
    fields = from_plain_json(plain)
    return RoundSummary(
        goals=tuple(GoalResult(**goal) for goal in fields.pop("goals")),
        **fields,
    )


def reason_plain(reason: Reason | None) -> dict[str, Any] | None:
    """Return a reason as plain values for JSON."""
    if reason is None:
        return None
    return {  # not asdict, which copies deeply: a round has a reason for every waiting job
        "code": reason.code,
        "message": plain_text(reason.message),
        "next_step": plain_text(reason.next_step),
        "evidence": [(plain_text(key), plain_text(value)) for key, value in reason.evidence],
    }


def reason_from(plain: dict[str, Any] | None) -> Reason | None:
    """Return the reason that ``reason_plain`` wrote."""
    if plain is None:
        return None
    return Reason(
        code=ReasonCode(plain["code"]),
        message=text_from(plain["message"]),
        next_step=text_from(plain["next_step"]),
        evidence=tuple((text_from(key), text_from(value)) for key, value in plain["evidence"]),
    )


def allocation_plain(allocation: AllocationRecord | None) -> dict[str, Any] | None:
    """Return an allocation as plain values for JSON."""
    if allocation is None:
        return None
    return {  # not asdict, as for reasons
        **cell_to_plain(allocation.cell),
        "rate": allocation.rate,
        "generation": allocation.generation,
        "shares": allocation.shares,
    }


def allocation_from(plain: dict[str, Any] | None) -> AllocationRecord | None:
    """Return the allocation that ``allocation_plain`` wrote."""
    if plain is None:
        return None
    fields = from_plain_json(plain)
    rest = {name: fields[name] for name in ("rate", "generation", "shares")}
    return AllocationRecord(cell=cell_from_plain(fields), **rest)


def schedule_to_plain(segments: Sequence[SegmentRecord]) -> list[dict[str, Any]]:
    """Return a job's deadline schedule as plain values for JSON."""
    return [
        {
            "start_s": finite_or_text(segment.start_s),
            "end_s": finite_or_text(segment.end_s),
            **cell_to_plain(segment.cell),
        }
        for segment in segments
    ]


def planned_start_plain(start: PlannedStartRecord | None) -> dict[str, Any] | None:
    """Return the start that is reserved for a job as plain values for JSON."""
    if start is None:
        return None
    return {
        "start_s": start.start_s,
        "end_s": finite_or_text(start.end_s),
        **cell_to_plain(start.cell),
        "nodes": dict(start.nodes),
    }


def planned_start_from(plain: dict[str, Any] | None) -> PlannedStartRecord | None:
    """Return the start that ``planned_start_plain`` wrote."""
    if plain is None:
        return None
    return PlannedStartRecord(
        start_s=float(plain["start_s"]),
        end_s=float(plain["end_s"]),
        cell=cell_from_plain(plain),
        nodes=tuple(sorted(plain["nodes"].items())),
    )


def finite_or_text(value: float) -> float | str:
    """Return a number, or its text if JSON cannot represent it.

    PostgreSQL and Python can read both.
    """
    return value if math.isfinite(value) else str(value)


def schedule_from_plain(plain: list[dict[str, Any]]) -> tuple[SegmentRecord, ...]:
    """Return the deadline schedule that ``schedule_to_plain`` wrote."""
    return tuple(
        SegmentRecord(
            start_s=float(segment["start_s"]),
            end_s=float(segment["end_s"]),
            cell=cell_from_plain(segment),
        )
        for segment in plain
    )
