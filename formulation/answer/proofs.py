"""The part of its proof that a round keeps: certificates of goals, and answers that a clock ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tessera.formulation.answer.certificates import (
    Certificate,
    certificate_from_plain,
    certificate_to_plain,
)
from tessera.formulation.answer.solution import RecordedAnswer

BY_LEVELS: Final = "levels"
"""Proof of a goal of levels: a search over levels, each by some stage's word. It has no certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalProof:
    """The proof of a goal's bound, and the part of the goal that later goals had to leave.

    ``certificate`` is of the problem that the earlier goals left, in the goal's integers. It is None
    if the bound is a stage's word. For a sum, ``floor`` is its least value in the goal's integers,
    and for levels the highest level in each place. It is empty for the last goal.
    """

    certificate: Certificate | None = None
    floor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProof:
    """The proofs of a round's goals, in order, and what a repetition needs next to its work.

    ``recorded`` has the answers of stages that a clock ended (``Budget.recorded``). ``widened`` names
    the GPU types on which wider shapes are columns of the problem that was solved, and ``packing``
    its packing rows, in order. The name of a row states its weights.
    """

    goals: tuple[GoalProof, ...] = ()
    recorded: tuple[RecordedAnswer, ...] = ()
    widened: tuple[str, ...] = ()
    packing: tuple[str, ...] = ()

    @property
    def has_certificate(self) -> bool:
        """Return whether the bound of a goal has a certificate."""
        return any(goal.certificate is not None for goal in self.goals)


NO_PROOF: Final = RoundProof()


def proof_to_plain(proof: RoundProof) -> dict[str, Any]:
    """Return the proof as plain values for JSON. Levels may be infinite."""
    return {
        "goals": [
            {
                "certificate": None
                if goal.certificate is None
                else certificate_to_plain(goal.certificate),
                "floor": list(goal.floor),
            }
            for goal in proof.goals
        ],
        "recorded": [
            {"stage": one.stage, "changes": [list(c) for c in one.changes], "bound": one.bound}
            for one in proof.recorded
        ],
        "widened": list(proof.widened),
        "packing": list(proof.packing),
    }


def proof_from_plain(plain: dict[str, Any]) -> RoundProof:
    """Return the proof that ``proof_to_plain`` wrote."""
    return RoundProof(
        goals=tuple(
            GoalProof(
                certificate=None
                if goal["certificate"] is None
                else certificate_from_plain(goal["certificate"]),
                floor=tuple(goal["floor"]),
            )
            for goal in plain["goals"]
        ),
        recorded=tuple(
            RecordedAnswer(
                stage=one["stage"],
                changes=tuple((job, column) for job, column in one["changes"]),
                bound=one["bound"],
            )
            for one in plain["recorded"]
        ),
        widened=tuple(plain["widened"]),
        packing=tuple(plain["packing"]),
    )
