"""Options of a round on the command line: only the options that are given reach the call."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.formulation.codec import encode
from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import OBJECTIVES
from tessera.service.cli import limits, main
from tessera.service.cli.jobview import show_job
from tessera.service.cli.roundoptions.commands import override_options, round_options
from tessera.service.cli.roundoptions.objectives import CostOf, FairShareMeasure
from tessera.service.cli.roundoptions.order import DeadlineTreatment
from tessera.service.cli.roundview import show_replay, show_round
from tessera.service.cli.watch import CHANGING_FIELDS, changed_items
from tessera.service.rpc.convert import clusters, jobs, rounds, tenants
from tessera.solvers.rounds.plan import RoundOptions
from tessera.v1 import estimates_pb2, jobs_pb2, scheduler_pb2
from tests.support.builders import a_random_snapshot

EVERYTHING = {
    "objective": "deadline then jct",
    "scheduler": "arena",
    "scheduler_parameters": "depth=5,breadth=8",
    "raw_throughput": True,
    "queue_weights": "1:4",
    "restart_horizon": "2h",
    "max_restart_share": 0.5,
    "cost_of": CostOf.WATTS,
    "rate_floor": 0.25,
    "fairness_levels": 2,
    "caution": 1.5,
    "fair_share": FairShareMeasure.DRF,
    "fair_half_life": "12h",
    "replan_spacing": 40.0,
    "deadlines": DeadlineTreatment.MYOPIC,
    "round_length": "60s",
    "queue_order": True,
    "promote_after": "1h",
    "opportunistic": True,
    "reserve_after": "3h",
    "run_to_completion": True,
    "min_run": "10m",
    "max_changes": 3,
    "defragment_every": 0,
    "solver": "greedy",
    "gap": 0.01,
    "seed": 7,
    "solve_limit": "5s",
    "network_levels": 3,
    "network_floor": 0.2,
    "network_measure": "45s",
}


def test_every_option_reaches_the_call() -> None:
    options = rounds.to_options("options", round_options(**EVERYTHING))
    assert options == RoundOptions(
        objective="deadline then jct",
        scheduler="arena",
        scheduler_parameters="depth=5,breadth=8",
        raw_throughput=True,
        queue_weights="1:4",
        restart_horizon_s=7200.0,
        max_restart_share=0.5,
        cost_of="watts",
        rate_floor=0.25,
        fairness_levels=2,
        caution=1.5,
        fair_share="drf",
        fair_half_life_s=43200.0,
        replan_spacing=40.0,
        deadlines="myopic",
        round_s=60.0,
        queue_order=True,
        promote_after_s=3600.0,
        opportunistic=True,
        reserve_after_s=10800.0,
        run_to_completion=True,
        min_run_s=600.0,
        max_changes=3,
        defragment_every_rounds=0,
        solver="greedy",
        gap=0.01,
        seed=7,
        solve_limit_s=5.0,
        network_levels=3,
        network_floor=0.2,
        network_measure_s=45.0,
    )


def test_every_field_of_the_api_has_an_option() -> None:
    set_by_options = {known.name for known, _ in round_options(**EVERYTHING).ListFields()}
    assert set_by_options == set(scheduler_pb2.RoundOptions.DESCRIPTOR.fields_by_name)


def test_options_not_given_are_not_sent() -> None:
    assert round_options() == scheduler_pb2.RoundOptions()


def test_an_option_may_contradict_the_standing_policy() -> None:
    standing = RoundOptions(
        queue_order=True,
        promote_after_s=60.0,
        deadlines="myopic",
        max_changes=2,
        fair_share="gpus",
    )
    named = round_options(
        queue_order=False,
        promote_after="never",
        deadlines=DeadlineTreatment.AUTO,
        max_changes=-1,
        fair_share=FairShareMeasure.NONE,
    )
    assert rounds.to_options("options", named, standing) == RoundOptions()


def test_given_options_replace_recorded_ones() -> None:
    before = round_options(min_run="1500ms", objective="jct", queue_order=True)
    override_options(before, round_options(min_run="2s", queue_order=False))
    assert before == round_options(min_run="2s", objective="jct", queue_order=False)


def test_recorded_parameters_are_dropped_with_their_scheduler() -> None:
    recorded = {"scheduler": "arena", "scheduler_parameters": "depth=5"}
    kept, dropped = round_options(**recorded), round_options(**recorded)
    override_options(kept, round_options(scheduler="arena", seed=1))
    assert kept == round_options(**recorded, seed=1)
    override_options(dropped, round_options(scheduler="fcfs"))
    assert dropped == round_options(scheduler="fcfs")
    override_options(dropped, round_options(**recorded))
    assert dropped == round_options(**recorded)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--objective", "speed"],
            "error: --objective: 'speed' is not an objective; choose from throughput, deadline",
        ),
        (["--objective", "0*throughput"], "error: --objective: '0*throughput': all weights are 0"),
        (
            ["--objective", "max-min + jct"],
            "cannot be added to another objective; put them in order with 'then'",
        ),
        (["--queue-weights", "1"], "error: --queue-weights: '1' must be QUEUE:FACTOR"),
        (
            ["--scheduler", "arena", "--scheduler-parameters", "depth"],
            "error: --scheduler-parameters: 'depth' must be NAME=VALUE",
        ),
        (
            ["--scheduler", "arena", "--scheduler-parameters", "depth=1,depth=2"],
            "error: --scheduler-parameters: sets 'depth' twice",
        ),
        (["--promote-after", "soon"], "error: --promote-after: 'soon' is not a duration"),
        (["--min-run", "never"], "error: --min-run: 'never' is not a duration"),
        (["--deadlines", "strict"], "--deadlines"),
        (["--cost-of", "euros"], "--cost-of"),
        (["--max-changes", "-2"], "--max-changes"),
        (["--rate-floor", "1.5"], "--rate-floor"),
    ],
)
def test_an_invalid_option_is_refused_by_name_without_a_call(
    arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(main.app, ["round", "--server", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_help_of_a_round_names_every_objective() -> None:
    result = CliRunner().invoke(main.app, ["round", "--help"], env={"COLUMNS": "120"})
    assert all(name in result.stdout for name in OBJECTIVES)


def test_a_snapshot_is_solved_by_the_given_policy(tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    file.write_bytes(encode(a_random_snapshot(1, jobs=3)))
    named = ["--objective", "0.5*throughput + 0.5*jct", "--solver", "greedy"]
    result = CliRunner().invoke(main.app, ["solve", str(file), *named])
    assert result.exit_code == 0, result.stderr
    assert "0.5*throughput + 0.5*jct" in result.stdout
    wrong = CliRunner().invoke(main.app, ["solve", str(file), "--opportunistic"])
    assert wrong.exit_code == 2
    assert "options.opportunistic: needs queue_order; set that, too" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["depth=5"], "options.scheduler_parameters: needs a published scheduler; set scheduler"),
        (["dpeth=5", "--scheduler", "arena"], "no parameter 'dpeth'; did you mean 'depth'?"),
        (["depth=99", "--scheduler", "arena"], "depth must be a whole number from 0 to 16"),
        (["depth=5", "--scheduler", "fcfs"], "the scheduler fcfs has no parameters"),
    ],
)
def test_parameters_that_the_scheduler_does_not_accept_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "round.json"
    file.write_bytes(encode(a_random_snapshot(1, jobs=3)))
    result = CliRunner().invoke(
        main.app, ["solve", str(file), "--scheduler-parameters", *arguments]
    )
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_snapshot_is_solved_with_the_given_parameters(tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    file.write_bytes(encode(a_random_snapshot(1, jobs=3)))
    named = ["--scheduler", "arena", "--scheduler-parameters", "depth=5,breadth=8"]
    result = CliRunner().invoke(main.app, ["solve", str(file), *named], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.stderr
    assert "the published scheduler arena (depth=5,breadth=8)" in result.stdout


def test_the_clients_round_limits_equal_the_servers() -> None:
    assert limits.MAX_AVOIDED_NODES == jobs.MAX_AVOIDED
    assert limits.MAX_QUOTA == tenants.MAX_QUOTA
    assert limits.MAX_TENANT_WEIGHT == tenants.MAX_WEIGHT
    assert limits.MAX_DOLLARS_PER_HOUR == clusters.MAX_DOLLARS_PER_HOUR
    assert limits.MAX_WATTS == clusters.MAX_WATTS
    for name, most in (
        ("max_changes", limits.MAX_CHANGES),
        ("fairness_levels", limits.MAX_FAIRNESS_LEVELS),
    ):
        rounds.read_options("o", f"{name}: {most}")
        with pytest.raises(InvalidInput, match=f"o.{name}"):
            rounds.read_options("o", f"{name}: {most + 1}")


NOW = Timestamp(seconds=1_800_000_000)
SOON = Timestamp(seconds=NOW.seconds + 7200)


def a_dated_job(**changes: object) -> jobs_pb2.Job:
    job = jobs_pb2.Job(
        name="clusters/c/jobs/j",
        iterations=10,
        requested_gpus=8,
        deadline=SOON,
        workload=estimates_pb2.Workload(model="bert", params="1B", global_batch=8),
        state=jobs_pb2.QUEUED,
    )
    job.MergeFrom(jobs_pb2.Job(**changes))  # type: ignore[arg-type] # a test may set any field
    return job


def test_a_promised_deadline_is_shown_with_the_schedule_that_meets_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    legs = [
        jobs_pb2.Leg(
            start_time=NOW,
            end_time=Timestamp(seconds=NOW.seconds + 600),
            cell=estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2),
        )
    ]
    show_job(a_dated_job(deadline_admitted=True, certificate=legs), NOW)
    shown = capsys.readouterr()
    assert "2027-01-15T10:00:00Z, promised (schedule below)" in shown.out
    head, leg = shown.out.splitlines()[-2:]
    assert head.split() == ["START", "END", "FOR", "ON"]
    assert leg.split() == [
        "2027-01-15T08:00:00Z",
        "2027-01-15T08:10:00Z",
        "10m",
        "8",
        "x",
        "a100,",
        "pp",
        "2",
    ]


def test_a_refused_deadline_is_shown_with_the_earliest_possible_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = jobs_pb2.Reason(
        code="DEADLINE_REFUSED", message="m", evidence={"earliest_deadline": "2027-01-15T12:00:00Z"}
    )
    show_job(a_dated_job(reason=reason), NOW)
    assert (
        "2027-01-15T10:00:00Z, refused; the earliest that could be met is 2027-01-15T12:00:00Z"
        in capsys.readouterr().out
    )


def test_pins_service_and_opportunistic_starts_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = a_dated_job(
        requested_gpu_type="a100",
        pinned_gpu_type=True,
        avoid_nodes=["clusters/c/nodes/n7"],
        opportunistic=True,
        service_gpu_seconds=7200.0,
    )
    show_job(job, NOW)
    shown = capsys.readouterr().out
    assert "8 x a100, pinned to the type" in shown
    assert "n7" in shown
    assert "2 GPU-hours, started ahead of a blocked job" in shown
    assert "2027-01-15T10:00:00Z, not promised" in shown


def test_only_new_or_changed_jobs_are_shown_again() -> None:
    runs, ends = a_dated_job(state=jobs_pb2.RUNNING), a_dated_job(state=jobs_pb2.SUCCEEDED)
    runs_on = a_dated_job(state=jobs_pb2.RUNNING, service_gpu_seconds=7.0)
    lists = iter([[runs], [runs_on], [ends]])
    changes = changed_items(lambda: next(lists), CHANGING_FIELDS[:1], lambda: None)
    assert [next(changes), next(changes)] == [[runs], [ends]]


def a_round(**changes: object) -> scheduler_pb2.Round:
    record = scheduler_pb2.Round(
        name="clusters/c/rounds/3", status="optimal", outcome="committed", objective=2.5, bound=2.5
    )
    record.MergeFrom(scheduler_pb2.Round(**changes))  # type: ignore[arg-type] # likewise
    return record


def test_a_round_and_its_replay_show_the_parameters_of_the_scheduler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    deep, usual = (
        a_round(solver="arena", options=round_options(scheduler="arena", scheduler_parameters=text))
        for text in ("depth=5", "")
    )
    show_round(deep, everything=False, wide=False)
    assert "the published scheduler arena (depth=5)" in capsys.readouterr().out
    show_replay(deep, scheduler_pb2.ReplayRoundResponse(round=usual))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["solver", "arena", "(depth=5)", "arena"] in rows


def test_a_round_shows_its_goals_in_order_and_the_number_of_promised_deadlines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    goals = [
        scheduler_pb2.GoalResult(name="max-min", unit="GPU-s", objective=3, bound=2.5, gap=0.2),
        scheduler_pb2.GoalResult(name="throughput", unit="jobs", objective=2.5, bound=2.5),
    ]
    decisions = [
        scheduler_pb2.Decision(job="clusters/c/jobs/a", kind="start", admitted=True),
        scheduler_pb2.Decision(job="clusters/c/jobs/b", kind="start", opportunistic=True),
        scheduler_pb2.Decision(
            job="clusters/c/jobs/w", kind="wait", reason=jobs_pb2.Reason(code="DEADLINE_REFUSED")
        ),
    ]
    options = round_options(
        objective="max-min then throughput", queue_order=True, promote_after="2h"
    )
    show_round(
        a_round(goals=goals, decisions=decisions, options=options), everything=False, wide=False
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert ["max-min", "3", "2.5", "20", "%", "GPU-s"] in rows
    first, second = (
        k
        for k, row in enumerate(rows)
        if row[0] in ("max-min", "throughput") and row[-1] in ("GPU-s", "jobs")
    )
    assert first < second
    assert ["deadlines", "1", "promised,", "1", "refused"] in rows
    assert any("start (opportunistic)" in line for line in lines)
    assert any(
        line.endswith("max-min then throughput; queue order yes; promote after 2h")
        for line in lines
    )


def test_a_round_of_a_published_scheduler_has_no_bound_and_shows_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    endless = a_round(options=round_options(scheduler="fcfs"), bound=float("inf"), gap=float("inf"))
    show_round(endless, everything=False, wide=False)
    shown = capsys.readouterr().out
    assert "the published scheduler fcfs" in shown
    assert "no bound is known" in shown
    assert "greedy" not in shown


@pytest.mark.parametrize(
    ("greedy", "text"),
    [(8.0, "8 (2 less)"), (11.0, "11 (1 more, but worse in an earlier goal)")],
)
def test_greedy_is_compared_by_the_last_goal(
    greedy: float, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_round(a_round(objective=10.0, greedy_objective=greedy), everything=False, wide=False)
    assert text in capsys.readouterr().out
