"""Numbers beyond the limits of the API: refused with the option or key and its allowed range."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import clusterfile, limits, main, options
from tessera.service.cli.jobfile import read_jobs
from tessera.service.rpc import fields
from tessera.service.rpc.convert import clusters, estimates, jobs, networks, rounds
from tessera.v1 import estimates_pb2, scheduler_pb2

NOW = Timestamp(seconds=1_800_000_000)
JOB = "model: m\nglobal_batch: 8\niterations: 9\ngpus: 1\n"
HUGE = "9" * 20


@pytest.mark.parametrize(
    ("arguments", "option", "allowed"),
    [
        (["--gpus", "99999999999999"], "--gpus", "less than or equal to 65536"),
        (["--gpus", "0"], "--gpus", "greater than or equal to 1"),
        (["--iterations", HUGE], "--iterations", "less than or equal to 1000000000000"),
        (["--batch", HUGE], "--batch", "less than or equal to 1000000000"),
        (["--max-retries", HUGE], "--max-retries", "less than or equal to 1000"),
        (["--weight", "0"], "--weight", "greater than or equal to 0.000001"),
        (["--weight", "-1"], "--weight", "greater than or equal to 0.000001"),
        (["--priority", "0"], "--priority", "greater than or equal to 1"),
        (["--restart", f"{HUGE}d"], "--restart", "must lie in 0 to 315,576,000,000 seconds"),
        (["--deadline", "300000000000s"], "--deadline", "after the year 9999"),
        (["--command", "'"], "--command", "must be quoted as in a shell"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_range(
    arguments: list[str], option: str, allowed: str
) -> None:
    result = CliRunner().invoke(main.app, ["submit", "j", "--server", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    error = " ".join(result.stderr.replace("│", " ").split())
    assert option in error
    assert allowed in error


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["update", "j", "--weight", "0"], "--weight"),
        (["update", "j", "--priority", "0"], "--priority"),
        (["round", "--seed", HUGE], "--seed"),
        (["round", "--defragment-every", HUGE], "--defragment-every"),
        (["round", "--solve-limit", f"{HUGE}d"], "--solve-limit"),
        (["import", "trace", "t.csv", "--limit", HUGE], "--limit"),
        (["prune", "--keep-rounds", HUGE], "--keep-rounds"),
        (["prune", "--older-than", "9999999999999s"], "--older-than"),
    ],
)
def test_an_option_out_of_range_of_any_other_command_is_named(
    arguments: list[str], option: str
) -> None:
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 2
    assert option in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "gpus: 99999999999999",
            "gpus: must be a whole number from 1 to 65,536, not 99999999999999",
        ),
        (f"iterations: {HUGE}", "iterations: must be a whole number from 1 to 1,000,000,000,000"),
        ("priority: 0", "priority: must be a whole number from 1 to 100, not 0"),
        ("weight: 0", "weight: must be a number from 1e-06 to 1e+06, not 0"),
        ("weight: .inf", "weight: must be a number from 1e-06 to 1e+06, not '.inf'"),
        ("weight: 1e999", "line 5: weight: must be a finite number, not inf"),
        (
            f"weight: {'9' * 400}",
            "line 5: weight: the number 99999999999999999999... has more than 40",
        ),
        ("restart: .inf", "restart: '.inf' is not a duration"),
        ("restart: -1", "restart: '-1' is not a duration"),
        ("max_retries: 1001", "max_retries: must be a whole number from 0 to 1,000, not 1001"),
        ("deadline: 2027-13-45", "deadline: '2027-13-45' is not a time"),
        (f"tenant: {'9' * 5000}", "line 5: tenant: the number 99999999999999999999..."),
    ],
)
def test_a_key_out_of_range_in_a_job_file_is_named(line: str, message: str) -> None:
    key = line.partition(":")[0]
    other_lines = "".join(
        f"{text}\n" for text in JOB.splitlines() if not text.startswith(f"{key}:")
    )
    with pytest.raises(InvalidInput) as caught:
        read_jobs(f"{other_lines}{line}\n", "j.yaml", NOW)
    assert str(caught.value).startswith(f"j.yaml: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_types: {a: 99999999 TB}\n", "a: must be at most 1,024 TiB"),
        (
            "gpu_types: {a: 1GiB}\nnodes: [{name: n, gpu_type: a, gpus: 65}]\n",
            "gpus: must be a whole",
        ),
        (
            "gpu_types: {a: 1GiB}\nnodes: [{name: 'n{}', gpu_type: a, gpus: 1, count: 100001}]\n",
            "count: must be a whole number from 1 to 100,000, not 100001",
        ),
    ],
)
def test_a_key_out_of_range_in_a_cluster_file_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        clusterfile.read_cluster(text, "c.yaml")
    assert message in str(caught.value)


def test_submit_needs_the_required_options_or_a_file() -> None:
    result = CliRunner().invoke(main.app, ["submit", "--gpus", "8"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: submit: needs --model, --batch, --iterations, or -f FILE with one or more jobs in YAML\n"
    )


def test_half_a_second_is_written_in_milliseconds() -> None:
    assert options.parse_seconds("x", "500ms") == 0.5


def test_the_clients_limits_equal_the_servers() -> None:
    assert limits.MAX_ITERATIONS == jobs.MAX_ITERATIONS
    assert limits.MAX_GPUS == estimates.MAX_GPUS
    assert limits.MAX_CPUS == estimates.MAX_CPUS
    assert limits.MAX_CPUS_PER_NODE == clusters.MAX_CPUS_A_NODE
    assert limits.MAX_GPUS_PER_NODE == clusters.MAX_GPUS_A_NODE
    assert limits.MAX_MEMORY_BYTES == clusters.MAX_MEMORY_BYTES
    assert limits.MAX_PRIORITY == jobs.MAX_PRIORITY
    assert (limits.MIN_WEIGHT, limits.MAX_WEIGHT) == (jobs.MIN_WEIGHT, jobs.MAX_WEIGHT)
    assert limits.MAX_RETRIES == jobs.MAX_RETRIES
    assert limits.MAX_SEED == rounds.MAX_SEED
    assert limits.MAX_DURATION_S == fields.MAX_DURATION_S
    assert limits.MAX_NAMED_HOSTS == networks.MAX_SHOWN_NAMES


@pytest.mark.parametrize(("beyond", "refused"), [(0, False), (1, True)])
def test_the_server_accepts_the_largest_batch_and_defragmentation_period_but_no_more(
    beyond: int, refused: bool
) -> None:
    workload = estimates_pb2.Workload(model="m", global_batch=limits.MAX_BATCH + beyond)
    chosen = scheduler_pb2.RoundOptions(
        defragment_every_rounds=limits.MAX_DEFRAGMENT_EVERY + beyond
    )
    for take in (
        lambda: estimates.to_workload("w", workload),
        lambda: rounds.to_options("o", chosen),
    ):
        with pytest.raises(InvalidInput) if refused else nullcontext():
            take()
