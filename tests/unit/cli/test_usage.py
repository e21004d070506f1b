"""Wrong usage of commands: refused with exit code 2 and a sentence, before a server is called."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import OBJECTIVES
from tessera.service.cli import limits, main
from tessera.service.rpc import fields
from tessera.service.rpc.convert import (
    clusters,
    estimates,
    jobs,
    models,
    networks,
    rounds,
    tenants,
)
from tessera.v1 import estimates_pb2, scheduler_pb2

HUGE = "9" * 20
NOWHERE = {"TESSERA_SERVER": "127.0.0.1:1"}
JOB = "submit j --model m --batch 1 --iterations 1 --gpus 1"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("frob", "No such command 'frob'"),
        ("jobs --frob", "No such option"),
        ("jobs -o xml", "xml"),
        ("jobs --state sleeping", "--state: unknown state 'sleeping'; the states are queued, held"),
        ("job clusters/c/nodes/n", "must be an id or a name of the form clusters/CLUSTER/jobs"),
        (f"nodes delete clusters/c/jobs/{'x' * 10_000}", "must be an id or a name of the form"),
        ("nodes --selector zone", "--selector: cannot be read from 'zone' on"),
        ("drain n --wait --timeout soon", "--timeout: 'soon' is not a duration"),
        ("cells delete", "give some of these to choose Cells, or --all alone"),
        ("explain weak --round -1", "--round"),
        ("curve j --json --of gpus", "--json prints all curves"),
        ("import trace t.csv --limit " + HUGE, "--limit"),
        ("prune --keep-rounds " + HUGE, "--keep-rounds"),
        ("prune --older-than 9999999999999s", "--older-than"),
        ("serve --listen 0.0.0.0:7070 --print-config", "--insecure"),
        ("up --listen 0.0.0.0:7070", "--insecure"),
        ("serve --policy 'objective: speed'", "policy.objective: 'speed' is not an objective"),
        ("up --policy 'objective: speed'", "policy.objective: 'speed' is not an objective"),
        ("submit -f absent.yaml", "absent.yaml: cannot be read"),
        ("submit j -f absent.yaml", "takes one job from options or the jobs of --file, not both"),
        ("submit --gpus 8", "submit: needs --model, --batch, --iterations, or -f FILE with one or"),
        ("submit j --restart soon", "--restart: 'soon' is not a duration"),
        (f"submit j --restart {HUGE}d", "--restart ... must lie in 0 to 315,576,000,000 seconds"),
        ("submit j --deadline 300000000000s", "--deadline ... after the year 9999"),
        ("submit j --label novalue", "write a label as KEY=VALUE"),
        ('submit j --command "\'"', "--command ... must be quoted as in a shell"),
        ("submit j --gpus 99999999999999", "--gpus ... less than or equal to 65536"),
        ("submit j --gpus 0", "--gpus ... greater than or equal to 1"),
        (f"submit j --iterations {HUGE}", "--iterations ... less than or equal to 1000000000000"),
        (f"submit j --batch {HUGE}", "--batch ... less than or equal to 1000000000"),
        (f"submit j --max-retries {HUGE}", "--max-retries ... less than or equal to 1000"),
        ("submit j --weight 0", "--weight ... greater than or equal to 0.000001"),
        ("submit j --weight -1", "--weight ... greater than or equal to 0.000001"),
        ("submit j --priority 0", "--priority ... greater than or equal to 1"),
        (
            f"{JOB} --pinned-gpu-type",
            "--pinned-gpu-type: pins the type that --gpu-type names, so give both",
        ),
        ("update j", "needs a change, e.g. --weight"),
        ("update j --weight 0", "--weight"),
        ("update j --priority 0", "--priority"),
        ("round --time-limit soon", "--time-limit: 'soon' is not a duration"),
        ("round --seed " + HUGE, "--seed"),
        ("round --defragment-every " + HUGE, "--defragment-every"),
        (f"round --solve-limit {HUGE}d", "--solve-limit"),
        ("round --objective speed", "--objective: 'speed' is not an objective; choose from"),
        ("round --objective 0*throughput", "--objective: '0*throughput': all weights are 0"),
        ("round --objective 'max-min + jct'", "cannot be added to another objective; put them in"),
        ("round --priority-weights 1", "--priority-weights: '1' must be QUEUE:FACTOR"),
        ("round --scheduler arena --scheduler-parameters depth", "--scheduler-parameters: 'depth'"),
        (
            "round --scheduler arena --scheduler-parameters depth=1,depth=2",
            "--scheduler-parameters: sets 'depth' twice",
        ),
        ("round --default-run soon", "--default-run: 'soon' is not a duration"),
        ("round --round-length never", "--round-length: 'never' is not a duration"),
        ("round --deadlines strict", "--deadlines"),
        ("round --cost-of euros", "--cost-of"),
        ("round --max-changes -2", "--max-changes"),
        ("round --rate-floor 1.5", "--rate-floor"),
        ("models add owl", "--architecture, --hf: give one of them"),
        ("models add owl --architecture a --hf b", "--architecture, --hf: exclude each other"),
        ("models add owl --hf none.json", "none.json: cannot be read: No such file"),
        ("models add owl --hf - --dtype f8", "--dtype: must be one of f32, bf16, f16, not 'f8'"),
        ("models add owl --hf -", "-: must be a text of 1 to 65,536 characters, not 0"),
        ("models add /3B --hf -", "/3B: must be NAME or NAME/PARAMS"),
        ("models add owl/ --hf -", "owl/: must be NAME or NAME/PARAMS"),
        ("models add a/b/c --hf -", "a/b/c: must be NAME or NAME/PARAMS"),
        ("models --cluster d add owl --hf -", "--cluster: must follow `add`, if that accepts it"),
        ("whatif", "needs a change"),
        ("whatif --add-nodes h100", "must be TYPE:COUNT"),
        ("whatif --add-nodes h100:2x", "must be TYPE:COUNT"),
        ("whatif --weight 2", "is needed, since --weight is for a job"),
        ("whatif --job a", "needs what to change"),
        ("whatif --tenant t", "needs what to change"),
        ("whatif --quota any=4", "is needed"),
        ("whatif --tenant t --quota any", "must be TYPE=GPUS"),
        ("whatif --tenant t --quota any=4 --quota any=5", "has any twice"),
        ("update j --weight 2 --label a=b --dry-run", "--dry-run"),
    ],
)
def test_wrong_usage_exits_with_code_2_and_says_what_is_wrong(command: str, message: str) -> None:
    result = CliRunner().invoke(main.app, shlex.split(command), env=NOWHERE)
    error = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2, error
    assert result.stdout == ""
    assert all(part in error for part in message.split(" ... ")), error


def test_help_lists_every_command_and_the_exit_codes() -> None:
    result = CliRunner().invoke(main.app, ["--help"])
    for command in ("submit", "jobs", "round", "cluster", "import", "up", "serve", "migrate"):
        assert f" {command} " in result.stdout
    assert "3 no server" in result.stdout
    shown = CliRunner().invoke(main.app, ["round", "--help"], env={"COLUMNS": "120"}).stdout
    assert all(name in shown for name in OBJECTIVES)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("MAX_ITERATIONS", jobs.MAX_ITERATIONS),
        ("MAX_PRIORITY", jobs.MAX_PRIORITY),
        ("MIN_WEIGHT", jobs.MIN_WEIGHT),
        ("MAX_WEIGHT", jobs.MAX_WEIGHT),
        ("MAX_RETRIES", jobs.MAX_RETRIES),
        ("MAX_AVOIDED_NODES", jobs.MAX_AVOIDED),
        ("MAX_GPUS", estimates.MAX_GPUS),
        ("MAX_CPUS", estimates.MAX_CPUS),
        ("MAX_CPUS_PER_NODE", clusters.MAX_CPUS_A_NODE),
        ("MAX_GPUS_PER_NODE", clusters.MAX_GPUS_A_NODE),
        ("MAX_MEMORY_BYTES", clusters.MAX_MEMORY_BYTES),
        ("MAX_DOLLARS_PER_HOUR", clusters.MAX_DOLLARS_PER_HOUR),
        ("MAX_WATTS", clusters.MAX_WATTS),
        ("MAX_SEED", rounds.MAX_SEED),
        ("MAX_DURATION_S", fields.MAX_DURATION_S),
        ("MAX_NAMED_HOSTS", networks.MAX_SHOWN_NAMES),
        ("MAX_QUOTA", tenants.MAX_QUOTA),
        ("MAX_TENANT_WEIGHT", tenants.MAX_WEIGHT),
        ("MAX_ARCHITECTURE", models.MAX_ARCHITECTURE),
        ("MAX_MICRO_BATCHES", models.MAX_MICRO_BATCHES),
        ("MAX_SEQUENCE", models.MAX_SEQUENCE),
        ("MAX_STATE_BYTES", models.MAX_STATE_BYTES),
        ("DTYPES", models.DTYPES),
    ],
)
def test_a_limit_of_the_client_is_the_servers(name: str, limit: object) -> None:
    assert getattr(limits, name) == limit


def read_batch(size: int) -> object:
    return estimates.to_workload("w", estimates_pb2.Workload(model="m", global_batch=size))


def read_period(most: int) -> object:
    return rounds.to_options("o", scheduler_pb2.RoundOptions(defragment_every_rounds=most))


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(
    ("read", "limit"),
    [
        (read_batch, limits.MAX_BATCH),
        (read_period, limits.MAX_DEFRAGMENT_EVERY),
        (lambda n: rounds.read_options("o", f"max_changes: {n}"), limits.MAX_CHANGES),
        (lambda n: rounds.read_options("o", f"fairness_levels: {n}"), limits.MAX_FAIRNESS_LEVELS),
    ],
)
def test_the_server_accepts_the_clients_limit_and_no_more(
    read: Callable[[int], object], limit: int, beyond: int
) -> None:
    with pytest.raises(InvalidInput) if beyond else nullcontext():
        read(limit + beyond)
