"""HiGHS through SciPy on the same integers, as a second opinion on which jobs can be admitted."""

from __future__ import annotations

import numpy as np
from scipy import optimize, sparse

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.lookahead import WORK_UNITS
from tessera.solvers.base import SolverFailed
from tessera.solvers.lookahead.integers import IntegerAdmission

Entry = tuple[int, float]
"""A variable and its factor."""


def most_weight(whole: IntegerAdmission, promised: Bools) -> int:
    """Return the greatest integer weight that a schedule admits if it admits all ``promised``.

    The result is -1 if the promises do not fit together. The model is written in matrices, with a
    start variable for each slot and no implications, so it shares only the numbers with CP-SAT's
    model. It is meant for small plans and runs to the end.

    Raises:
        SolverFailed: HiGHS ended in any other way.
    """
    ahead = whole.ahead
    jobs, slots = len(ahead.job), ahead.slots
    keys = [(int(o), int(k)) for o, k in np.argwhere(whole.allowed)]
    x = {key: jobs + i for i, key in enumerate(keys)}
    s = {key: jobs + len(keys) + i for i, key in enumerate(keys)}
    kinds = ahead.cells.gpu_type[ahead.cell]
    owner = ahead.owner
    pairs = sorted({(int(owner[o]), int(kinds[o])) for o, _ in keys if ahead.steady[owner[o]]})
    has = [(j, int(ahead.held[j])) for j in np.flatnonzero(ahead.held >= 0).tolist()]
    pairs = sorted({*pairs, *has})
    u = {pair: jobs + 2 * len(keys) + i for i, pair in enumerate(pairs)}
    count = jobs + 2 * len(keys) + len(pairs)
    lower, upper = np.zeros(count), np.ones(count)
    lower[:jobs][promised] = 1.0
    floors = {(int(owner[o]), int(kinds[o])): int(ahead.floor[o]) for o in range(len(owner))}
    for job, kind in pairs:
        lower[u[job, kind]] = float(ahead.held[job] == kind)
    rows: list[tuple[list[Entry], float, float]] = []
    for job in range(jobs):
        job_keys = [key for key in keys if owner[key[0]] == job]
        for slot in range(slots):
            rows.append(([(x[key], 1.0) for key in job_keys if key[1] == slot], -np.inf, 1.0))
        work = [(x[key], float(whole.gain[key]) / WORK_UNITS) for key in job_keys]
        work += [(s[key], -float(whole.cost[key[0]]) / WORK_UNITS) for key in job_keys]
        rows.append(([*work, (job, -float(whole.need[job]) / WORK_UNITS)], 0.0, np.inf))
    for option, slot in keys:
        before = [(x[option, slot - 1], 1.0)] if (option, slot - 1) in x else []
        starts = [(s[option, slot], 1.0), (x[option, slot], -1.0), *before]
        rows.append((starts, 0.0, np.inf))
        if ahead.stays[option] and slot:
            rows.append(([(x[option, slot], 1.0), *((v, -1.0) for v, _ in before)], -np.inf, 0.0))
        if (int(owner[option]), int(kinds[option])) in u:
            on_type = u[int(owner[option]), int(kinds[option])]
            rows.append(([(x[option, slot], 1.0), (on_type, -1.0)], -np.inf, 0.0))
    for resource, slot in np.ndindex(*ahead.capacity.shape):
        entries: list[Entry] = []
        for option, k in keys:
            if k == slot and ahead.use[option, resource]:
                held = (int(owner[option]), resource) in u and kinds[option] == resource
                entries.append(
                    (x[option, k], float(ahead.use[option, resource] - held * ahead.floor[option]))
                )
        entries += [(v, float(floors[pair])) for pair, v in u.items() if pair[1] == resource]
        rows.append((entries, -np.inf, float(ahead.capacity[resource, slot])))
    return _best(whole.weight, rows, lower, upper)


def _best(
    weight: Ints, rows: list[tuple[list[Entry], float, float]], lower: np.ndarray, upper: np.ndarray
) -> int:
    count = len(lower)
    cost = np.zeros(count)
    heaviest = max(1, int(weight.max(initial=1)))
    cost[: len(weight)] = -weight / heaviest
    at = [(r, v, a) for r, (entries, _, _) in enumerate(rows) for v, a in entries]
    matrix = sparse.csr_array(
        ([a for _, _, a in at], ([r for r, _, _ in at], [v for _, v, _ in at])),
        shape=(len(rows), count),
    )
    limits = optimize.LinearConstraint(
        matrix, np.array([low for _, low, _ in rows]), np.array([high for _, _, high in rows])
    )
    found = optimize.milp(
        cost,
        constraints=limits,
        integrality=np.ones(count, np.int64),
        bounds=optimize.Bounds(lower, upper),
        options={"mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return -1
    if found.status != 0 or found.x is None:
        raise SolverFailed("highs", str(found.message))
    return int(weight[np.asarray(found.x)[: len(weight)] > 0.5].sum())
