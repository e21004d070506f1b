"""The health of nodes: a report of a fault drains its node, and health returns it after probation."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import sqlalchemy as sa

from tessera.db.agents.agents import require_agent
from tessera.db.base.documents import dump_json
from tessera.db.base.rows import SILENT_S, stored_faults
from tessera.db.base.turn import Turn, request_round
from tessera.formulation.records.agents import VALIDATION, HealthFault, NodeHealth

log = logging.getLogger(__name__)

DRAINED_BY: Final = "health"
"""The author of drains that reports of faults cause, as it is shown."""

REASON_FAULTS: Final = 3
MAX_REASON_CHARS: Final = 300
"""Largest number of faults that the reason of a drain names, and its largest length."""

_NODES = sa.text("""
SELECT n.id, n.name, n.draining, n.health_drain, n.drain_reason, n.faults, n.excused_faults,
    extract(epoch FROM n.probation_until - clock_timestamp())::float8 AS probation_left_s
FROM nodes n WHERE n.agent_id = :agent ORDER BY n.id
""")

_APPLY = sa.text("""
UPDATE nodes n SET
    faults = c.faults,
    excused_faults = c.excused,
    draining = CASE c.event WHEN 'drain' THEN true WHEN 'return' THEN false ELSE n.draining END,
    health_drain = CASE c.event WHEN 'drain' THEN true WHEN 'return' THEN false
        ELSE n.health_drain END,
    drain_reason = CASE c.event WHEN 'return' THEN '' ELSE coalesce(c.reason, n.drain_reason) END,
    drained_by = CASE c.event WHEN 'drain' THEN :drained_by WHEN 'return' THEN ''
        ELSE n.drained_by END,
    drained_at = CASE c.event WHEN 'drain' THEN clock_timestamp() WHEN 'return' THEN NULL
        ELSE n.drained_at END,
    probation_until = CASE c.event
        WHEN 'probation' THEN clock_timestamp() + make_interval(secs => :probation_s)
        WHEN 'none' THEN n.probation_until END,
    version = n.version + CASE WHEN c.event IN ('drain', 'return') THEN 1 ELSE 0 END
FROM json_to_recordset(CAST(:rows AS json)) AS
    c(id bigint, event text, reason text, faults jsonb, excused jsonb)
WHERE n.id = c.id
""")

_RETURN = sa.text(f"""
UPDATE nodes r SET draining = false, health_drain = false, drain_reason = '', drained_by = '',
    drained_at = NULL, probation_until = NULL, version = r.version + 1
FROM nodes n JOIN agents a ON a.id = n.agent_id
WHERE r.id = n.id AND n.cluster_id = :cluster AND n.probation_until <= clock_timestamp()
    AND {SILENT_S} <= :silence_s
RETURNING r.name
""")  # noqa: S608 - a constant of tessera.db.base.rows

PROBATION_S: Final = 600.0
"""Seconds of health after which a node that health drained is undrained, unless a store has another
setting.
"""

Row = sa.Row[tuple[object, ...]]


class HealthEvent(StrEnum):
    """The effect of a report on a node. Every event but NONE ends a probation or begins one."""

    NONE = "none"
    DRAIN = "drain"
    FAULT = "fault"  # another fault of a node that health has drained
    INTERRUPTION = "interruption"  # a node on probation is not watched any more
    PROBATION = "probation"
    RETURN = "return"


_GOOD_NEWS: Final = frozenset({HealthEvent.PROBATION, HealthEvent.RETURN})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChange:
    """A node's change by a report. If ``reason`` is None, that of its drain stays."""

    id: int
    name: str
    event: HealthEvent
    faults: tuple[HealthFault, ...]
    excused: tuple[HealthFault, ...]
    reason: str | None = None

    @property
    def row(self) -> dict[str, object]:
        """Return the values for the statement that applies it."""
        return {
            "id": self.id,
            "event": self.event,
            "reason": self.reason,
            "faults": _to_rows(self.faults),
            "excused": _to_rows(self.excused),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOutcome:
    """The effects of a report, and the seconds after which it should be recorded again."""

    changes: tuple[HealthChange, ...] = ()
    again_in_s: float = field(default=math.inf)


def record_health(
    connection: sa.Connection,
    cluster: str,
    agent: str,
    incarnation: str,
    reported: Sequence[NodeHealth],
    probation_s: float,
) -> HealthOutcome:
    """Record the faults of an agent's nodes; drain and return the nodes that this concerns.

    Nodes of other agents in the report are ignored. A report without news takes no turn.

    Raises:
        NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
    """
    me = require_agent(connection, cluster, agent, incarnation)
    health = {node.node: node.faults for node in reported}
    rows = connection.execute(_NODES, {"agent": me.id}).all()
    if not compare_health(rows, health, probation_s):
        return HealthOutcome(again_in_s=_shortest_probation_s(rows))
    # Take the turn and compare again, because other transactions may have had theirs.
    turn = Turn.take(connection, cluster)
    require_agent(connection, cluster, agent, incarnation)
    rows = connection.execute(_NODES, {"agent": me.id}).all()
    changes = compare_health(rows, health, probation_s)
    values = {
        "rows": dump_json([change.row for change in changes]),
        "drained_by": DRAINED_BY,
        "probation_s": probation_s,
    }
    connection.execute(_APPLY, values)
    events = {change.event for change in changes}
    if events & {HealthEvent.DRAIN, HealthEvent.RETURN}:
        request_round(connection, turn.cluster)
    began_s = probation_s if HealthEvent.PROBATION in events else math.inf
    return HealthOutcome(
        changes=tuple(changes), again_in_s=min(began_s, _shortest_probation_s(rows))
    )


def end_probations(connection: sa.Connection, cluster: str, silence_s: float) -> list[str]:
    """Undrain the nodes whose probation is over; return their names.

    A node that was not heard for ``silence_s`` stays drained: its health is not known.
    """
    turn = Turn.take(connection, cluster)
    values = {"cluster": turn.cluster, "silence_s": silence_s}
    names = sorted(connection.execute(_RETURN, values).scalars())
    if names:
        request_round(connection, turn.cluster)
    return names


def log_health(cluster: str, node: str, event: HealthEvent, reason: str = "") -> None:
    """Log what the health of a node has led to."""
    if event is HealthEvent.NONE:
        return
    level = logging.INFO if event in _GOOD_NEWS else logging.WARNING
    log.log(
        level,
        "the health of a node has changed",
        extra={
            "event": "node_health",
            "cluster": cluster,
            "node": node,
            "change": event.value,
            "cause": reason,
        },
    )


def compare_health(
    rows: Sequence[Row], health: Mapping[str, tuple[HealthFault, ...]], probation_s: float
) -> list[HealthChange]:
    """Compare the faults that an agent reports with the rows of ``_NODES``; return the changes."""
    changes = []
    for row in rows:
        change = _compare_node(row, health.get(row.name), probation_s)
        if change is not None:
            changes.append(change)
    return changes


def _compare_node(
    row: Row, faults: tuple[HealthFault, ...] | None, probation_s: float
) -> HealthChange | None:
    """Return the change of a node, or None. If ``faults`` is None, it is not watched.

    A fault that was present when an operator put the node back is excused until it is gone.
    """
    stored, excused = stored_faults(row.faults), stored_faults(row.excused_faults)
    left_s = row.probation_left_s
    if faults is None:
        if left_s is None:
            return None
        return HealthChange(
            id=row.id,
            name=row.name,
            event=HealthEvent.INTERRUPTION,
            faults=stored,
            excused=excused,
        )
    present = {fault.identity for fault in faults}
    excused = tuple(fault for fault in excused if fault.identity in present)
    known = {fault.identity for fault in excused}
    counted = [fault for fault in faults if fault.identity not in known]
    grave = [fault for fault in counted if fault.kind != VALIDATION]
    reason = describe_faults(grave) if grave else None
    event = HealthEvent.NONE
    if not row.draining:
        event = HealthEvent.DRAIN if grave else HealthEvent.NONE
    elif row.health_drain and counted:
        is_news = left_s is not None or reason not in (None, row.drain_reason)
        event = HealthEvent.FAULT if is_news else HealthEvent.NONE
    elif row.health_drain and (probation_s == 0 or (left_s is not None and left_s <= 0)):
        event = HealthEvent.RETURN
    elif row.health_drain and left_s is None:
        event = HealthEvent.PROBATION
    if event is HealthEvent.NONE and (faults, excused) == (
        stored,
        stored_faults(row.excused_faults),
    ):
        return None
    keeps = event not in (HealthEvent.DRAIN, HealthEvent.FAULT)
    return HealthChange(
        id=row.id,
        name=row.name,
        event=event,
        faults=faults,
        excused=excused,
        reason=None if keeps else reason,
    )


def describe_faults(faults: Sequence[HealthFault]) -> str:
    """Return the faults as the reason for a drain."""
    text = "; ".join(fault.sentence for fault in faults[:REASON_FAULTS])
    more = len(faults) - REASON_FAULTS
    ending = f"; and {more} more" if more > 0 else ""
    room = MAX_REASON_CHARS - len(ending)
    return (text if len(text) <= room else text[: room - 3] + "...") + ending


def _shortest_probation_s(rows: Sequence[Row]) -> float:
    left = [row.probation_left_s for row in rows if row.probation_left_s is not None]
    return max(0.0, min(left, default=math.inf))


def _to_rows(faults: Sequence[HealthFault]) -> list[list[object]]:
    return [[fault.gpu, fault.kind, fault.detail] for fault in faults]
