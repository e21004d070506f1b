"""Laws of GPU types and node labels: on random rounds, no scheduler places a job where it may not be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.policy import Policy
from tessera.formulation.selectors import Requirement, Selector
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_names, scheduler_of
from tests.support.driver import (
    decide_round,
    with_allowed_types,
    with_avoided_nodes,
    with_selectors,
)
from tests.support.laws import examples
from tests.support.snapshots import snapshots

BUDGET = Budget(remaining_s=lambda: math.inf, gap=1e-6, work={"cp-sat": 0.2, "lp": 9.0})


@st.composite
def restricted_snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot in any state, whose jobs state types, selectors, preferences and avoided nodes."""
    snapshot = draw(snapshots())
    jobs, nodes, types = len(snapshot.jobs), len(snapshot.nodes), len(snapshot.gpu_types)
    if not jobs:
        return snapshot
    some_jobs = st.sets(st.integers(0, jobs - 1))
    some_nodes = st.sets(st.integers(0, nodes - 1))
    pairs = {(job, draw(st.integers(0, types - 1))) for job in draw(some_jobs)}
    snapshot = with_allowed_types(snapshot, *sorted(pairs))
    avoided = draw(
        st.sets(st.tuples(st.integers(0, jobs - 1), st.integers(0, nodes - 1)), max_size=2)
    )
    snapshot = with_avoided_nodes(snapshot, *sorted(avoided))
    for column in ("required_selector", "preferred_selector"):
        wanted = {job: draw(some_nodes) for job in sorted(draw(some_jobs))}
        snapshot = with_selectors(snapshot, wanted, column)
    return snapshot


def require_permitted(snapshot: Snapshot, outcome: RoundOutcome) -> None:
    """Require that each gang is on nodes and a type that its job may use, read from the tables alone."""
    allowed = snapshot.allowed_types
    types = {
        job: set(allowed.gpu_type[allowed.job == job].tolist()) for job in allowed.job.tolist()
    }
    u = snapshot.unmatched_nodes
    unmatched = set(zip(u.selector.tolist(), u.node.tolist(), strict=True))
    for d in outcome.decisions:
        if d.gang is None:
            continue
        selector = int(snapshot.jobs.required_selector[d.job])
        for node, _ in d.gang.members:
            assert (selector, node) not in unmatched
            kind = int(snapshot.nodes.gpu_type[node])
            assert kind in types.get(d.job, {kind})


@pytest.mark.parametrize("solver", ["greedy", "cp-sat"])
@examples(60)
@given(restricted_snapshots())
def test_no_solver_places_a_job_where_it_may_not_run(solver: str, snapshot: Snapshot) -> None:
    outcome = plan_round(snapshot, Policy(), make_solver(solver), BUDGET)
    assert outcome.violations == ()
    require_permitted(snapshot, outcome)


@pytest.mark.parametrize("name", scheduler_names())
@examples(6)
@given(restricted_snapshots())
def test_no_published_scheduler_places_a_job_where_it_may_not_run(
    name: str, snapshot: Snapshot
) -> None:
    options = RoundOptions(scheduler=name)
    outcome = plan_round(
        snapshot, options, make_solver("greedy"), BUDGET, scheduler=scheduler_of(name)
    )
    assert outcome.violations == ()
    require_permitted(snapshot, outcome)


@examples(60)
@given(restricted_snapshots())
def test_a_preference_changes_neither_which_jobs_run_nor_their_cells(snapshot: Snapshot) -> None:
    """Only where the whole outcome is placed at its first attempt. Fragmentation may differ."""
    jobs = snapshot.jobs
    free = replace(snapshot, jobs=replace(jobs, preferred_selector=np.full(len(jobs), -1)))
    outcomes = [decide_round(s, Policy()) for s in (snapshot, free)]
    if any(o.placed.unplaced or o.placed.degraded for o in outcomes):
        return
    assert [d.cell for d in outcomes[0].decisions] == [d.cell for d in outcomes[1].decisions]


WORDS = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,8}[A-Za-z0-9])?", fullmatch=True)
REQUIREMENTS = st.builds(
    lambda key, values, negated: Requirement(
        key, tuple(sorted(values)), negated=negated and len(values) == 1
    ),
    WORDS,
    st.sets(WORDS, min_size=1, max_size=4),
    st.booleans(),
)


@examples(200)
@given(st.lists(REQUIREMENTS, max_size=6, unique=True))
def test_every_selector_reads_back_from_its_text(requirements: list[Requirement]) -> None:
    selector = Selector(tuple(requirements))
    assert Selector.read("f", str(selector)) == selector
