"""Proofs of rounds, with and without packing rows: anyone can check them from the snapshot."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tessera.formulation.answer.certificates import Certificate, PriceLeaf
from tessera.formulation.answer.codec import digest
from tessera.formulation.answer.packing_check import find_false_rows
from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.proofs import RoundProof
from tessera.formulation.records.rounds import RoundRecord, decision_record
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.round_summary import summarise_round
from tessera.solvers.base import Budget, Solver
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.passes import PASSES_KEY
from tessera.solvers.rounds.plan import plan_round, restate_round
from tessera.solvers.rounds.proofs import GoalCheck, check_round
from tessera.solvers.rounds.widened import restate_packing
from tests.support.builders import a_random_snapshot
from tests.support.odd_gangs import gangs
from tests.support.proofs import proves, read_document
from tests.support.proving import ProvingSolver, RecordingSolver, certify_prices

FREE = Budget(remaining_s=lambda: math.inf)
"""A budget without any limit."""


def a_proven_round(
    snapshot: Snapshot, options: RoundOptions, solver: Solver | None = None
) -> tuple[RoundRecord, RoundProof]:
    """Return the record and the proof of a round on ``snapshot``, by prices if no solver is given."""
    outcome = plan_round(snapshot, options, solver or ProvingSolver(certify_prices), FREE)
    assert not outcome.violations
    summary = summarise_round(snapshot, outcome, options, {}, digest(snapshot))
    decisions = tuple(decision_record(snapshot, d) for d in outcome.decisions)
    return RoundRecord(summary=summary, decisions=decisions), outcome.proof


def check(
    record: RoundRecord, options: RoundOptions, snapshot: Snapshot, proof: RoundProof
) -> tuple[GoalCheck, ...]:
    """Return the check of each goal of a round that was decided on ``snapshot``."""
    budget = replace(FREE, work=dict(record.summary.work), recorded=proof.recorded)
    return check_round(record, options, snapshot, proof, budget)


SEEDS = range(8)


@pytest.mark.parametrize(
    "objective",
    ["throughput", "balanced", "throughput within 5% then jct", "max-min then throughput", "cost"],
)
@pytest.mark.parametrize("deadlines", ["keep", "look-ahead", "myopic"])
def test_the_certificates_of_a_round_prove_its_bounds_again(objective: str, deadlines: str) -> None:
    for seed in SEEDS:
        snapshot = a_random_snapshot(seed, jobs=10)
        options = RoundOptions(objective=objective, deadlines=deadlines)
        record, proof = a_proven_round(snapshot, options)
        for result, goal in zip(
            record.summary.goals, check(record, options, snapshot, proof), strict=True
        ):
            assert (goal.result, goal.problem) == (result, "")
            assert result.certified == (goal.proven is not None) == (result.proved_by == "prices")
            if goal.proven is None:
                assert result.proved_by in ("levels", "")
                continue
            assert goal.proven <= result.bound + 1e-9
            if goal.document is not None:
                assert proves(*read_document(dict(goal.document))) is not None


def test_a_round_with_a_cap_on_changes_is_checked_with_its_cap() -> None:
    documents = 0
    for seed in SEEDS:
        snapshot, options = a_random_snapshot(seed, jobs=10), RoundOptions(max_changes=1)
        (goal,) = check(*_with_options(snapshot, options))
        assert goal.problem == ""
        assert (goal.document is None) == bool(goal.note)
        documents += goal.document is not None
    assert documents > 0


def _with_options(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[RoundRecord, RoundOptions, Snapshot, RoundProof]:
    record, proof = a_proven_round(snapshot, options)
    return record, options, snapshot, proof


def test_a_certificate_of_another_round_is_refused_or_true() -> None:
    refused = 0
    options = RoundOptions(objective="throughput")
    for seed in SEEDS:
        snapshot = a_random_snapshot(seed, jobs=10)
        record, _ = a_proven_round(snapshot, options)
        _, other = a_proven_round(a_random_snapshot(seed + 100, jobs=10), options)
        (goal,) = check(record, options, snapshot, other)
        refused += bool(goal.problem)
        if not goal.problem:
            assert goal.proven is not None
            assert record.summary.objective <= goal.proven + 1e-9
    assert refused > 0


def test_a_stored_bound_below_what_is_proven_is_found() -> None:
    snapshot, options = a_random_snapshot(1, jobs=10), RoundOptions(objective="throughput")
    record, proof = a_proven_round(snapshot, options)
    (result,) = record.summary.goals
    lower = replace(record.summary, goals=(replace(result, bound=result.bound * 0.9),))
    (goal,) = check(replace(record, summary=lower), options, snapshot, proof)
    assert "which is not the bound" in goal.problem
    leaf = Certificate(bound=0, denominator=1, root=PriceLeaf(prices=((999, 1),)))
    false = replace(proof, goals=(replace(proof.goals[0], certificate=leaf),))
    (goal,) = check(record, options, snapshot, false)
    assert "priced rows must rise" in goal.problem


SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "verify_certificate.py"

THROUGHPUT = RoundOptions(objective="throughput", promise_starts=False)


@cache
def a_packed_round() -> tuple[Snapshot, RoundRecord, RoundProof]:
    """Return a round that the portfolio proves with packing rows: no two gangs of 5 share a node."""
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    return snapshot, *a_proven_round(snapshot, THROUGHPUT, make_solver())


@pytest.mark.parametrize(
    "counts",
    [(5, 5, 5, 5, 4, 4), (5, 5, 5, 5, 5), (5, 5, 5, 5, 4, 4, 3, 7, 12, 6)],
)
def test_a_round_with_packing_rows_is_proven_and_anyone_can_check_it(
    counts: tuple[int, ...],
) -> None:
    snapshot = gangs(*counts)
    record, proof = a_proven_round(snapshot, THROUGHPUT, make_solver())
    (goal,) = check(record, THROUGHPUT, snapshot, proof)
    assert (proof.widened, bool(proof.packing)) == (("a100",), True)
    assert (goal.problem, goal.note) == ("", "")
    assert goal.result.proved_by in ("prices", "branching")
    assert goal.proven is not None
    assert record.summary.objective <= goal.proven + 1e-9 <= goal.result.bound + 2e-9
    document = json.dumps({"goals": [goal.document]})
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    subprocess.run(command, input=document, capture_output=True, text=True, check=True)
    assert "packing/a100: shares of " in document


def test_the_bound_of_a_packed_round_is_not_proven_without_its_rows() -> None:
    snapshot, record, proof = a_packed_round()
    (goal,) = check(record, THROUGHPUT, snapshot, replace(proof, packing=()))
    assert goal.problem
    assert goal.document is None


@pytest.mark.parametrize(
    ("widened", "rows", "problem"),
    [
        ("a100", ["packing/a100: shares of 5-8 count many"], "is no packing row"),
        ("a100", ["gpus/a100"], "is no packing row"),
        ("a100", ["packing/h100: shares of 5-8 count 1"], "is no packing row"),
        ("a100", ["packing/a100: shares of 9-16 count 1"], "has no weight"),
        ("a100", [f"packing/a100: shares of 5-8 count {2**70}"], "has no weight"),
        ("a100", ["packing/a100: shares of 5-8 count 1"] * 3, ""),
        ("tpu", ["packing/a100: shares of 5-8 count 1"], "tpu is no GPU type"),
        ("", ["packing/a100: shares of 5-8 count 1"], "is no packing row"),
    ],
)
def test_a_proof_with_other_rows_or_types_is_refused(
    widened: str, rows: list[str], problem: str
) -> None:
    snapshot, record, proof = a_packed_round()
    types = (widened,) if widened else ()
    other = replace(proof, widened=types, packing=tuple(rows))
    (goal,) = check(record, THROUGHPUT, snapshot, other)
    assert goal.problem
    assert problem in goal.problem
    assert (goal.proven, goal.document) == (None, None)


def test_weights_of_a_stored_row_cannot_make_it_false() -> None:
    """Whatever is stored, capacities and amounts follow from the snapshot."""
    snapshot, _, proof = a_packed_round()
    drawn = np.random.default_rng(1).integers(1, 9, size=(20, 8))
    for weights in drawn.tolist():
        spans = ", ".join(f"{size} count {w}" for size, w in enumerate(weights, start=1))
        stored = replace(proof, packing=(f"packing/a100: shares of {spans}",))
        work = restate_packing(restate_round(snapshot, THROUGHPUT, FREE), stored)
        assert len([r for r in work.statement.problem.rows if r.kind == "packing"]) == 1
        assert not find_false_rows(snapshot, work.statement.problem, work.gangs)


def test_running_gangs_are_found_among_the_columns_of_the_last_pass() -> None:
    """Random gangs, of which some run already; then the decided answer must be the proven one."""
    packed = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        counts = rng.choice([2, 3, 5, 6, 7, 12], 9).tolist()
        here = {
            job: Gang(members=((job, tuple(range(counts[job]))),))
            for job in range(3)
            if counts[job] <= 8
        }
        snapshot = gangs(*counts, nodes=4, running=here, restart_s=float(rng.choice([0, 60, 600])))
        outcome = plan_round(snapshot, THROUGHPUT, make_solver(), FREE)
        record, proof = a_proven_round(snapshot, THROUGHPUT, make_solver())
        (goal,) = check(record, THROUGHPUT, snapshot, proof)
        packed += bool(proof.packing)
        assert (goal.problem, goal.note) == ("", "")
        if goal.document is not None:
            step = float(goal.document["unit"].split()[0])
            worth = goal.document["objective"] * step
            columns = outcome.solution.objective / outcome.problem.scale
            assert outcome.placed_score - 1e-6 <= worth <= columns + 1e-6
    assert packed > 2


@pytest.mark.parametrize("objective", ["throughput within 1% then jct", "max-min then throughput"])
def test_goals_in_order_are_checked_with_the_rows_of_the_last_pass(objective: str) -> None:
    options, documents = replace(THROUGHPUT, objective=objective), 0
    for counts in [(5, 5, 5, 5, 5, 5, 5), (5, 5, 5, 5, 4, 4, 3, 7, 12, 6)]:
        snapshot = gangs(*counts, nodes=5)
        record, proof = a_proven_round(snapshot, options, make_solver())
        assert proof.packing
        goals = check(record, options, snapshot, proof)
        assert [goal.problem for goal in goals] == ["", ""]
        assert [goal.proven is not None for goal in goals] == [
            goal.result.certified for goal in goals
        ]
        documents += sum(goal.document is not None for goal in goals)
    assert documents > 0


def test_answers_that_a_clock_ended_are_given_back_to_their_pass() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    first_solver, second_solver = RecordingSolver(), RecordingSolver()
    first = plan_round(snapshot, THROUGHPUT, first_solver, FREE)
    work = dict(first.solution.work)
    passes = int(work[PASSES_KEY])
    stages = [one.stage for one in first.proof.recorded]
    assert stages == ["cut", *(f"packing {k}/cut" for k in range(1, passes + 1))]
    again = plan_round(
        snapshot,
        THROUGHPUT,
        second_solver,
        replace(FREE, work=work, recorded=first.proof.recorded),
    )
    assert again.proof == first.proof
    assert dict(again.solution.work) == work
    assert again.solution.choice.tolist() == first.solution.choice.tolist()
    assert again.placed.placement == first.placed.placement
    assert all(math.isfinite(one.bound) for one in first.proof.recorded)
    of_passes = second_solver.given[1:]
    assert [[one.stage for one in given] for given in of_passes] == [["cut"]] * passes
    expected = [one.changes for one in first.proof.recorded[1:]]
    assert [given[0].changes for given in of_passes] == expected
