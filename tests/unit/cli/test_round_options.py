"""Options of a round on the command line: only the options that are given reach the call."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.formulation.codec import encode
from tessera.service.cli import main
from tessera.service.cli.roundoptions.commands import override_options, round_options
from tessera.service.cli.roundoptions.objectives import CostOf, FairShareMeasure
from tessera.service.cli.roundoptions.order import DeadlineTreatment
from tessera.service.rpc.convert import rounds
from tessera.solvers.rounds.plan import RoundOptions
from tessera.v1 import scheduler_pb2
from tests.support.builders import a_random_snapshot

EVERYTHING: dict[str, tuple[Any, Any]] = {
    "objective": ("deadline then jct", "deadline then jct"),
    "scheduler": ("arena", "arena"),
    "scheduler_parameters": ("depth=5,breadth=8", "depth=5,breadth=8"),
    "raw_throughput": (True, True),
    "priority_weights": ("1:4", "1:4"),
    "restart_horizon": ("2h", ("restart_horizon_s", 7200.0)),
    "max_restart_share": (0.5, 0.5),
    "cost_of": (CostOf.WATTS, "watts"),
    "rate_floor": (0.25, 0.25),
    "fairness_levels": (2, 2),
    "caution": (1.5, 1.5),
    "fair_share": (FairShareMeasure.DRF, "drf"),
    "fair_half_life": ("12h", ("fair_half_life_s", 43200.0)),
    "replan_spacing": (40.0, 40.0),
    "deadlines": (DeadlineTreatment.MYOPIC, "myopic"),
    "round_length": ("60s", ("round_s", 60.0)),
    "keep_requests": (False, False),
    "promise_starts": (False, False),
    "change_spacing": (8.0, 8.0),
    "default_run": ("3h", ("default_run_s", 10800.0)),
    "max_changes": (3, 3),
    "defragment_every": (0, ("defragment_every_rounds", 0)),
    "solver": ("greedy", "greedy"),
    "gap": (0.01, 0.01),
    "seed": (7, 7),
    "solve_limit": ("5s", ("solve_limit_s", 5.0)),
    "network_levels": (3, 3),
    "network_floor": (0.2, 0.2),
    "network_measure": ("45s", ("network_measure_s", 45.0)),
}
"""Each option with its value, and with the value of the field that it sets, or its name, too."""


def test_every_option_sets_its_field_of_the_call() -> None:
    sent = round_options(**{option: value for option, (value, _) in EVERYTHING.items()})
    expected: dict[str, Any] = dict(
        field if isinstance(field, tuple) else (option, field)
        for option, (_, field) in EVERYTHING.items()
    )
    assert asdict(rounds.to_options("options", sent)) == asdict(RoundOptions(**expected))
    set_by_options = {known.name for known, _ in sent.ListFields()}
    assert set_by_options == set(scheduler_pb2.RoundOptions.DESCRIPTOR.fields_by_name)
    assert round_options() == scheduler_pb2.RoundOptions()


def test_an_option_may_contradict_the_standing_policy() -> None:
    standing = RoundOptions(
        keep_requests=False,
        deadlines="myopic",
        max_changes=2,
        fair_share="gpus",
    )
    named = round_options(
        keep_requests=True,
        deadlines=DeadlineTreatment.AUTO,
        max_changes=-1,
        fair_share=FairShareMeasure.NONE,
    )
    assert rounds.to_options("options", named, standing) == RoundOptions()


def test_given_options_replace_recorded_ones_and_parameters_go_with_their_scheduler() -> None:
    before = round_options(default_run="1500ms", objective="jct", keep_requests=True)
    override_options(before, round_options(default_run="2s", keep_requests=False))
    assert before == round_options(default_run="2s", objective="jct", keep_requests=False)
    recorded = {"scheduler": "arena", "scheduler_parameters": "depth=5"}
    kept, dropped = round_options(**recorded), round_options(**recorded)
    override_options(kept, round_options(scheduler="arena", seed=1))
    assert kept == round_options(**recorded, seed=1)
    override_options(dropped, round_options(scheduler="fcfs"))
    assert dropped == round_options(scheduler="fcfs")
    override_options(dropped, round_options(**recorded))
    assert dropped == round_options(**recorded)


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
