"""The output, files and error messages of ``tessera import trace``, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli.main import app
from tessera.simulator.traces.trace import read_trace

PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status
bert,1.3B,256,a100,1,1,2.0,ok
bert,1.3B,256,a100,1,4,0.6,ok
bert,6.7B,256,a100,1,4,3.0,ok
bert,6.7B,256,v100,1,4,6.0,ok
"""
TRACE = """\
job_id,submit_time_s,model,params,global_batch,num_iterations,num_gpus,gpu_type,deadline_s
t1,0,bert,1.3B,256,50000,1,a100,90000
t2,3600,bert,6.7B,256,5000,4,a100,
t3,7200,bert,1.3B,256,20000,4,a100,
t4,7300,bert,1.3B,256,20000,1,a100,
"""
BAD = TRACE + (
    "t4,7400,bert,1.3B,256,20000,1,a100,\n"
    "zero,7500,bert,1.3B,256,0,1,a100,\n"
    "what,7600,gpt9,1T,256,20000,1,a100,\n"
    "late,10,bert,1.3B,256,20000,1,a100,\n"
    "wide,7700,bert,1.3B,256,20000,64,a100,\n"
)
DURATIONS = "job_id,submit_time_s,duration_s,num_gpus\nd1,100,3600,2\nd2,0,7200,8\nd3,160,0,1\n"


class TraceFiles:
    """A folder of trace files, with the command that imports them."""

    def __init__(self, folder: Path) -> None:
        self.trace, self.out = folder / "trace.csv", folder / "out.csv"
        self.profiles = folder / "profiles.csv"
        self.profiles.write_text(PROFILES)

    def run(self, text: str, *options: str, code: int = 0, target: bool = True) -> Result:
        self.trace.write_text(text)
        about = ["--profiles", str(self.profiles), "--nodes", "a100=2x4"] if target else []
        arguments = ["import", "trace", str(self.trace), "--to", str(self.out), *about, *options]
        result = CliRunner().invoke(app, arguments, env={"TESSERA_SERVER": "127.0.0.1:1"})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result


@pytest.fixture
def files(tmp_path: Path) -> TraceFiles:
    return TraceFiles(tmp_path)


def facts_of(result: Result) -> dict[str, str]:
    return {
        name: " ".join(rest)
        for name, *rest in (line.split() for line in result.stdout.splitlines() if line)
    }


def test_a_traces_facts_are_printed_and_it_is_written_without_a_server(files: TraceFiles) -> None:
    result = files.run(TRACE)
    facts = facts_of(result)
    assert facts["jobs"] == "4"
    assert facts["GPU-hours"] == "13.78"  # 20,000 + 12,000 + 9,600 + 8,000 GPU-seconds
    assert facts["load"] == "0.849 of 8 GPUs"  # over 7,300 s
    assert facts["deadlines"] == "1"
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("bert")]
    assert [row[:4] for row in rows] == [
        ["bert", "1.3B", "3", "75.0"],
        ["bert", "6.7B", "1", "25.0"],
    ]
    assert "4 jobs written to" in result.stderr
    assert read_trace(files.out) == read_trace(files.trace)


def test_bad_jobs_are_refused_by_default_and_nothing_is_written(files: TraceFiles) -> None:
    result = files.run(BAD, code=2)
    for text in (
        "1 job with the name of an earlier job: t4",
        "1 job with no iterations",
        "zero",
        "what (gpt9 1T 256)",
        "wide (64 a100)",
    ):
        assert text in result.stderr
    assert "late" not in result.stderr  # jobs are sorted by default
    assert not files.out.exists()
    assert "late" in files.run(BAD, "--on-bad", "refuse", code=2).stderr


def test_bad_jobs_are_dropped_on_request_and_each_is_named(files: TraceFiles) -> None:
    result = files.run(BAD, "--on-bad", "drop")
    assert facts_of(result)["dropped"] == "4"
    assert "listed after a job that arrives later: late" in result.stderr
    assert "wide (64 a100)" in result.stderr
    assert [a.spec.name for a in read_trace(files.out)] == ["t1", "late", "t2", "t3", "t4"]


def test_durations_are_redrawn_on_request_and_refused_otherwise(files: TraceFiles) -> None:
    assert "--redraw" in files.run(DURATIONS, code=2).stderr
    assert "no duration: d3" in files.run(DURATIONS, "--redraw", code=2).stderr
    result = files.run(DURATIONS, "--redraw", "--on-bad", "drop")
    assert facts_of(result)["jobs"] == "2"
    assert float(facts_of(result)["GPU-hours"]) == pytest.approx(18, abs=0.01)
    assert {a.spec.workload.model for a in read_trace(files.out)} == {"bert"}


def test_every_option_has_its_effect(files: TraceFiles) -> None:
    files.run(TRACE, "--guaranteed", "0.5", "--quota", "6", "--tightness", "2", "--longer", "3")
    specs = {a.spec.name: a.spec for a in read_trace(files.out)}
    assert sum(spec.guaranteed for spec in specs.values()) == 2
    assert specs["t2"].iterations == 3000
    assert specs["t2"].deadline_s == pytest.approx(2 * 3000 * 3.0)
    result = files.run(TRACE, "--no-deadlines", "--faster", "2", "--large-share", "1")
    assert facts_of(result)["large"] == "models 100.0 % have 6B parameters or more"
    assert facts_of(result)["deadlines"] == "none"
    assert read_trace(files.out)[-1].arrival_s == 3650.0
    files.run(TRACE, "--busiest-hours", "1")
    assert [a.spec.name for a in read_trace(files.out)] == ["t3", "t4"]
    files.run(TRACE, "--load", "0.5", "--seed", "3")
    assert 0 < len(read_trace(files.out)) < 4
    files.run(TRACE, "--sample", "0.5", "--loosen", "5", "--tenant", "nlp")
    assert [a.spec.tenant for a in read_trace(files.out)] == ["nlp"] * 2


def test_a_quota_to_apply_is_printed(files: TraceFiles) -> None:
    result = files.run(TRACE, "--guaranteed", "0.5")
    assert "tenants: {tenant-a: {quotas: {any: 8}}}" in result.stderr
    assert facts_of(result)["tenant-b"] == "2 jobs, best effort"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "a100"], "--nodes"),
        (["--nodes", "a100=2x4", "--nodes", "a100=1x4"], "--nodes"),
        (["--nodes", "a100=0x4"], "--nodes"),
        (
            ["--nodes", "a100=99999x4", "--nodes", "v100=2x4"],
            "--nodes: has 100,001 nodes, and may have 100,000",
        ),
        (["--tightness", "1.5:0.5"], "--tightness"),
        (["--tightness", "0"], "--tightness"),
        (["--large-from", "big"], "--large-from"),
        (["--quota", "4"], "--guaranteed"),
        (["--no-deadlines", "--loosen", "2"], "--no-deadlines"),
        (["--guaranteed", "0.5", "--tenant", "x", "--quota", "4"], "--tenant"),
        (["--load", "0.5"], "--profiles"),
        (["--profiles", "absent.csv", "--nodes", "a100=2x4"], "cannot be read"),
    ],
)
def test_meaningless_options_are_refused(
    files: TraceFiles, options: list[str], message: str
) -> None:
    assert message in files.run(TRACE, *options, code=2, target=False).stderr
    assert not files.out.exists()


def test_without_profiles_only_the_form_of_jobs_is_checked(files: TraceFiles) -> None:
    result = files.run(BAD, "--on-bad", "drop", target=False)
    assert facts_of(result)["dropped"] == "2"
    assert "GPU-hours" not in facts_of(result)
    assert len(read_trace(files.out)) == 7
