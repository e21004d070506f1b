"""A network plan keeps the checker's rules for any options, and planning again gives the same plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.network.check import find_network_violations
from tessera.solvers.network.factors import Clip
from tessera.solvers.network.replan import PlanningOptions, Variant, replan
from tessera.solvers.network.swaps import Moves
from tests.support.contentions import a_contention
from tests.support.laws import examples


@st.composite
def some_options(draw: st.DrawFn) -> PlanningOptions:
    """Draw any options of planning."""
    return PlanningOptions(
        variant=draw(st.sampled_from(Variant)),
        references=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from(Clip)),
        swap_jobs=draw(st.sampled_from([0, 3, 6])),
        moves=draw(st.sampled_from([Moves.ADJACENT, Moves.INSERTION])),
        trials=draw(st.sampled_from([0, 10])),
        margin=draw(st.sampled_from([0.0, 0.1, 2.0])),
        floor=draw(st.sampled_from([0.0, 0.4, 0.9])),
        seed=draw(st.integers(0, 5)),
    )


@examples(40)
@given(
    seed=st.integers(0, 10**6),
    jobs=st.integers(1, 9),
    idle=st.integers(0, 2),
    load=st.sampled_from([0.1, 1.0, 5.0]),
    levels=st.integers(1, 8),
    options=some_options(),
    data=st.data(),
)
def test_every_plan_passes_the_checker_and_is_reproducible(
    seed: int,
    jobs: int,
    idle: int,
    load: float,
    levels: int,
    options: PlanningOptions,
    data: st.DataObject,
) -> None:
    case = a_contention(seed, jobs=jobs, idle=min(idle, jobs), load=load)
    names = st.lists(st.sampled_from(case.jobs), unique=True)
    earlier, unmeasured = data.draw(names), data.draw(names)
    plan, again = (
        replan(case, levels=levels, options=options, earlier=earlier, unmeasured=unmeasured)
        for _ in range(2)
    )
    assert find_network_violations(case, plan) == []
    assert plan.level.tolist() == again.level.tolist()
    assert plan.chosen.tolist() == again.chosen.tolist()
    assert plan.order.tolist() == again.order.tolist()
