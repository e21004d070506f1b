"""Tests of ``tessera simulate``, from a trace in files to the table, the log and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli.main import app
from tessera.service.cli.simulate import runs
from tessera.service.cli.simulate.runs import relative_differences
from tessera.service.cli.simulate.world import window_s
from tessera.simulator.data import data_dir

HEADER = "job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,gpu_type,deadline_s\n"
TWO = HEADER + "a,0,bert,1.3B,256,2000,4,a100,1300\nb,300,bert,1.3B,256,2000,4,a100,900\n"
BAD = TWO + (
    "zero,400,bert,1.3B,256,0,4,a100,\n"
    "what,500,gpt9,1T,256,2000,4,a100,\n"
    "wide,600,bert,1.3B,256,2000,64,a100,\n"
    "odd,700,bert,1.3B,256,2000,3,a100,\n"
)
DURATIONS = "job_id,submit_time_s,duration_s,num_gpus\nd1,0,3600,1\nd2,100,7200,4\n"
PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status
bert,1.3B,256,a100,1,1,2.0,ok
bert,1.3B,256,a100,1,4,0.6,ok
"""
SMALL = ("--nodes", "a100=1x4")
FREE = ("--overheads", "none", "--policy", "fcfs")

Simulate = Callable[..., Result]


def run_simulate(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    """Return a function that runs the command on a trace and the profiles of this file."""
    profiles = tmp_path / "profiles.csv"
    profiles.write_text(PROFILES)

    def run(text: str, *options: str, code: int = 0) -> Result:
        trace = tmp_path / "trace.csv"
        trace.write_text(text)
        return run_simulate(str(trace), "--profiles", str(profiles), *options, code=code)

    return run


def parse_stdout(done: Result) -> Any:
    """Return the JSON on stdout, which must contain nothing else."""
    return json.loads(done.stdout)


def test_the_figures_are_those_computed_by_hand(simulate: Simulate) -> None:
    report = parse_stdout(simulate(TWO, *SMALL, *FREE, "--json"))
    (fcfs,) = report["policies"]
    assert fcfs["policy"] == "fcfs"
    assert fcfs["completed"] == report["jobs"] == 2
    assert fcfs["jct_mean_s"] == pytest.approx(
        (1200 + 2100) / 2
    )  # b begins when a ends, at 1,200 s
    assert fcfs["queue_mean_s"] == pytest.approx(900 / 2)
    assert (fcfs["deadlines_met"], fcfs["deadlines"]) == (1, 2)
    assert report["warnings"] == []


def test_starts_are_charged_and_iterations_divided_as_requested(simulate: Simulate) -> None:
    text = TWO.replace("iterations", "num_iterations")
    report = parse_stdout(simulate(text, *SMALL, "--policy", "fcfs", "--json"))
    assert report["policies"][0]["jct_p50_s"] == pytest.approx(
        ((240 + 129) + (240 + 300 + 129)) / 2
    )
    whole = parse_stdout(simulate(text, *SMALL, *FREE, "--divide-iterations", "1", "--json"))
    assert whole["policies"][0]["jct_mean_s"] == pytest.approx(1650)


def test_a_row_is_printed_for_each_policy_and_progress_goes_to_stderr(simulate: Simulate) -> None:
    done = simulate(TWO, *SMALL, "--policy", "fcfs", "--policy", "ilp:jct", "--policy", "fcfs")
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["fcfs", "2/2"] in rows
    assert ["ilp:jct", "2/2"] in rows
    assert "DEADLINES MET" in done.stdout
    assert "4 GPUs on 1 nodes: 4 a100" in done.stdout
    assert done.stderr.splitlines() == ["1/2 fcfs", "2/2 ilp:jct"]


def test_without_a_trace_synthetic_jobs_run_on_the_tiny_cluster() -> None:
    options = ("--jobs", "5", "--policy", "fcfs", "--on-events", "--json")
    report = parse_stdout(run_simulate(*options, "--seed", "1"))
    assert (report["trace"], report["gpus"], report["jobs"]) == ("synthetic", 64, 5)
    assert report["policies"][0]["completed"] == 5
    again, other = (
        parse_stdout(run_simulate(*options, "--seed", "1")),
        parse_stdout(run_simulate(*options, "--seed", "2")),
    )
    times = [run["policies"][0]["jct_mean_s"] for run in (report, again, other)]
    assert times[0] == times[1] != times[2]


def test_bad_jobs_are_refused_by_default_with_all_reasons(simulate: Simulate) -> None:
    refused = simulate(BAD, *SMALL, code=2).stderr
    for text in ("zero (0 iterations)", "what (gpt9 1T 256)", "wide (64 a100)", "odd (bert 1.3B"):
        assert text in refused


def test_bad_jobs_are_dropped_on_request_and_counted(simulate: Simulate) -> None:
    done = simulate(BAD, *SMALL, *FREE, "--on-bad", "drop", "--json")
    report = parse_stdout(done)
    assert report["jobs"] == 2
    assert sorted(job["job"] for job in report["dropped"]) == ["odd", "what", "wide", "zero"]
    assert done.stderr.count("warning: dropped 1 job with") == 4
    assert report["policies"][0]["jct_mean_s"] == pytest.approx(1650)


def test_a_cluster_too_small_for_every_job_is_reported(simulate: Simulate) -> None:
    small = ("--nodes", "a100=1x2")
    assert "2 jobs with more GPUs than the cluster has of the type" in (
        simulate(TWO, *small, code=2).stderr
    )
    dropped = simulate(TWO, *small, "--on-bad", "drop", code=2).stderr
    assert dropped == "error: trace: has no jobs left\n"


def test_jobs_that_could_never_start_are_named(simulate: Simulate) -> None:
    quota = ("--guaranteed", "1", "--quota", "2", "--on-events")
    done = simulate(TWO, *SMALL, *quota, "--policy", "ilp:jct", "--json")
    assert "warning: ilp:jct: stuck after 7d: nothing would ever start 2 jobs: a, b" in done.stderr
    (policy,) = parse_stdout(done)["policies"]
    assert policy["stuck_jobs"] == ["a", "b"]
    assert policy["jct_mean_s"] is None


def test_jct_is_averaged_over_jobs_finished_under_all_policies_that_finished_any(
    simulate: Simulate,
) -> None:
    one_late = TWO.replace(",1300", ",1").replace(",900\n", ",9000\n")
    both_late = TWO.replace(",1300", ",1").replace(",900\n", ",301\n")
    policies = ("--policy", "edf", "--policy", "srt", "--on-events", "--overheads", "none")

    def rows(text: str, noted: bool) -> list[list[str]]:
        shown = simulate(text, *SMALL, *policies).stdout
        assert ("over the 1 job that all policies finished" in shown) == noted
        return [line.split()[1:3] for line in shown.splitlines()[-2:]]

    # Of both jobs, only b counts.
    assert rows(one_late, noted=True) == [["1/2", "20m"], ["2/2", "35m"]]
    assert rows(both_late, noted=False) == [["0/2", "-"], ["2/2", "27m"]]


def test_jobs_cut_off_by_a_horizon_are_counted(simulate: Simulate) -> None:
    late = TWO + "c,9000,bert,1.3B,256,2000,4,a100,\n"
    done = simulate(late, *SMALL, *FREE, "--horizon", "30m", "--json")
    (policy,) = parse_stdout(done)["policies"]
    assert (policy["completed"], policy["ended_s"]) == (1, 1800)
    assert "1 job of 3 arrive after the horizon" in done.stderr
    assert "fcfs: not finished at the horizon of 30m: 1 job: b" in done.stderr


def test_runs_are_logged_replayed_reported_and_saved(simulate: Simulate, tmp_path: Path) -> None:
    log, results, folder = (tmp_path / name for name in ("log.jsonl", "results.json", "report"))
    done = simulate(
        TWO,
        *SMALL,
        "--policy",
        "fcfs",
        "--policy",
        "ilp:jct",
        "--replay",
        "--log",
        str(log),
        "--results",
        str(results),
        "--report",
        str(folder),
    ).stderr
    for policy in ("fcfs", "ilp:jct"):
        assert f"{policy}: the executor confirms all 2 completion times" in done
    for k in (1, 2):
        lines = (tmp_path / f"log-{k}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["name"] for row in rows if row["kind"] == "job"] == ["a", "b"]
    assert not log.exists()
    fcfs, ilp = json.loads(results.read_text())["policies"]
    assert [outcome["state"] for outcome in fcfs["outcomes"]] == ["succeeded"] * 2
    assert ilp["replay"]["wrong"] == ""
    assert "GPUs over time under ilp:jct" in (folder / "report.html").read_text()
    assert len(list(folder.glob("*.png"))) >= 7


def test_an_executor_with_different_times_fails_the_command(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "replay_lines", lambda _lines: {"a": 1200.0, "b": 2000.0})
    failed = simulate(TWO, *SMALL, *FREE, "--replay", code=1).stderr
    assert "fcfs: the executor disagrees: b takes 2000 s in the executor, but 2100 s here" in failed


def test_a_trace_of_durations_runs_once_its_models_are_drawn(simulate: Simulate) -> None:
    assert "--redraw: is required" in simulate(DURATIONS, *SMALL, code=2).stderr
    report = parse_stdout(simulate(DURATIONS, *SMALL, *FREE, "--redraw", "--json"))
    assert report["policies"][0]["completed"] == 2


def test_failures_and_wrong_estimates_are_drawn_by_the_seed(simulate: Simulate) -> None:
    hard = (*SMALL, *FREE, "--failures", "10m", "--stragglers", "30m", "--error", "0.2", "--json")
    report = parse_stdout(simulate(TWO, *hard, "--replay"))
    assert report["failures"] > 0
    assert report["policies"][0]["jct_mean_s"] > 1650
    assert report["policies"][0]["replay"]["wrong"] == ""
    again = parse_stdout(simulate(TWO, *hard))
    assert again["policies"][0]["jct_mean_s"] == report["policies"][0]["jct_mean_s"]
    other = parse_stdout(simulate(TWO, *hard, "--seed", "5"))
    assert other["policies"][0]["jct_mean_s"] != report["policies"][0]["jct_mean_s"]


def test_cost_is_minimised_once_gpus_have_prices(simulate: Simulate) -> None:
    priced = ("--policy", "ilp:cost", "--price", "a100=3.5", "--json")
    (cost,) = parse_stdout(simulate(TWO, *SMALL, *priced))["policies"]
    assert (cost["completed"], cost["stuck_jobs"]) == (2, [])


def test_gpus_without_profiles_are_named(simulate: Simulate) -> None:
    done = simulate(TWO, *SMALL, "--nodes", "tpu=2x4", *FREE)
    assert "warning: no profile is for tpu, so these GPUs stay idle" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "fifo"), "policies: unknown policy 'fifo'; use one of fcfs"),
        (("--policy", "ilp:speed"), "'speed' is not an objective; choose from throughput"),
        (("--policy", "ilp:jct@x=1"), "'x=1' is not an option of a round"),
        (
            ("--policy", "ilp:throughput then cost"),
            "--price: is required by ilp:throughput then cost",
        ),
        (("--policy", "ilp:cost@cost_of=watts"), "--policy: ilp:cost@cost_of=watts counts watts"),
        (("--price", "a100=free"), "--price: must be a GPU type and a positive number"),
        (("--price", "tpu=1"), "--price: names tpu, which the cluster lacks"),
        (("--cluster", "moon"), "cluster: unknown 'moon'; use one of arena-1280"),
        (
            ("--cluster", "tiny", "--nodes", "a100=1x4"),
            "--cluster: cannot be combined with --nodes",
        ),
        (("--nodes", "a100=4"), "--nodes: 'a100=4': name each GPU type once, as in a100=80x4"),
        (("--nodes", "tpu=1x4"), "--profiles: is required, because samples exist only for a10"),
        (("--overheads", "cheap"), "overheads: unknown 'cheap'; use one of default"),
        (("--horizon", "soon"), "--horizon: 'soon' is not a duration"),
        (("--round", "0"), "--round: must be longer than 0"),
        (("--failures", "0s"), "--failures: must be longer than 0"),
        (("--log", "absent/log.jsonl"), "absent/log.jsonl: cannot be written, because its folder"),
        (("absent.csv",), "absent.csv: cannot be read: No such file or directory"),
        (("absent.csv", "--jobs", "3"), "--jobs: is only for synthetic jobs"),
    ],
)
def test_an_invalid_option_is_one_line_of_error_and_exit_code_2(
    options: tuple[str, ...], message: str
) -> None:
    refused = run_simulate(*options, code=2).stderr
    assert message in refused
    assert len(refused.splitlines()) == 1


def test_a_trace_needs_profiles_and_a_cluster(tmp_path: Path) -> None:
    trace, profiles = tmp_path / "trace.csv", tmp_path / "profiles.csv"
    trace.write_text(TWO)
    assert "--profiles: is required" in run_simulate(str(trace), *SMALL, code=2).stderr
    profiles.write_text(PROFILES)
    named = (str(trace), "--profiles", str(profiles))
    assert "--cluster, --nodes: one is required" in run_simulate(*named, code=2).stderr
    profiles.write_text(PROFILES.replace("2.0", "0"))
    assert (
        "profiles.csv line 2, column iter_time_s: must be"
        in run_simulate(*named, *SMALL, code=2).stderr
    )


def test_a_published_trace_includes_its_cluster_and_needs_the_data_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if data_dir() is not None:
        options = ("--on-bad", "drop", "--limit", "5", "--horizon", "1h", "--on-events", "--json")
        report = parse_stdout(run_simulate("arena-testbed-a", "--policy", "fcfs", *options))
        assert (report["gpus"], report["jobs"], len(report["dropped"])) == (64, 5, 25)
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "absent"))
    assert "set TESSERA_DATA" in run_simulate("arena-testbed-a", code=2).stderr


def test_throughput_is_measured_during_arrivals_or_until_the_first_policy_finishes() -> None:
    never = math.inf
    assert window_s(1000.0, 300.0, [5000.0, 4000.0], never) == 1200.0
    assert window_s(300.0, 300.0, [5000.0, 4000.0], never) == 4000.0
    assert window_s(0.0, 300.0, [90.0], never) == 300.0
    assert window_s(1000.0, 300.0, [5000.0], 700.0) == 700.0


def test_completion_times_differ_relatively_or_infinitely_if_one_is_missing() -> None:
    left, right = np.array([100.0, math.inf, 5.0]), np.array([110.0, math.inf, math.inf])
    assert relative_differences(left, right).tolist() == [pytest.approx(10 / 110), 0.0, math.inf]
