"""Uncertainty of estimates: in snapshots, in stored documents, and as the caution of a round."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.codec import decode, digest, encode
from tessera.formulation.columns import first_draft
from tessera.formulation.errors import InvalidInput
from tessera.formulation.information import apply_caution
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import build_problem
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes


def a_choice(sd_of_faster: float) -> Snapshot:
    """Return a job with two Cells of one GPU: one takes exactly 2 s, the other is estimated at 1 s."""
    slow = an_estimate(0, 0, 1, 1, iter_time_s=2.0) | {"sd": 0.0}
    fast = an_estimate(0, 1, 1, 1, iter_time_s=1.0) | {"sd": sd_of_faster}
    nodes = some_nodes((0, 1, 1), (1, 1, 1))
    return a_snapshot(nodes=nodes, jobs=[a_job("j")], estimates=[slow, fast])


def rates_at(snapshot: Snapshot, caution: float) -> list[float]:
    return [float(rate) for rate in first_draft(snapshot, Policy(caution=caution)).rate]


def test_uncertainty_is_part_of_the_stored_snapshot() -> None:
    snapshot = a_choice(0.5)
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.estimates.sd.tolist() == [0.0, 0.5]
    assert digest(again) != digest(a_choice(0.4))


@pytest.mark.parametrize("sd", [-0.1, math.inf])
def test_uncertainty_must_be_at_least_0(sd: float) -> None:
    with pytest.raises(InvalidInput, match=r"estimates\.sd"):
        a_choice(sd)


def test_an_uncertain_cell_is_treated_as_slower() -> None:
    assert rates_at(a_choice(0.5), 0.0) == [128.0, 256.0]
    slower = 256.0 / math.exp(2 * 0.5)
    assert rates_at(a_choice(0.5), 2.0) == pytest.approx([128.0, slower], rel=1e-12)


def test_without_known_uncertainty_an_estimate_stays_as_it_is() -> None:
    assert rates_at(a_choice(math.nan), 2.0) == [128.0, 256.0]


@given(st.integers(0, 1000), st.floats(0, 10))
def test_caution_without_uncertainty_changes_nothing(seed: int, caution: float) -> None:
    snapshot = a_random_snapshot(seed, jobs=2, workloads=2, max_gpus=4)
    assert apply_caution(snapshot, caution) is snapshot


@given(st.lists(st.floats(0, 3), min_size=1, max_size=5), st.floats(0, 5), st.floats(0, 5))
def test_more_caution_never_makes_a_cell_faster(sds: list[float], a: float, b: float) -> None:
    rows = [an_estimate(0, 0, n + 1, 1) | {"sd": sd} for n, sd in enumerate(sds)]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 8)), jobs=[], estimates=rows)
    less, more = sorted((a, b))
    times = [apply_caution(snapshot, c).estimates.iter_time_s for c in (less, more)]
    assert (times[0] <= times[1]).all()


def without_sd(problem: Problem) -> Problem:
    """Return the problem with Cells that are certain. Otherwise, only replans read their spread."""
    cells = replace(problem.cells, sd=np.zeros(len(problem.cells)))
    return replace(problem, cells=cells)


def test_a_round_without_caution_is_stated_as_before() -> None:
    sure = a_random_snapshot(3, jobs=6)
    rng = np.random.default_rng(3)
    unsure = replace(
        sure, estimates=replace(sure.estimates, sd=rng.uniform(0, 1, len(sure.estimates)))
    )
    before, after, cautious = (
        encode(without_sd(build_problem(s, Policy(caution=caution))))
        for s, caution in ((sure, 0.0), (unsure, 0.0), (unsure, 1.0))
    )
    assert before == after
    assert before != cautious


@pytest.mark.parametrize("caution", [-0.1, 10.1, math.nan])
def test_caution_has_limits(caution: float) -> None:
    with pytest.raises(InvalidInput, match="caution"):
        Policy(caution=caution)
