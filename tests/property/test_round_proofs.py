"""Proofs of rounds: any round whose prices are certified can be checked again from its snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.formulation.certificates import Certificate, PriceLeaf
from tessera.formulation.proofs import NO_PROOF, RoundProof
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.rounds.options import RoundOptions
from tests.support.builders import a_random_snapshot
from tests.support.proofs import proves, read_document
from tests.support.proven_rounds import a_proven_round, check

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


def test_a_round_without_certificates_is_not_stated_again() -> None:
    snapshot, options = a_random_snapshot(1, jobs=10), RoundOptions(objective="throughput")
    record, _ = a_proven_round(snapshot, options)
    (goal,) = check(record, options, snapshot, NO_PROOF)
    assert (goal.proven, goal.problem, goal.document) == (None, "", None)
