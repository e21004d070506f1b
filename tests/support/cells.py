"""Cells of records, built from the parts that tests give."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.values import Cell
from tessera.formulation.state.snapshot import Snapshot

_PARTS = {f.name for f in fields(Cell)}


def with_cell(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record, with the parts of a Cell in ``given`` merged into a Cell."""
    cell: dict[str, Any] = {"gpu_type": "a100", "gpus": 1, "pipeline_degree": 1}
    parts = {name: value for name, value in given.items() if name in _PARTS}
    rest = {name: value for name, value in given.items() if name not in _PARTS}
    return rest | {"cell": Cell(**cell | parts)}


def kind_of(snapshot: Snapshot, gang: Gang) -> int:
    """Return the index of the GPU type of a gang."""
    return int(snapshot.nodes.gpu_type[gang.members[0][0]])
