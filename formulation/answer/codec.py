"""JSON for snapshots, problems and solutions, so that a round can be stored, shared and replayed.

The form is canonical: the same value gives the same bytes (sorted keys, and the shortest float that
reads back equal). JSON has no non-finite floats. They are written as {"float": "inf"}, or as
strings inside an array of floats.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.documents import SNAPSHOT, NotJson, read_json
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Table
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.round.problem import CouplingRow, Problem
from tessera.formulation.state.cells import Cells, Shapes
from tessera.formulation.state.decayed_use import DecayedUse
from tessera.formulation.state.last_round import (
    ExpectedReleases,
    PlannedNodes,
    PlannedStarts,
    Prices,
    ScheduleSegments,
)
from tessera.formulation.state.network_facts import (
    StandingNetworkPlan,
    TrafficMeasurements,
    Traffics,
)
from tessera.formulation.state.permissions import (
    AllowedGpuTypes,
    AvoidedNodes,
    Selectors,
    UnmatchedNodes,
)
from tessera.formulation.state.plan_tables import PlanKinds, RefusedPlans, Runtimes
from tessera.formulation.state.reserved import (
    Entitlements,
    ExcludedJobs,
    Reservations,
    ReservedNodes,
)
from tessera.formulation.state.snapshot import (
    Allocations,
    Dependencies,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.formulation.state.topologies.described import DescribedTopology, decode_topology
from tessera.formulation.state.traffic import DescribedTraffic, intern_traffic

FORMAT_VERSION = 2
"""Version of the JSON form. A reader refuses other versions."""

_CLASSES: Final[dict[str, type[Any]]] = {
    "Allocations": Allocations,
    "AllowedGpuTypes": AllowedGpuTypes,
    "AvoidedNodes": AvoidedNodes,
    "ExcludedJobs": ExcludedJobs,
    "Cells": Cells,
    "Dependencies": Dependencies,
    "Entitlements": Entitlements,
    "Estimates": Estimates,
    "GpuType": GpuType,
    "Jobs": Jobs,
    "ScheduleSegments": ScheduleSegments,
    "Measured": TrafficMeasurements,
    "Nodes": Nodes,
    "PlanKinds": PlanKinds,
    "PlannedNodes": PlannedNodes,
    "PlannedStarts": PlannedStarts,
    "Prices": Prices,
    "Problem": Problem,
    "Quotas": Quotas,
    "RefusedPlans": RefusedPlans,
    "Reservations": Reservations,
    "ReservedNodes": ReservedNodes,
    "Row": CouplingRow,
    "Runtimes": Runtimes,
    "Selectors": Selectors,
    "Shapes": Shapes,
    "Snapshot": Snapshot,
    "Solution": Solution,
    "Standing": StandingNetworkPlan,
    "Tenants": Tenants,
    "Traffics": Traffics,
    "UnmatchedNodes": UnmatchedNodes,
    "DecayedUse": DecayedUse,
    "Workload": Workload,
    "ExpectedReleases": ExpectedReleases,
}
"""Classes by their names in the JSON form, which stay as they are when a class is renamed."""
_NAMES: Final = {cls: name for name, cls in _CLASSES.items()}
_ENUMS: dict[str, type[StrEnum]] = {"SolveStatus": SolveStatus}


def _topology(text: Any) -> DescribedTopology | None:
    return decode_topology(text) if text else None


def _traffics(texts: Any) -> tuple[DescribedTraffic, ...]:
    return tuple(map(intern_traffic, texts))


_READERS: dict[tuple[type[Any], str], Callable[[Any], Any]] = {
    (Snapshot, "topology"): _topology,
    (Traffics, "document"): _traffics,
}
"""Readers of the fields that are written as texts."""


def _plain_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return {"f": [_plain_float(v) for v in value.tolist()]}
        return {value.dtype.kind: value.tolist()}
    if isinstance(value, CouplingRow):
        return {"is": "Row", "name": value.name, "capacity": value.capacity}
    if isinstance(value, DescribedTopology | DescribedTraffic):
        return value.document
    if is_dataclass(value):
        # Most jobs use few of the options, so columns without one are left out.
        left_out = value.usual_columns() if isinstance(value, Table) else ()
        body = {
            f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in left_out
        }
        return {"is": _NAMES.get(type(value), type(value).__name__), **body}
    if isinstance(value, StrEnum):
        return {"enum": type(value).__name__, "value": value.value}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        if all(isinstance(v, str) for v in value):
            return list(value)
        return [_plain(v) for v in value]
    return value


_KINDS = {"i": np.int64, "f": np.float64, "b": np.bool_}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(v) for v in plain)
    if not isinstance(plain, dict):
        return plain
    if "float" in plain:
        return float(plain["float"])
    if "enum" in plain:
        return _ENUMS[plain["enum"]](plain["value"])
    if "is" in plain:
        kind = _CLASSES.get(plain["is"])
        if kind is None:
            raise InvalidInput("is", f"unknown kind {plain['is']!r}")
        if kind is CouplingRow:
            return CouplingRow.from_name(plain["name"], plain["capacity"])
        rest = {k: v for k, v in plain.items() if k != "is"}
        return kind(**{k: _READERS.get((kind, k), _value)(v) for k, v in rest.items()})
    ((kind_code, values),) = plain.items()
    if kind_code == "f":
        values = [float(v) for v in values]
    array = np.array(values, None if values else _KINDS[kind_code])
    if array.dtype != _KINDS[kind_code]:
        raise InvalidInput("body", f"an array of {kind_code!r} holds other values")
    return array


def encode(value: Snapshot | Problem | Solution) -> bytes:
    """Return the canonical JSON of ``value``, UTF-8."""
    plain = {"format": FORMAT_VERSION, "body": _plain(value)}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Snapshot | Problem | Solution) -> str:
    """Return the SHA-256 of the canonical JSON, in hex. It names the value's content."""
    return digest_of(encode(value))


def digest_of(encoded: bytes) -> str:
    """Return the digest of the value whose canonical JSON is ``encoded``."""
    return hashlib.sha256(encoded).hexdigest()


def decode(text: bytes) -> Snapshot | Problem | Solution:
    """Return the snapshot, problem or solution that ``encode`` wrote.

    The traffic of Cells is parsed only when it is asked for. ``Traffics.require_readable`` parses
    all of it.

    Raises:
        InvalidInput: not JSON, another format, or a body that breaks its type's rules.
    """
    try:
        plain = read_json("", text, SNAPSHOT)
    except NotJson as error:
        raise InvalidInput("", f"not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT_VERSION:
        raise InvalidInput("format", f"expected {FORMAT_VERSION}")
    try:
        value = _value(plain["body"])
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InvalidInput("body", f"does not describe a known value: {error}") from error
    if not isinstance(value, Snapshot | Problem | Solution):
        raise InvalidInput("body", "must be a snapshot, a problem or a solution")
    return value
