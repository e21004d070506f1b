"""The hierarchy of tenants: a tenant may have a parent, whose quota and weight bear on it, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools
from tessera.formulation.state.snapshot import Snapshot

MAX_DEPTH: Final = 8
"""Largest number of levels of tenants."""


def lines_of_tenants(parents: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return each tenant's line: the tenant itself and then those above it, the nearest first.

    ``parents`` has the parent of each tenant, or "" if it has none.

    Raises:
        InvalidInput: a parent that is missing, a circle, or more than ``MAX_DEPTH`` levels.
    """
    lines: dict[str, tuple[str, ...]] = {}
    for name in parents:
        line = [name]
        while parent := parents[line[-1]]:
            if parent not in parents:
                raise InvalidInput(
                    "parent", f"the parent of {line[-1]}, {parent}, has no settings; add it first"
                )
            if parent in line:
                circle = " > ".join([parent, *reversed(line[line.index(parent) :])])
                raise InvalidInput("parent", f"tenants form a circle, {circle}; remove a parent")
            line.append(parent)
            if len(line) > MAX_DEPTH:
                raise InvalidInput(
                    "parent",
                    f"{name} is on level {len(line)} of tenants, but there may be {MAX_DEPTH}",
                )
        lines[name] = tuple(line)
    return lines


def lines_of_snapshot(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return the line of each tenant that has settings (``lines_of_tenants``)."""
    names, parents = snapshot.tenants.name, snapshot.tenants.parent.tolist()
    return lines_of_tenants(
        {name: names[p] if p >= 0 else "" for name, p in zip(names, parents, strict=True)}
    )


def jobs_of_tenants(snapshot: Snapshot, tenants: Collection[int]) -> dict[int, Bools]:
    """Return the jobs of each of ``tenants`` and of all tenants below it, bool[jobs] by tenant.

    ``tenants`` are indices into ``Snapshot.tenants``.
    """
    if not tenants:
        return {}
    index = {name: i for i, name in enumerate(snapshot.tenants.name)}
    members: dict[int, list[int]] = {tenant: [] for tenant in tenants}
    for name, line in lines_of_snapshot(snapshot).items():
        for above in line:
            if (tenant := index[above]) in members:
                members[tenant].append(index[name])
    owner = np.array([index.get(name, -1) for name in snapshot.jobs.tenant], dtype=np.int64)
    return {tenant: np.isin(owner, below) for tenant, below in members.items()}


def weights_of_tenants(snapshot: Snapshot) -> dict[str, float]:
    """Return the weight of each tenant, times the weights of all above it."""
    own = dict(zip(snapshot.tenants.name, snapshot.tenants.weight.tolist(), strict=True))
    return {
        name: float(np.prod([own[above] for above in line]))
        for name, line in lines_of_snapshot(snapshot).items()
    }
