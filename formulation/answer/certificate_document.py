"""The document of a certificate: a problem by classes of identical jobs, its answer and its proof.

Anyone can check it without Tessera; ``docs/examples/verify_certificate.py`` does so. Amounts of a
row are in units of their greatest common divisor, and values in steps of theirs. Capacities are
then whole units, bounds are whole steps, and prices are those of a unit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np

from tessera.formulation.answer.certificates import Certificate, certificate_to_plain
from tessera.formulation.answer.job_classes import JobClasses, join_identical_jobs
from tessera.formulation.base.errors import InvalidCertificate, InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem

DOCUMENT_VERSION: Final = 1
"""Version of the document's form. Checkers refuse other versions."""


def certificate_document(
    problem: Problem, certificate: Certificate, choice: Ints, *, name: str, bound: int
) -> dict[str, Any]:
    """Return the document of ``certificate`` as plain values for JSON.

    ``choice`` (int64[jobs], column or -1) is the answer, and ``bound`` the bound that is claimed in
    the problem's integers. The certificate may prove a smaller one.

    Raises:
        InvalidCertificate: the certificate names columns or jobs that are not the first of a class.
        InvalidInput: the choice is not an answer.
    """
    classes = join_identical_jobs(problem)
    units = [max(1, divisor) for divisor in classes.divisor]
    step = classes.value_divisor
    taken = _taken(problem, classes, choice)
    return {
        "version": DOCUMENT_VERSION,
        "name": name,
        "unit": f"{step / problem.scale:.12g} {problem.unit}",
        "objective": int(problem.value[choice[choice >= 0]].sum()) // step,
        "bound": bound // step,
        "rows": [
            {"name": row.name, "room": capacity // unit}
            for row, capacity, unit in zip(problem.rows, classes.capacity, units, strict=True)
        ],
        "classes": [
            {
                "jobs": count,
                "must_run": bool(classes.must_run[k]),
                "columns": [
                    _column(classes, c, units, taken[c]) for c in range(*_span(classes, k))
                ],
            }
            for k, count in enumerate(classes.count)
        ],
        "denominator": certificate.denominator * step,
        "nodes": _nodes(classes, certificate, units),
    }


def _span(classes: JobClasses, k: int) -> tuple[int, int]:
    return int(classes.start[k]), int(classes.start[k + 1])


def _column(classes: JobClasses, c: int, units: list[int], taken: int) -> list[Any]:
    """Return the value, the (row, amount) and the number of jobs of a column."""
    entries = range(int(classes.entry_start[c]), int(classes.entry_start[c + 1]))
    uses = [(int(classes.row[e]), int(classes.amount[e])) for e in entries]
    return [
        int(classes.value[c]) // classes.value_divisor,
        [[row, amount // units[row]] for row, amount in uses if amount],
        taken,
    ]


def _taken(problem: Problem, classes: JobClasses, choice: Ints) -> Counter[int]:
    """Return how many jobs of its class take each column of the classes."""
    waits = (np.diff(problem.idle_start) > 0) & ~problem.must_run
    ends = problem.job_start[1:] + np.cumsum(waits)  # with waiting as a column, the last of its job
    number = np.where(choice >= 0, choice + np.cumsum(waits) - waits, ends - 1)
    taken = np.flatnonzero((choice >= 0) | waits)
    place = np.searchsorted(classes.number, number[taken])
    if not np.array_equal(np.append(classes.number, -1)[place], number[taken]):
        raise InvalidInput("choice", "has a column that uses more of a row than there is")
    own = place - classes.job_start[taken]
    return Counter((classes.start[classes.class_of[taken]] + own).tolist())


def _nodes(classes: JobClasses, certificate: Certificate, units: list[int]) -> list[dict[str, Any]]:
    """Return the certificate's nodes by classes, with prices of units."""
    class_of_column = np.repeat(np.arange(len(classes.first)), np.diff(classes.start)).tolist()
    place = {
        number: [k, c - int(classes.start[k])]
        for c, (number, k) in enumerate(zip(classes.column.tolist(), class_of_column, strict=True))
    }
    class_of_job = {job: k for k, job in enumerate(classes.first)}
    nodes: list[dict[str, Any]] = []
    try:
        for node in certificate_to_plain(certificate)["nodes"]:
            if "columns" in node:
                nodes.append({**node, "columns": [place[c] for c in node["columns"]]})
                continue
            nodes.append(
                {
                    "prices": [[r, price * units[r]] for r, price in node.get("prices", ())],
                    "branch_prices": node.get("branch_prices", []),
                    "knapsacks": node.get("knapsacks", []),
                    "job_prices": [[class_of_job[j], p] for j, p in node.get("job_prices", ())],
                }
            )
    except LookupError as wrong:
        raise InvalidCertificate(
            f"it names a row, column or job of another problem: {wrong}"
        ) from None
    return nodes
