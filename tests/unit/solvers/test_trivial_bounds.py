"""Bounds that were not proven are marked as trivial, and their gaps are not shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.db.base.documents import summary_from, summary_json
from tessera.formulation.answer.codec import encode
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.cli import main
from tessera.service.cli.demo.command import _gap
from tessera.service.cli.rounds.roundview import (
    compare_with_recorded_bound,
    format_gap,
    round_columns,
    show_replay,
)
from tessera.service.server.convert.rounds import of_summary
from tessera.service.server.rounds.deciding import decide_again
from tessera.simulator.metrics import worst_gap
from tessera.simulator.run import RoundRow
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of
from tessera.v1 import scheduler_pb2
from tests.support.builders import a_random_snapshot
from tests.support.summaries import a_summary

FOREVER = Budget(remaining_s=lambda: math.inf)
CROWDED = a_random_snapshot(1, jobs=20)
HARD_FOR_GREEDY = a_random_snapshot(1, jobs=7)
IN_ORDER = "max-min then throughput within 5% then jct"


def plan_snapshot(
    name: str = "portfolio",
    objective: str = "throughput",
    scheduler: str = "",
    snapshot: Snapshot = CROWDED,
    budget: Budget = FOREVER,
) -> RoundOutcome:
    return plan_round(
        snapshot,
        Policy(objective=objective),
        make_solver(name),
        budget,
        scheduler=scheduler_of(scheduler),
    )


def decide_round(snapshot: Snapshot = CROWDED, **options: Any) -> scheduler_pb2.Round:
    chosen = RoundOptions(**options)
    record = decide_again(
        snapshot, chosen, SystemClock(), remaining_s=lambda: 60.0, cancelled=lambda: False
    )
    return of_summary(record.summary)


@pytest.mark.parametrize("objective", ["throughput", "jct", IN_ORDER, "makespan"])
def test_greedy_proves_no_bound_on_a_crowded_cluster(objective: str) -> None:
    outcome = plan_snapshot("greedy", objective)

    assert outcome.bound_is_trivial
    assert any(goal.bound_is_trivial for goal in outcome.goals)


@pytest.mark.parametrize("name", ["portfolio", "cp-sat", "pricing", "lp"])
def test_a_solver_that_computes_a_bound_reports_one(name: str) -> None:
    assert not plan_snapshot(name).bound_is_trivial


def test_a_portfolio_without_time_proves_no_bound() -> None:
    late = plan_snapshot(budget=Budget(remaining_s=lambda: 0.0))

    assert late.bound_is_trivial
    assert plan_snapshot(
        objective=IN_ORDER, budget=Budget(remaining_s=lambda: 0.0)
    ).bound_is_trivial


def test_a_stored_summary_reads_back() -> None:
    goals = (
        GoalResult(name="t", unit="", objective=1.0, bound=9.0, gap=0.9, bound_is_trivial=True),
        GoalResult(name="u", unit="", objective=1.0, bound=math.inf, gap=0.9, proved_by="levels"),
    )
    for summary in (
        a_summary(goals=goals, bound_is_trivial=True, status="feasible", failures=("lp",)),
        a_summary(promises_due_s=9.0, proved_by="prices", has_certificate=True, policy_version=2),
    ):
        assert summary_from(json.loads(summary_json(summary))) == summary


# displayed gaps


@pytest.mark.parametrize("objective", ["throughput", IN_ORDER])
@pytest.mark.parametrize("by", [["--solver", "greedy"], ["--scheduler", "fcfs"]])
def test_no_view_shows_the_gap_to_a_trivial_bound(
    by: list[str], objective: str, tmp_path: Path
) -> None:
    file = tmp_path / "round.json"
    file.write_bytes(encode(CROWDED))

    done = CliRunner().invoke(
        main.app, ["solve", str(file), *by, "--objective", objective], env={"COLUMNS": "200"}
    )

    assert done.exit_code == 0, done.stderr
    assert "%" not in done.stdout.replace("5%", "")
    assert f"no bound is proven, because {by[1]} does not compute one" in done.stdout


def test_the_list_of_rounds_shows_no_gap_and_no_bound_unless_proven() -> None:
    value = decide_round(solver="greedy")
    columns = {column.title: column.value for column in round_columns(Timestamp())}

    assert (columns["GAP"](value), columns["BOUND"](value)) == ("?", "?")
    assert _gap(value) == "?"
    assert columns["GAP"](decide_round()) == format_gap(decide_round()) != "?"


@pytest.mark.parametrize("by", [{"solver": "greedy"}, {"scheduler": "fcfs"}, {}])
def test_json_has_no_infinite_numbers(by: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    file.write_bytes(encode(CROWDED))
    named = [part for name, value in by.items() for part in (f"--{name}", value)]

    done = CliRunner().invoke(main.app, ["solve", str(file), *named, "--output", "json"])

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    shown = json.loads(done.stdout, parse_constant=refuse)
    assert shown["bound_is_trivial"] is bool(by)


# a replay compared with the recorded round


def test_a_replay_by_greedy_is_compared_with_the_recorded_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = decide_round(HARD_FOR_GREEDY)
    again = decide_round(HARD_FOR_GREEDY, solver="greedy")
    short_of = 100 * (before.bound - again.objective) / before.bound

    show_replay(before, scheduler_pb2.ReplayRoundResponse(round=again))

    shown = capsys.readouterr().out
    assert f"the replayed solution is {short_of:.3g} % short of the recorded round's bound" in shown
    assert 0 < short_of < 10
    assert f"{100 * again.gap:.3g} %" not in shown


def test_a_replay_of_another_problem_is_not_compared() -> None:
    before, again = decide_round(), decide_round(solver="greedy")
    assert compare_with_recorded_bound(before, again)

    for other in (
        decide_round(solver="greedy", objective="jct"),
        decide_round(scheduler="fcfs"),
        decide_round(solver="greedy", keep_requests=False),
    ):
        assert not compare_with_recorded_bound(before, other)
    newer = decide_round(solver="greedy")
    newer.versions.append("tessera 99")
    assert not compare_with_recorded_bound(before, newer)
    assert not compare_with_recorded_bound(
        decide_round(objective="deadline"), decide_round(solver="greedy", objective="deadline")
    )
    assert not compare_with_recorded_bound(again, again)  # neither has a bound
    # it has a bound of its own
    assert not compare_with_recorded_bound(before, decide_round(seed=1))


def test_the_worst_gap_of_a_run_includes_only_proven_gaps() -> None:
    proven = RoundRow(
        at_s=0.0,
        decide_s=0.0,
        objective=1.0,
        gap=0.01,
        running=0,
        waiting=0,
        gpus=0,
        changed=0,
        suspended=0,
    )
    trivial = replace(proven, gap=0.7, bound_is_trivial=True)

    assert worst_gap([proven, trivial]) == 0.01
    assert math.isnan(worst_gap([trivial]))
    assert worst_gap([]) == 0.0
