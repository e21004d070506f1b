"""``tessera simulate`` and ``tessera import trace`` on files: their figures, files and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli.main import app
from tessera.service.cli.simulation import runs
from tessera.service.cli.simulation.runs import relative_differences
from tessera.service.cli.simulation.world import window_s
from tessera.simulator.data import data_dir
from tessera.simulator.traces.trace import read_trace

HEADER = "job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,gpu_type,deadline_s\n"
TWO = HEADER + "a,0,bert,1.3B,256,2000,4,a100,1300\nb,300,bert,1.3B,256,2000,4,a100,900\n"
BAD_OF_TWO = TWO + (
    "zero,400,bert,1.3B,256,0,4,a100,\n"
    "what,500,gpt9,1T,256,2000,4,a100,\n"
    "wide,600,bert,1.3B,256,2000,64,a100,\n"
    "odd,700,bert,1.3B,256,2000,3,a100,\n"
)
FOUR = HEADER.replace("iterations", "num_iterations") + (
    "t1,0,bert,1.3B,256,50000,1,a100,90000\n"
    "t2,3600,bert,6.7B,256,5000,4,a100,\n"
    "t3,7200,bert,1.3B,256,20000,4,a100,\n"
    "t4,7300,bert,1.3B,256,20000,1,a100,\n"
)
BAD_OF_FOUR = FOUR + (
    "t4,7400,bert,1.3B,256,20000,1,a100,\n"
    "zero,7500,bert,1.3B,256,0,1,a100,\n"
    "what,7600,gpt9,1T,256,20000,1,a100,\n"
    "late,10,bert,1.3B,256,20000,1,a100,\n"
    "wide,7700,bert,1.3B,256,20000,64,a100,\n"
)
DURATIONS = "job_id,submit_time_s,duration_s,num_gpus\nd1,100,3600,1\nd2,0,7200,4\nd3,160,0,1\n"
PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status
bert,1.3B,256,a100,1,1,2.0,ok
bert,1.3B,256,a100,1,4,0.6,ok
bert,6.7B,256,a100,1,4,3.0,ok
bert,6.7B,256,v100,1,4,6.0,ok
"""
SMALL = "--nodes a100=1x4"
FREE = "--overheads none --policy fcfs"


def run_command(command: str, code: int = 0) -> Result:
    """Run a command without a server; a failure has one line of error at the end."""
    done = CliRunner().invoke(app, command.split(), env={"TESSERA_SERVER": "127.0.0.1:1"})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done


class Files:
    """A folder with a trace and its profiles, and the commands that read them."""

    def __init__(self, folder: Path) -> None:
        self.trace, self.profiles, self.out = (
            folder / name for name in ("trace.csv", "profiles.csv", "out.csv")
        )
        self.profiles.write_text(PROFILES)

    def simulate(self, text: str, options: str, code: int = 0) -> Result:
        self.trace.write_text(text)
        return run_command(f"simulate {self.trace} --profiles {self.profiles} {options}", code)

    def report(self, text: str, options: str) -> Any:
        """Return the JSON of a simulation, which must be all of stdout."""
        return json.loads(self.simulate(text, f"{options} --json").stdout)

    def shape(self, text: str, options: str = "", code: int = 0, target: bool = True) -> Result:
        """Import a trace into a file, for a cluster unless ``target`` is false."""
        self.trace.write_text(text)
        about = f"--profiles {self.profiles} --nodes a100=2x4" if target else ""
        return run_command(f"import trace {self.trace} --to {self.out} {about} {options}", code)

    def names(self) -> list[str]:
        """Return the names of the jobs that were written."""
        return [arrival.spec.name for arrival in read_trace(self.out)]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def facts_of(result: Result) -> dict[str, str]:
    """Return the facts of a trace that were printed, by name."""
    words = (line.split() for line in result.stdout.splitlines() if line)
    return {name: " ".join(rest) for name, *rest in words}


def test_the_figures_are_those_computed_by_hand(files: Files) -> None:
    report = files.report(TWO, f"{SMALL} {FREE}")
    (fcfs,) = report["policies"]
    assert fcfs["policy"] == "fcfs"
    assert fcfs["completed"] == report["jobs"] == 2
    # b begins when a ends, at 1,200 s
    assert fcfs["jct_mean_s"] == pytest.approx((1200 + 2100) / 2)
    assert fcfs["queue_mean_s"] == pytest.approx(900 / 2)
    assert (fcfs["deadlines_met"], fcfs["deadlines"]) == (1, 2)
    assert report["warnings"] == []
    divided = TWO.replace("iterations", "num_iterations")
    (charged,) = files.report(divided, f"{SMALL} --policy fcfs")["policies"]
    assert charged["jct_p50_s"] == pytest.approx(((240 + 129) + (240 + 300 + 129)) / 2)
    (whole,) = files.report(divided, f"{SMALL} {FREE} --divide-iterations 1")["policies"]
    assert whole["jct_mean_s"] == pytest.approx(1650)


def test_a_row_is_printed_for_each_policy_and_progress_goes_to_stderr(files: Files) -> None:
    done = files.simulate(TWO, f"{SMALL} --policy fcfs --policy ilp:jct --policy fcfs")
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["fcfs", "2/2"] in rows
    assert ["ilp:jct", "2/2"] in rows
    assert "DEADLINES MET" in done.stdout
    assert "4 GPUs on 1 nodes: 4 a100" in done.stdout
    assert done.stderr.splitlines() == ["1/2 fcfs", "2/2 ilp:jct"]


@pytest.mark.full
def test_without_a_trace_synthetic_jobs_run_on_the_tiny_cluster() -> None:
    command = "simulate --jobs 5 --policy fcfs --on-events --json --seed 1"
    report = json.loads(run_command(command).stdout)
    assert [report[key] for key in ("trace", "gpus", "jobs")] == ["synthetic", 64, 5]
    assert report["policies"][0]["completed"] == 5


def test_bad_jobs_are_refused_by_default_and_dropped_on_request(files: Files) -> None:
    refused = files.simulate(BAD_OF_TWO, SMALL, code=2).stderr
    for text in ("zero (0 iterations)", "what (gpt9 1T 256)", "wide (64 a100)", "odd (bert 1.3B"):
        assert text in refused
    report = files.report(BAD_OF_TWO, f"{SMALL} {FREE} --on-bad drop")
    assert sorted(job["job"] for job in report["dropped"]) == ["odd", "what", "wide", "zero"]
    assert report["policies"][0]["jct_mean_s"] == pytest.approx(1650)
    small = "--nodes a100=1x2"
    assert "2 jobs with more GPUs than the cluster has of the type" in (
        files.simulate(TWO, small, code=2).stderr
    )
    dropped = files.simulate(TWO, f"{small} --on-bad drop", code=2).stderr
    assert dropped == "error: trace: has no jobs left\n"


def test_jobs_that_could_never_start_and_gpus_without_profiles_are_named(files: Files) -> None:
    quota = "--guaranteed 1 --quota 2 --on-events --policy ilp:jct --json"
    done = files.simulate(TWO, f"{SMALL} {quota}")
    assert "warning: ilp:jct: stuck after 7d: nothing would ever start 2 jobs: a, b" in done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    assert (policy["stuck_jobs"], policy["jct_mean_s"]) == (["a", "b"], None)
    idle = files.simulate(TWO, f"{SMALL} --nodes tpu=2x4 {FREE}")
    assert "warning: no profile is for tpu, so these GPUs stay idle" in idle.stderr


def test_jct_is_averaged_over_jobs_finished_under_all_policies_that_finished_any(
    files: Files,
) -> None:
    one_late = TWO.replace(",1300", ",1").replace(",900\n", ",9000\n")
    both_late = TWO.replace(",1300", ",1").replace(",900\n", ",301\n")

    def rows(text: str, noted: bool) -> list[list[str]]:
        policies = "--policy edf --policy srt --on-events --overheads none"
        shown = files.simulate(text, f"{SMALL} {policies}").stdout
        assert ("over the 1 job that all policies finished" in shown) == noted
        return [line.split()[1:3] for line in shown.splitlines()[-2:]]

    # Of both jobs, only b counts.
    assert rows(one_late, noted=True) == [["1/2", "20m"], ["2/2", "35m"]]
    assert rows(both_late, noted=False) == [["0/2", "-"], ["2/2", "27m"]]


def test_jobs_cut_off_by_a_horizon_are_counted_and_hazards_replay(files: Files) -> None:
    late = TWO + "c,9000,bert,1.3B,256,2000,4,a100,\n"
    hard = f"{SMALL} {FREE} --failures 10m --stragglers 30m --error 0.2 --replay"
    report = files.report(TWO, hard)
    assert report["failures"] > 0
    assert report["policies"][0]["replay"]["wrong"] == ""
    done = files.simulate(late, f"{SMALL} {FREE} --horizon 30m --json")
    (policy,) = json.loads(done.stdout)["policies"]
    assert (policy["completed"], policy["ended_s"]) == (1, 1800)
    assert "1 job of 3 arrive after the horizon" in done.stderr
    assert "fcfs: not finished at the horizon of 30m: 1 job: b" in done.stderr


@pytest.mark.full
def test_runs_are_logged_replayed_reported_and_saved(files: Files, tmp_path: Path) -> None:
    log, results, folder = (tmp_path / name for name in ("log.jsonl", "results.json", "report"))
    kept = f"--replay --log {log} --results {results} --report {folder} --price a100=3.5"
    done = files.simulate(TWO, f"{SMALL} --policy fcfs --policy ilp:cost {kept}").stderr
    for policy in ("fcfs", "ilp:cost"):
        assert f"{policy}: the executor confirms all 2 completion times" in done
    for k in (1, 2):
        lines = (tmp_path / f"log-{k}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["name"] for row in rows if row["kind"] == "job"] == ["a", "b"]
    assert not log.exists()
    fcfs, ilp = json.loads(results.read_text())["policies"]
    assert [outcome["state"] for outcome in fcfs["outcomes"]] == ["succeeded"] * 2
    assert ilp["replay"]["wrong"] == ""
    assert "GPUs over time under ilp:cost" in (folder / "report.html").read_text()


def test_an_executor_with_different_times_fails_the_command(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "replay_lines", lambda _lines: {"a": 1200.0, "b": 2000.0})
    failed = files.simulate(TWO, f"{SMALL} {FREE} --replay", code=1).stderr
    assert "fcfs: the executor disagrees: b takes 2000 s in the executor, but 2100 s here" in failed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy fifo", "policies: unknown policy 'fifo'; use one of fcfs"),
        ("--policy ilp:jct@x=1", "'x=1' is not an option of a round"),
        ("--policy ilp:cost", "--price: is required by ilp:cost"),
        ("--policy ilp:cost@cost_of=watts", "--policy: ilp:cost@cost_of=watts counts watts"),
        ("--price a100=free", "--price: must be a GPU type and a positive number"),
        ("--price tpu=1", "--price: names tpu, which the cluster lacks"),
        ("--cluster moon", "cluster: unknown 'moon'; use one of arena-1280"),
        ("--cluster tiny --nodes a100=1x4", "--cluster: cannot be combined with --nodes"),
        ("--nodes a100=4", "--nodes: 'a100=4': name each GPU type once, as in a100=80x4"),
        ("--nodes tpu=1x4", "--profiles: is required, because samples exist only for a10"),
        ("--overheads cheap", "overheads: unknown 'cheap'; use one of default"),
        ("--horizon soon", "--horizon: 'soon' is not a duration"),
        ("--round 0", "--round: must be longer than 0"),
        ("--log absent/log.jsonl", "absent/log.jsonl: cannot be written, because its folder"),
        ("absent.csv", "absent.csv: cannot be read: No such file or directory"),
        ("absent.csv --jobs 3", "--jobs: is only for synthetic jobs"),
    ],
)
def test_an_invalid_option_is_one_line_of_error_and_exit_code_2(options: str, message: str) -> None:
    refused = run_command(f"simulate {options}", code=2).stderr
    assert message in refused
    assert len(refused.splitlines()) == 1


def test_a_trace_needs_profiles_and_a_cluster(files: Files) -> None:
    files.trace.write_text(TWO)
    alone = run_command(f"simulate {files.trace} {SMALL}", code=2)
    assert "--profiles: is required" in alone.stderr
    assert "--cluster, --nodes: one is required" in files.simulate(TWO, "", code=2).stderr
    files.profiles.write_text(PROFILES.replace("2.0", "0"))
    wrong = files.simulate(TWO, SMALL, code=2).stderr
    assert "profiles.csv line 2, column iter_time_s: must be" in wrong


def test_a_published_trace_includes_its_cluster_and_needs_the_data_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = "simulate arena-testbed-a --policy fcfs"
    if data_dir() is not None:
        options = "--on-bad drop --limit 5 --horizon 1h --on-events --json"
        report = json.loads(run_command(f"{command} {options}").stdout)
        assert (report["gpus"], report["jobs"], len(report["dropped"])) == (64, 5, 25)
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "absent"))
    assert "set TESSERA_DATA" in run_command(command, code=2).stderr


def test_throughput_is_measured_during_arrivals_or_until_the_first_policy_finishes() -> None:
    never = math.inf
    assert window_s(1000.0, 300.0, [5000.0, 4000.0], never) == 1200.0
    assert window_s(300.0, 300.0, [5000.0, 4000.0], never) == 4000.0
    assert window_s(0.0, 300.0, [90.0], never) == 300.0
    assert window_s(1000.0, 300.0, [5000.0], 700.0) == 700.0


def test_completion_times_differ_relatively_or_infinitely_if_one_is_missing() -> None:
    left, right = np.array([100.0, math.inf, 5.0]), np.array([110.0, math.inf, math.inf])
    assert relative_differences(left, right).tolist() == [pytest.approx(10 / 110), 0.0, math.inf]


def test_a_traces_facts_are_printed_and_it_is_written_without_a_server(files: Files) -> None:
    result = files.shape(FOUR)
    facts = facts_of(result)
    assert facts["jobs"] == "4"
    assert facts["GPU-hours"] == "13.78"  # 20,000 + 12,000 + 9,600 + 8,000 GPU-seconds
    assert facts["load"] == "0.849 of 8 GPUs"  # over 7,300 s
    assert facts["deadlines"] == "1"
    rows = [line.split()[:4] for line in result.stdout.splitlines() if line.startswith("bert")]
    assert rows == [["bert", "1.3B", "3", "75.0"], ["bert", "6.7B", "1", "25.0"]]
    assert "4 jobs written to" in result.stderr
    assert read_trace(files.out) == read_trace(files.trace)


def test_bad_jobs_of_an_import_are_refused_by_default_and_dropped_on_request(files: Files) -> None:
    refused = files.shape(BAD_OF_FOUR, code=2).stderr
    for text in (
        "1 job with the name of an earlier job: t4",
        "1 job with no iterations",
        "zero",
        "what (gpt9 1T 256)",
        "wide (64 a100)",
    ):
        assert text in refused
    assert "late" not in refused  # jobs are sorted by default
    assert not files.out.exists()
    assert "late" in files.shape(BAD_OF_FOUR, "--on-bad refuse", code=2).stderr
    result = files.shape(BAD_OF_FOUR, "--on-bad drop")
    assert facts_of(result)["dropped"] == "4"
    assert "listed after a job that arrives later: late" in result.stderr
    assert files.names() == ["t1", "late", "t2", "t3", "t4"]
    unchecked = files.shape(BAD_OF_FOUR, "--on-bad drop", target=False)  # but for the form of jobs
    assert facts_of(unchecked)["dropped"] == "2"
    assert "GPU-hours" not in facts_of(unchecked)
    assert len(files.names()) == 7


def test_durations_are_redrawn_on_request_and_refused_otherwise(files: Files) -> None:
    assert "--redraw: is required" in files.simulate(DURATIONS, SMALL, code=2).stderr
    assert "--redraw" in files.shape(DURATIONS, code=2).stderr
    assert "no duration: d3" in files.shape(DURATIONS, "--redraw", code=2).stderr
    facts = facts_of(files.shape(DURATIONS, "--redraw --on-bad drop"))
    assert facts["jobs"] == "2"
    assert float(facts["GPU-hours"]) == pytest.approx(9, abs=0.01)
    assert {a.spec.workload.model for a in read_trace(files.out)} == {"bert"}
    report = files.report(DURATIONS, f"{SMALL} {FREE} --redraw --on-bad drop")
    assert report["policies"][0]["completed"] == 2


def test_every_option_of_an_import_has_its_effect(files: Files) -> None:
    result = files.shape(FOUR, "--guaranteed 0.5 --quota 6 --tightness 2 --longer 3")
    assert facts_of(result)["tenant-b"] == "2 jobs, best effort"
    specs = {a.spec.name: a.spec for a in read_trace(files.out)}
    assert sum(spec.guaranteed for spec in specs.values()) == 2
    assert specs["t2"].iterations == 3000
    assert specs["t2"].deadline_s == pytest.approx(2 * 3000 * 3.0)
    result = files.shape(FOUR, "--guaranteed 0.5")
    assert "tenants: {tenant-a: {quotas: {any: 8}}}" in result.stderr
    facts = facts_of(files.shape(FOUR, "--no-deadlines --faster 2 --large-share 1"))
    assert facts["large"] == "models 100.0 % have 6B parameters or more"
    assert facts["deadlines"] == "none"
    assert read_trace(files.out)[-1].arrival_s == 3650.0
    files.shape(FOUR, "--busiest-hours 1")
    assert files.names() == ["t3", "t4"]
    files.shape(FOUR, "--load 0.5 --seed 3")
    assert 0 < len(files.names()) < 4
    files.shape(FOUR, "--sample 0.5 --loosen 5 --tenant nlp")
    assert [a.spec.tenant for a in read_trace(files.out)] == ["nlp"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nodes a100=2x4 --nodes a100=1x4", "--nodes"),
        ("--nodes a100=99999x4 --nodes v100=2x4", "--nodes: has 100,001 nodes, and may have 100,"),
        ("--tightness 1.5:0.5", "--tightness"),
        ("--large-from big", "--large-from"),
        ("--quota 4", "--guaranteed"),
        ("--no-deadlines --loosen 2", "--no-deadlines"),
        ("--guaranteed 0.5 --tenant x --quota 4", "--tenant"),
        ("--load 0.5", "--profiles"),
        ("--profiles absent.csv --nodes a100=2x4", "cannot be read"),
    ],
)
def test_meaningless_options_of_an_import_are_refused(
    files: Files, options: str, message: str
) -> None:
    assert message in files.shape(FOUR, options, code=2, target=False).stderr
    assert not files.out.exists()
