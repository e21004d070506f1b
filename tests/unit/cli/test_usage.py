"""Wrong usage of commands: refused with exit code 2 and a sentence, before a server is called."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from tessera.formulation.round.grammar import OBJECTIVES
from tessera.service.cli import main

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
        ("cells delete", "give some of these to choose Cells, or --all alone"),
        ("explain weak --round -1", "--round"),
        ("curve j --json --of gpus", "--json prints all curves"),
        ("import trace t.csv --limit " + HUGE, "--limit"),
        ("prune --older-than 9999999999999s", "--older-than"),
        ("serve --listen 0.0.0.0:7070 --print-config", "--insecure"),
        ("serve --policy 'objective: speed'", "policy.objective: 'speed' is not an objective"),
        ("submit -f absent.yaml", "absent.yaml: cannot be read"),
        ("submit j -f absent.yaml", "takes one job from options or the jobs of --file, not both"),
        ("submit --gpus 8", "submit: needs --model, --batch, --iterations, or -f FILE with one or"),
        ("submit j --restart soon", "--restart: 'soon' is not a duration"),
        (f"submit j --restart {HUGE}d", "--restart ... must lie in 0 to 315,576,000,000 seconds"),
        ("submit j --label novalue", "write a label as KEY=VALUE"),
        ('submit j --command "\'"', "--command ... must be quoted as in a shell"),
        ("submit j --gpus 0", "--gpus ... greater than or equal to 1"),
        ("submit j --weight 0", "--weight ... greater than or equal to 0.000001"),
        (
            f"{JOB} --pinned-gpu-type",
            "--pinned-gpu-type: pins the type that --gpu-type names, so give both",
        ),
        ("update j", "needs a change, e.g. --weight"),
        (f"round --set defragment_every_rounds={HUGE}", "must lie in 0 to 1,000,000; it is"),
        ("round --objective 0*throughput", "--objective: '0*throughput': all weights are 0"),
        ("round --objective 'max-min + jct'", "cannot be added to another objective; put them in"),
        ("round --set priority_weights=1", "--set priority_weights: '1' must be PRIORITY:FACTOR"),
        ("round --scheduler arena --scheduler-parameters depth", "--scheduler-parameters: 'depth'"),
        (
            "round --scheduler arena --scheduler-parameters depth=1,depth=2",
            "--scheduler-parameters: sets 'depth' twice",
        ),
        (
            "round --set default_run=3",
            "--set default_run: 3 has no unit; write e.g. 3s, 3m, 3h or 3d",
        ),
        ("round --set round=never", "--set round: must be a number in 1 to 3.2e+09; it is inf"),
        ("round --set max_chnges=1", "not an option of a round; did you mean 'max_changes'?"),
        (
            "round --set xyz=1",
            "--set xyz: is not an option of a round; the options are objective, raw",
        ),
        ("round --set gap=small", "--set gap: must be a number, not 'small'"),
        ("round --set keep_requests=no", "--set keep_requests: must be true or false, not 'no'"),
        ("round --set seed", "--set: 'seed' must be NAME=VALUE, e.g. max_changes=20"),
        ("round --seed 1 --set seed=2", "--set seed: has a value already; give it once"),
        ("round --deadlines strict", "--deadlines"),
        ("round --set cost_of=euros", "--set cost_of: must be dollars or watts"),
        ("round --max-changes -2", "--max-changes"),
        ("round --set rate_floor=1.5", "--set rate_floor: must lie in [0, 1]"),
        ("models add owl", "--architecture, --hf: give one of them"),
        ("models add owl --architecture a --hf b", "--architecture, --hf: exclude each other"),
        ("models add owl --hf - --dtype f8", "--dtype: must be one of f32, bf16, f16, not 'f8'"),
        ("models add owl --hf -", "-: must be a text of 1 to 65,536 characters, not 0"),
        ("models add /3B --hf -", "/3B: must be NAME or NAME/PARAMS"),
        ("models --cluster d add owl --hf -", "--cluster: must follow `add`, if that accepts it"),
        ("whatif", "needs a change"),
        ("whatif --add-nodes h100", "must be TYPE:COUNT"),
        ("whatif --weight 2", "is needed, since --weight is for a job"),
        ("whatif --job a", "needs what to change"),
        ("whatif --quota any=4", "is needed"),
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
