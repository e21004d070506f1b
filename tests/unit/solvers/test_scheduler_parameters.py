"""Parameters of published schedulers: their declaration, their notation, and what they change."""

from __future__ import annotations

import math
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.deciding import decide_again
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.arena import Arena
from tessera.solvers.schedulers.base import PublishedScheduler
from tessera.solvers.schedulers.gandiva import Gandiva
from tessera.solvers.schedulers.gavel import Gavel
from tessera.solvers.schedulers.parameters import SchedulerParameter
from tessera.solvers.schedulers.registry import make_scheduler, parameters_of, scheduler_names
from tessera.solvers.schedulers.sia import Sia
from tests.support.builders import a_job
from tests.support.published_schedulers import LINEAR, RUNNING, a_round, rates
from tests.support.worlds import StoppedClock

DECLARED = [(name, parameter) for name in scheduler_names() for parameter in parameters_of(name)]
EACH = pytest.mark.parametrize(
    ("scheduler", "parameter"), DECLARED, ids=[f"{name}-{p.name}" for name, p in DECLARED]
)


# the declaration


@EACH
def test_a_declared_default_is_allowed_and_is_the_schedulers_own(
    scheduler: str, parameter: SchedulerParameter
) -> None:
    plain = make_scheduler(scheduler)
    assert getattr(plain, parameter.name) == parameter.default
    if parameter.default is not None:
        assert parameter.rule.read(parameter.shown_default) == parameter.default
        assert make_scheduler(scheduler, f"{parameter.name}={parameter.shown_default}") == plain


@EACH
def test_bounds_are_allowed_and_what_is_beyond_them_is_not(
    scheduler: str, parameter: SchedulerParameter
) -> None:
    rule, outside = parameter.rule, ["", "yes", "nan", "None"]
    if rule.kind in ("whole", "number"):
        outside += ["-inf", f"{math.floor(rule.low - 1)}"]
        if math.isfinite(rule.high):
            outside += ["inf", f"{rule.high + 1:.0f}"]
    for text in rule.extremes:
        assert rule.read(text) is not None
        make_scheduler(scheduler, f"{parameter.name}={text}")
    assert [text for text in outside if rule.read(text) is not None] == []


def test_no_parameter_has_the_name_of_an_option_of_a_round() -> None:
    """Otherwise ``SCHEDULER@NAME=VALUE`` of a simulated policy could mean either."""
    options = {option.name for option in fields(RoundOptions)}
    assert not options & {parameter.name for _, parameter in DECLARED}


def test_variants_and_names_are_no_parameters() -> None:
    assert [p.name for p in parameters_of("arena")] == [
        "depth",
        "breadth",
        "max_upgrades",
        "performance",
    ]
    assert parameters_of("arena-deadline") == parameters_of("arena-no-elasticity")
    assert parameters_of("morphling-r") == parameters_of("fcfs") == ()
    assert [p.shown_default for p in parameters_of("sia")] == ["-0.5", "1.1"]
    assert [p.shown_default for p in parameters_of("sia-arena")] == ["0.5", "1.1"]
    with pytest.raises(InvalidInput, match="unknown 'lottery'; choose one of fcfs"):
        parameters_of("lottery")


def test_the_documented_parameters_are_the_declared_ones() -> None:
    page = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()
    section = page.partition("### Parameters of schedulers\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    documented = {
        (name, parameter.strip("`")): rest
        for named, parameter, *rest in rows
        for pattern in named.replace("`", "").split(", ")
        for name in scheduler_names()
        if fnmatch(name, pattern)
    }
    assert documented == {
        (name, p.name): [
            p.shown_default,
            p.rule.allowed,
            f"{p.rule.meaning} Source: {p.rule.source}.",
        ]
        for name, p in DECLARED
    }


# the notation


@pytest.mark.parametrize(
    ("scheduler", "text", "message"),
    [
        ("arena", "depth", "'depth' must be NAME=VALUE, e.g. depth=5,breadth=8"),
        ("arena", "=5", "'=5' must be NAME=VALUE"),
        ("arena", "depth=", "'depth=' must be NAME=VALUE"),
        ("arena", "depth=1,breadth=2,depth=1", "sets 'depth' twice; set it once"),
        (
            "arena",
            "dpeth=1",
            "the scheduler arena has no parameter 'dpeth'; did you mean 'depth'?"
            " (its parameters: depth, breadth, max_upgrades, performance)",
        ),
        ("sia", "lottery=1", "has no parameter 'lottery' (its parameters: fairness, incentive)"),
        ("arena", "elasticity=false", "has no parameter 'elasticity'"),
        ("arena", "name=x", "has no parameter 'name'"),
        ("fcfs", "depth=1", "the scheduler fcfs has no parameters; leave out 'depth'"),
        ("arena", "depth=deep", "depth must be a whole number from 0 to 16, not 'deep'"),
        ("arena", "depth=2.5", "depth must be a whole number from 0 to 16, not '2.5'"),
        ("arena", "breadth=0", "breadth must be a whole number from 1 to 256, not '0'"),
        ("arena", "performance=jct", "performance must be priced, normalised or samples"),
        ("gavel", "raw=1", "raw must be true or false, not '1'"),
        ("gandiva", "slice_s=0", "slice_s must be a number of at least 1, not '0'"),
        ("sia", "fairness=nan", "fairness must be a number from -2 to 2, not 'nan'"),
    ],
)
def test_wrong_parameters_are_refused_with_what_is_right(
    scheduler: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_scheduler(scheduler, text)
    assert caught.value.field == "scheduler_parameters"
    assert message in caught.value.problem


# decisions


def decide(snapshot: Snapshot, scheduler: str, parameters: str = "") -> RoundRecord:
    """Return a round that ``tessera solve`` decides with the parameters; it must keep all rules."""
    record = decide_again(
        snapshot,
        RoundOptions(scheduler=scheduler, scheduler_parameters=parameters),
        StoppedClock(),
        remaining_s=lambda: math.inf,
        cancelled=lambda: False,
    )
    assert record.summary.violations == ()
    return record


def gpus_of(snapshot: Snapshot, scheduler: str, parameters: str = "") -> dict[str, int]:
    """Return the GPUs of each job after the round; 0 if it waits."""
    return {
        d.job: 0 if d.allocation is None else d.allocation.cell.gpus
        for d in decide(snapshot, scheduler, parameters).decisions
    }


def gangs_of(*gpus: int) -> dict[int, Gang]:
    """Return the gangs of the first jobs, which hold the GPUs of one node in order."""
    first, gangs = 0, {}
    for job, count in enumerate(gpus):
        gangs[job] = Gang(members=((0, tuple(range(first, first + count))),))
        first += count
    return gangs


def a_crowd() -> Snapshot:
    """Return a full node of four jobs with 2 GPUs, and a job that requests 4."""
    jobs = [
        *(a_job(f"r{k}", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2) for k in range(4)),
        a_job("new", 1, requested_gpus=4),
    ]
    cells = [rates(0, 0, {1: 10.0, 2: 15.0}), rates(1, 0, {4: 400.0, 2: 1.0})]
    return a_round(jobs, cells, gangs=gangs_of(2, 2, 2, 2))


def test_a_rounds_breadth_limits_the_partial_results_that_arena_keeps() -> None:
    """In one step, the cheapest GPU is that of the small job, but the new job needs four."""
    jobs = [
        a_job("small", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
        a_job("large", 1, state=RUNNING, cell=(0, 8, 1), requested_gpus=8),
        a_job("new", 2, requested_gpus=4),
    ]
    cells = [rates(0, 0, {1: 10.0, 2: 10.1}), rates(1, 0, LINEAR), rates(2, 0, {4: 40.0})]
    snapshot = a_round(jobs, cells, nodes=((0, 1, 10),), gangs=gangs_of(2, 8))

    assert gpus_of(snapshot, "arena", "depth=1,breadth=1")["new"] == 0
    assert gpus_of(snapshot, "arena", "depth=1,breadth=2")["new"] == 4


@pytest.mark.parametrize(
    ("scheduler", "text", "same"),
    [
        (
            "arena",
            "performance=samples, depth=2, breadth=4, max_upgrades=0",
            Arena(performance="samples", depth=2, breadth=4, max_upgrades=0),
        ),
        (
            "arena-no-opportunism",
            "depth=2",
            Arena(name="arena-no-opportunism", opportunism=False, depth=2),
        ),
        ("gandiva", "slice_s=600", Gandiva(slice_s=600.0)),
        ("gavel", "raw=true,max_changed=3", Gavel(raw=True, max_changed=3)),
        ("sia", "fairness=-1", Sia(fairness=-1.0)),
        ("sia-arena", "incentive=2", Sia(name="sia-arena", fairness=0.5, incentive=2.0)),
    ],
)
def test_each_parameter_reaches_its_scheduler(
    scheduler: str, text: str, same: PublishedScheduler
) -> None:
    assert make_scheduler(scheduler, text) == same


def test_a_round_records_its_parameters_and_its_reasons_name_them() -> None:
    record = decide(a_crowd(), "arena", "depth=1,breadth=8")
    assert record.summary.options["scheduler_parameters"] == "depth=1,breadth=8"
    assert record.summary.solver == "arena"
    (waits,) = (d for d in record.decisions if d.kind is DecisionKind.WAIT)
    assert waits.reason is not None
    assert "the scheduler arena (depth=1,breadth=8) gave the job no GPUs" in str(
        waits.reason.message
    )
