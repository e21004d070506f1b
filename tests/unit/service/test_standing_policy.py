"""The standing policy of a service: one setting for all options of a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.lifecycle import JobState
from tessera.formulation.records.jobs import JobRecord, JobSpec
from tessera.formulation.values import Workload
from tessera.service.config import Config
from tessera.service.settings.sources import load_config
from tessera.service.standing_policy import unheeded_wishes
from tessera.solvers.rounds.plan import RoundOptions

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
        ("objectiv: jct", 'has no field named "objectiv"'),
        ("solver: magic", "policy.solver: unknown 'magic'; choose one of portfolio, "),
        ("scheduler: best", "policy.scheduler: unknown 'best'; choose one of "),
        (
            "{scheduler: arena, scheduler_parameters: 'lottery=2'}",
            "policy.scheduler_parameters: the scheduler arena has no parameter 'lottery' (its parameters:",
        ),
        (
            "{scheduler: sia, scheduler_parameters: 'fairness=x'}",
            "policy.scheduler_parameters: fairness must be a number from -2 to 2, not 'x'",
        ),
        ("gap: 2", "policy.gap: must lie between 0 and 1"),
        ("jct", "policy: must map names to values"),
        ("objective: [", "policy: is neither JSON nor YAML: while parsing"),
    ],
)
def test_an_invalid_policy_is_refused_when_the_server_starts(policy: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_POLICY": policy})
    assert message in str(caught.value)


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
    spec = JobSpec(
        name="a",
        workload=Workload(model="bert", params="0.76B", global_batch=256),
        iterations=10,
        requested_gpus=1,
        deadline_s=1e9,
    )
    job = JobRecord(
        cluster="lab",
        spec=spec,
        version=1,
        state=JobState.QUEUED,
        created_s=0.0,
        started_s=None,
        ended_s=None,
        iterations_done=0.0,
        generation=0,
        retries=0,
        last_error="",
        allocation=None,
        reason=None,
        reason_round=0,
    )
    (warning,) = unheeded_wishes(job, standing)
    advice = f"--objective 'deadline then throughput'{options}`"
    assert f"tessera policy set {advice}" in warning
    assert f"tessera round {advice}" in warning
    followed = replace(standing, objective="deadline then throughput", scheduler="", deadlines="")
    assert not unheeded_wishes(job, followed)
