"""Options of a round on the command line: only the options that are given reach the call."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tessera.formulation.answer.codec import encode
from tessera.formulation.base.errors import InvalidInput
from tessera.service import roundvalues
from tessera.service.cli import main
from tessera.service.cli.rounds.roundoptions import override_options, read_round_options
from tessera.service.server.convert import rounds
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2
from tests.support.builders import a_random_snapshot

SETTINGS = {
    "objective": "deadline then jct",
    "scheduler": "arena",
    "scheduler_parameters": "depth=5,breadth=8",
    "raw_throughput": "true",
    "priority_weights": "1:4",
    "restart_horizon": "2h",
    "max_restart_share": "0.5",
    "cost_of": "watts",
    "rate_floor": "0.25",
    "fairness_levels": "2",
    "caution": "1.5",
    "fair_share": "drf",
    "fair_half_life": "12h",
    "replan_spacing": "40",
    "deadlines": "myopic",
    "round": "60s",
    "keep_requests": "false",
    "promise_starts": "false",
    "change_spacing": "8",
    "default_run": "3h",
    "max_changes": "3",
    "defragment_every_rounds": "0",
    "solver": "greedy",
    "gap": "1e-2",
    "seed": "7",
    "solve_limit": "5s",
    "network_levels": "3",
    "network_floor": "0.2",
    "network_measure": "45s",
}
"""A value of each option, as it is written."""

OPTIONS = RoundOptions(
    objective="deadline then jct",
    scheduler="arena",
    scheduler_parameters="depth=5,breadth=8",
    raw_throughput=True,
    priority_weights="1:4",
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
    keep_requests=False,
    promise_starts=False,
    change_spacing=8.0,
    default_run_s=10800.0,
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


def test_every_option_can_be_set_by_its_name_or_in_a_file(tmp_path: Path) -> None:
    assert set(SETTINGS) == set(scheduler_pb2.RoundOptions.DESCRIPTOR.fields_by_name)
    message = read_round_options(settings=[f"{name}={text}" for name, text in SETTINGS.items()])
    assert rounds.to_options("options", message) == OPTIONS
    file = tmp_path / "options.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, text in SETTINGS.items()))
    assert read_round_options(file=str(file)) == message
    message.seed, message.max_changes = 8, 4
    assert read_round_options(file=str(file), seed=8, settings=["max_changes=4"]) == message
    assert read_round_options() == scheduler_pb2.RoundOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_chnges: 3", "FILE: max_chnges: is not an option of a round; did you mean 'max_ch"),
        ("keep_requests: 1", "FILE: keep_requests: must be true or false, not 1"),
        ("objective: 3", "FILE: objective: must be a text, not '3'"),
        ("gap: true", "FILE: gap: must be a number, not True"),
        ("seed: '010'", "FILE: seed: must be a number, not '010'"),
        ("round: true", "FILE: round: must be a duration, e.g. 90s or 2h, not True"),
        ("round: 60", "FILE: round: 60 has no unit; write e.g. 60s, 60m, 60h or 60d"),
        ("- jct", "FILE: must map names of options to values, e.g. objective: jct"),
        ("", "FILE: must map names of options to values, e.g. objective: jct"),
    ],
)
def test_a_wrong_option_of_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_round_options(file=str(file))
    assert message.replace("FILE", str(file)) in str(caught.value)


def test_every_option_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()
    assert [name for name in roundvalues.OPTIONS if f"| `{name}` |" not in page] == []


def test_an_option_may_contradict_the_standing_policy() -> None:
    standing = RoundOptions(
        keep_requests=False,
        deadlines="myopic",
        max_changes=2,
        fair_share="gpus",
    )
    named = read_round_options(
        keep_requests=True, deadlines="auto", max_changes=-1, settings=["fair_share=none"]
    )
    assert rounds.to_options("options", named, standing) == RoundOptions()


def test_given_options_replace_recorded_ones_and_parameters_go_with_their_scheduler() -> None:
    def read(*settings: str) -> scheduler_pb2.RoundOptions:
        return read_round_options(settings=list(settings))

    before = read("default_run=1500ms", "objective=jct", "keep_requests=true")
    override_options(before, read("default_run=2s", "keep_requests=false"))
    assert before == read("default_run=2s", "objective=jct", "keep_requests=false")
    recorded = ("scheduler=arena", "scheduler_parameters=depth=5")
    kept, dropped = read(*recorded), read(*recorded)
    override_options(kept, read("scheduler=arena", "seed=1"))
    assert kept == read(*recorded, "seed=1")
    override_options(dropped, read("scheduler=fcfs"))
    assert dropped == read("scheduler=fcfs")
    override_options(dropped, read(*recorded))
    assert dropped == read(*recorded)


def solve(tmp_path: Path, *options: str) -> Result:
    """Run ``tessera solve`` on a snapshot of three jobs."""
    file = tmp_path / "round.json"
    file.write_bytes(encode(a_random_snapshot(1, jobs=3)))
    return CliRunner().invoke(main.app, ["solve", str(file), *options], env={"COLUMNS": "150"})


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            ("--objective", "0.5*throughput + 0.5*jct", "--solver", "greedy"),
            "0.5*throughput + 0.5*jct",
        ),
        (
            ("--scheduler", "arena", "--scheduler-parameters", "depth=5,breadth=8"),
            "the published scheduler arena (depth=5,breadth=8)",
        ),
    ],
)
def test_a_snapshot_is_solved_by_the_given_policy(
    tmp_path: Path, options: tuple[str, ...], shown: str
) -> None:
    result = solve(tmp_path, *options)
    assert result.exit_code == 0, result.stderr
    assert shown in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--scheduler-parameters depth=5", "options.scheduler_parameters: needs a published"),
        ("--scheduler arena --scheduler-parameters dpeth=5", "no parameter 'dpeth'; did you mean"),
        ("--scheduler arena --scheduler-parameters depth=99", "depth must be a whole number from"),
        ("--scheduler fcfs --scheduler-parameters depth=5", "the scheduler fcfs has no parameters"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, options: str, message: str
) -> None:
    result = solve(tmp_path, *options.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
