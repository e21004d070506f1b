"""The standing policy of a service: one setting for all options of a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.service.config import Config
from tessera.service.settings.sources import load_config
from tessera.service.standing_policy import unheeded_wishes
from tessera.solvers.rounds.plan import RoundOptions
from tests.support.job_records import a_job_record

POLICY = "{objective: deadline then jct, queue_order: true, promote_after: 7200s, max_changes: 8}"


def test_the_policy_comes_from_the_environment_or_a_multiline_setting_in_the_file(
    tmp_path: Path,
) -> None:
    wanted = RoundOptions(
        objective="deadline then jct", queue_order=True, promote_after_s=7200.0, max_changes=8
    )
    assert load_config(None, {"TESSERA_POLICY": POLICY}).round_options() == wanted
    file = tmp_path / "tessera.toml"
    lines = POLICY.strip("{}").replace(", ", "\n")
    file.write_text(f'policy = """\n{lines}\n"""\n')
    config = load_config(file, {})
    assert config.round_options() == wanted
    file.write_text(str(config))  # the printed configuration can be read again
    assert load_config(file, {}) == config


def test_without_a_policy_rounds_use_the_defaults_and_the_configured_period() -> None:
    assert Config().round_options() == RoundOptions()
    assert Config(period_s=60.0).round_options() == RoundOptions(round_s=60.0)
    assert Config(period_s=0.0).round_options() == RoundOptions()
    assert Config(period_s=60.0, policy="round: 10s").round_options().round_s == 10.0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "objective: speed",
            "policy.objective: 'speed' is not an objective; choose from throughput, deadline",
        ),
        ("objective: 0*jct", "policy.objective: '0*jct': all weights are 0"),
        ("jct", "policy: must map names to values"),
        ("objective: [", "policy: is neither JSON nor YAML: while parsing"),
    ],
)
def test_an_invalid_policy_is_refused_when_the_server_starts(policy: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_POLICY": policy})
    assert message in str(caught.value)


DUE = a_job_record(deadline_s=1e9)


@pytest.mark.parametrize(
    ("standing", "options"),
    [
        (RoundOptions(objective="jct"), ""),
        (RoundOptions(scheduler="fcfs"), " --scheduler ''"),
        (RoundOptions(objective="deadline then jct", deadlines="ignore"), " --deadlines auto"),
    ],
)
def test_the_advice_for_an_ignored_deadline_undoes_what_ignores_it(
    standing: RoundOptions, options: str
) -> None:
    (warning,) = unheeded_wishes(DUE, standing)
    advice = f"--objective 'deadline then throughput'{options}`"
    assert f"tessera policy set {advice}" in warning
    assert f"tessera round {advice}" in warning
    followed = replace(standing, objective="deadline then throughput", scheduler="", deadlines="")
    assert not unheeded_wishes(DUE, followed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "deadline then throughput"}, ""),
        ({"deadlines": "myopic"}, ""),
        ({"deadlines": "planned"}, ""),
        ({"deadlines": "ignore"}, "(deadlines: ignore)"),
        ({"scheduler": "fcfs"}, "the scheduler 'fcfs' decides rounds"),
        ({"scheduler": "fcfs", "deadlines": "look-ahead"}, "the scheduler 'fcfs' decides rounds"),
    ],
)
def test_warnings_follow_the_standing_policy(options: dict[str, Any], message: str) -> None:
    warnings = unheeded_wishes(DUE, RoundOptions(**options))
    assert len(warnings) == bool(message)
    assert all(message in warning for warning in warnings)
