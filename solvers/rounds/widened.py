"""The statement of a round with packing rows: as passes state it, and again from a stored proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tessera.formulation.answer.packing_check import find_false_rows
from tessera.formulation.answer.proofs import RoundProof
from tessera.formulation.base.errors import InvalidCertificate, ProblemTooLarge
from tessera.formulation.round.packing import (
    PackingWeights,
    ShapeClasses,
    classify_shapes,
    packing_rows,
)
from tessera.formulation.round.packing.shapes import packable_types
from tessera.formulation.round.problem import Problem, RowKind
from tessera.formulation.round.statement import Statement, state_round
from tessera.solvers.goals.rows import with_rows
from tessera.solvers.rounds.work import RoundWork

MAX_WEIGHT: Final = 2**31
"""Greatest weight of a share in a stored row. Sums of greater ones might exceed 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WideStatement:
    """A round whose columns include wider shapes on some types, still without packing rows.

    ``types`` maps the names of these GPU types to their indices.
    """

    statement: Statement
    classes: ShapeClasses
    types: Mapping[str, int]

    def with_weights(self, weights: Iterable[PackingWeights]) -> Problem:
        """Return the problem with a packing row for each of ``weights``, in this order."""
        rows = packing_rows(self.classes, dict(self.types), weights)
        return with_rows(self.statement.problem, rows)


def state_wide(work: RoundWork, types: frozenset[int]) -> WideStatement:
    """State the round with wider shapes as columns on ``types``, each of which is packable.

    Raises:
        ProblemTooLarge: a value or a row would overflow.
    """
    statement = state_round(
        work.snapshot,
        work.policy,
        work.admission,
        waived=work.waived,
        plan=work.statement.plan,
        widened=types,
        check=work.budget.check,
    )
    nodes = {job: gang.nodes for job, gang in work.gangs.items()}
    return WideStatement(
        statement=statement,
        classes=classify_shapes(work.snapshot, statement.problem, types, nodes),
        types={work.snapshot.gpu_types[kind].name: kind for kind in sorted(types)},
    )


def with_packing(proof: RoundProof, work: RoundWork) -> RoundProof:
    """Return the proof of an answer of ``work`` with what states its problem again."""
    if not work.widened:
        return proof
    rows = work.statement.problem.rows
    return replace(
        proof,
        widened=tuple(work.snapshot.gpu_types[kind].name for kind in sorted(work.widened)),
        packing=tuple(row.name for row in rows if row.kind is RowKind.PACKING),
    )


def restate_packing(work: RoundWork, proof: RoundProof) -> RoundWork:
    """Return the round with the wide columns and the packing rows of ``proof``, if it has any.

    Weights are all that is taken from the proof. What columns use of a row, and its room, follow
    from the snapshot. They are checked by code that makes no rows, since a false row would make a
    false bound.

    Raises:
        InvalidCertificate: the proof names types or rows that this round cannot have.
    """
    if not proof.widened and not proof.packing:
        return work
    types = _types(work, proof)
    try:
        wide = state_wide(work, frozenset(types.values()))
        problem = wide.with_weights([_weights(name, wide) for name in proof.packing])
    except ProblemTooLarge as error:
        raise InvalidCertificate(f"its packing rows overflow: {error.problem}") from error
    for false in find_false_rows(work.snapshot, problem, work.gangs):
        raise InvalidCertificate(f"a packing row is not true: {false.detail}")
    statement = replace(wide.statement, problem=problem)
    return replace(work, statement=statement, widened=frozenset(types.values()), hint=None)


def _types(work: RoundWork, proof: RoundProof) -> dict[str, int]:
    """Return the GPU types that ``proof`` names, with their indices."""
    known, packable = work.snapshot.gpu_types, packable_types(work.snapshot)
    index = {kind.name: k for k, kind in enumerate(known) if k in packable}
    for name in proof.widened:
        if name not in index:
            raise InvalidCertificate(f"{name} is no GPU type of the round with packing rows")
    return {name: index[name] for name in proof.widened}


def _weights(name: str, wide: WideStatement) -> PackingWeights:
    """Return the weights that the name of a row states."""
    weights = PackingWeights.from_name(name)
    if weights is None or weights.gpu_type not in wide.types:
        raise InvalidCertificate(f"{name} is no packing row of the round")
    largest = wide.classes.sizes[wide.types[weights.gpu_type]][-1]
    if not 0 < max(weights.up_to(largest).weight) <= MAX_WEIGHT:
        raise InvalidCertificate(f"{name} has no weight, or one above {MAX_WEIGHT}")
    return weights
