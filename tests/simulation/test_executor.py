"""The independent executor of logs, and replays of recorded allocations."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.simulator import executor
from tessera.simulator.executor import ReplayFailed, replay_lines
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.logfile import lines_of, log_of, write_log
from tessera.simulator.overheads import Overheads
from tessera.simulator.recordings import Hold, ReplayResult, nodes_for_holds, replay_holds
from tessera.simulator.run import Result
from tessera.simulator.scenario import Scenario
from tests.support.cells import with_cell
from tests.support.worlds import (
    COSTLY,
    FREE,
    POLICIES,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

Row = dict[str, Any]


def a_run() -> Result:
    """Return a run of two jobs on one node, which fails at 500 s and lags from 1,000 s to 1,300 s."""
    scenario = a_scenario(
        an_arrival("a", 5.0, iterations=2000),
        an_arrival("b", 7.0, iterations=300),
        nodes=some_specs(("a100", 1, 4)),
        profiles=[a_profile(1, 1.0), a_profile(2, 0.6)],
    )
    return simulate_scenario(
        scenario,
        overheads=COSTLY,
        horizon_s=6000.0,
        failures=[Failure(node="a100-0", down_s=500.0, up_s=700.0)],
        stragglers=[Straggler(node="a100-0", start_s=1000.0, end_s=1300.0, factor=1.5)],
    )


def tampered_log(change: Callable[[list[Row]], None]) -> list[str]:
    """Return the log of ``a_run`` with changed segments."""
    rows = [json.loads(line) for line in lines_of(log_of(a_run()))]
    change([row for row in rows if row["kind"] == "segment"])
    return [json.dumps(row) for row in rows if not row.get("gone")]


def segment_ended_by(segments: list[Row], ended_by: str) -> Row:
    return next(s for s in segments if s["ended_by"] == ended_by)


def hold_gpus_twice(segments: list[Row]) -> None:
    first, second = (s for s in segments if s["start_s"] == 300.0)
    first["on"] = second["on"]


def use_unknown_gpu(segments: list[Row]) -> None:
    segments[0]["on"] = [["a100-0", [3, 4]]]


def drop_gpus(segments: list[Row]) -> None:
    segments[0]["on"] = [["a100-0", [0]]]


def make_ready_sooner(segments: list[Row]) -> None:
    segments[0]["ready_s"] -= 1.0


def forget_segment(segments: list[Row]) -> None:
    segment_ended_by(segments, "failure")["gone"] = True


def forget_lag(segments: list[Row]) -> None:
    next(s for s in segments if s["slowdown"] > 1)["slowdown"] = 1.0


def lose_less(segments: list[Row]) -> None:
    next(s for s in segments if s["lost"])["lost"] -= 1.0


def end_too_soon(segments: list[Row]) -> None:
    segment_ended_by(segments, "finish")["end_s"] -= 1.0


def start_before_arrival(segments: list[Row]) -> None:
    segments[0]["start_s"] = 1.0


def change_cell_after_lag(segments: list[Row]) -> None:
    lagging = segments.index(segment_ended_by(segments, "speed"))
    segments[lagging + 1]["plan"] = "another"


def test_an_unchanged_log_replays_to_the_same_run() -> None:
    result = a_run()
    jct_s = replay_lines(tampered_log(lambda _segments: None))
    assert list(jct_s.values()) == pytest.approx((result.end_s - result.arrival_s).tolist())
    assert any(s.lost for s in result.segments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hold_gpus_twice, "hold its GPUs alone"),
        (use_unknown_gpu, "hold GPUs that its nodes have"),
        (drop_gpus, "hold GPUs that its nodes have"),
        (make_ready_sooner, "be ready when the overheads say"),
        (forget_segment, "end when its work|ready when|lose|continue"),
        (forget_lag, "end when its work ends"),
        (lose_less, "lose what came after"),
        (end_too_soon, "end when its work ends"),
        (start_before_arrival, "follow the previous one"),
        (change_cell_after_lag, "continue unchanged"),
    ],
)
def test_a_log_that_breaks_a_rule_is_refused(
    change: Callable[[list[Row]], None], message: str
) -> None:
    with pytest.raises(ReplayFailed, match=message):
        replay_lines(tampered_log(change))


def test_a_job_that_trains_more_than_its_work_is_detected() -> None:
    lines = [
        json.dumps(row | ({"iterations": 100} if row["kind"] == "job" else {}))
        for row in map(json.loads, lines_of(log_of(a_run())))
    ]
    with pytest.raises(ReplayFailed, match=r"no more than its work|end when its work"):
        replay_lines(lines)


def test_the_executor_imports_nothing_of_the_simulator_and_is_short() -> None:
    source = Path(executor.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source)
    imported = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    ]
    assert not [name for name in imported if str(name).startswith("tessera")]
    code = [
        line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    assert len(code) < 160


def test_each_line_of_a_log_is_an_object_and_infinite_numbers_are_null(tmp_path: Path) -> None:
    scenario = a_scenario(an_arrival("a"), profiles=[a_profile(), a_profile(2, math.inf)])
    endless = replace(FREE, checkpoint_every_s=math.inf)
    log = log_of(simulate_scenario(scenario, overheads=endless))
    file = tmp_path / "run.jsonl"
    write_log(log, file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines == list(lines_of(log))
    rows = [json.loads(line) for line in lines]
    assert {row["kind"] for row in rows} == {"run", "node", "profile", "job", "segment"}
    assert [row["iter_time_s"] for row in rows if row["kind"] == "profile"] == [1.0, None]
    assert rows[0]["overheads"]["checkpoint_every_s"] is None
    (segment,) = (row for row in rows if row["kind"] == "segment")
    assert (segment["job"], segment["end_s"]) == ("a", log.segments[0].end_s)


def a_hold(job: int = 0, start_s: float = 0.0, end_s: float = math.inf, **overrides: Any) -> Hold:
    """Return a hold of one A100."""
    fields = {"job": job, "start_s": start_s, "end_s": end_s, "nodes": 1} | overrides
    gpus = fields["nodes"] * fields.pop("gpus_per_node", 1)
    return Hold(**with_cell(fields | {"gpus": gpus}))


def replay_of(*holds: Hold, costs: Overheads = FREE, arrivals: int = 1) -> ReplayResult:
    """Replay holds of jobs of 1,000 iterations, 1 s each on one GPU, that scale linearly."""
    jobs = [an_arrival(f"job-{i}") for i in range(arrivals)]
    nodes = nodes_for_holds(holds, {"a100": 4})
    return replay_holds(a_scenario(*jobs, nodes=nodes, types=["a100"]), holds, costs)


def test_each_hold_pays_its_start_and_resumes_from_what_was_trained() -> None:
    replay = replay_of(a_hold(end_s=100.0), a_hold(start_s=300.0, gpus_per_node=2), costs=COSTLY)

    # 11 s to load, 20 to search: 69 iterations by 100 s; then 7 to save, 11 to load, 30 to search
    assert replay.end_s.tolist() == [348.0 + (1000 - 69) / 2]
    assert [s.ready_s for s in replay.segments] == [31.0, 348.0]


@pytest.mark.parametrize(
    "holds", [(a_hold(end_s=20.0), a_hold(start_s=10.0)), (a_hold(job=1),)], ids=["overlap", "job"]
)
def test_impossible_holds_are_refused(holds: tuple[Hold, ...]) -> None:
    with pytest.raises(InvalidInput, match="holds"):
        replay_of(*holds)


def test_holds_before_the_arrival_are_refused() -> None:
    scenario = a_scenario(an_arrival("late", at_s=50.0))

    with pytest.raises(InvalidInput, match="late overlap, or begin before it arrives"):
        replay_holds(scenario, [a_hold(start_s=40.0)], FREE)


def test_too_few_nodes_are_named() -> None:
    scenario = a_scenario(an_arrival("wide"), nodes=some_specs(("a100", 1, 4)))

    with pytest.raises(InvalidInput, match="too few"):
        replay_holds(scenario, [a_hold(nodes=2, gpus_per_node=4)], FREE)


def holds_of(result: Result) -> list[Hold]:
    """Return the holds of a run's jobs, whose gangs must be even."""
    holds = []
    for s in result.segments:
        assert len({len(gpus) for _, gpus in s.members}) == 1, (
            "the gang has unequal GPU counts on its nodes"
        )
        holds.append(
            a_hold(
                s.job,
                s.start_s,
                math.inf if s.ended_by == "finish" else s.end_s,
                gpu_type=s.cell.gpu_type,
                nodes=len(s.members),
                gpus_per_node=len(s.members[0][1]),
                plan=s.cell.plan,
                pipeline_degree=s.cell.pipeline_degree,
            )
        )
    return holds


@pytest.mark.parametrize("policy", ["greedy", "fcfs", "ilp"])
@pytest.mark.parametrize("seed", range(3))
def test_the_simulators_own_allocations_replay_to_its_own_times(policy: str, seed: int) -> None:
    scenario: Scenario = a_random_scenario(seed, jobs=6)
    run = simulate_scenario(scenario, POLICIES[policy], overheads=COSTLY)
    holds = holds_of(run)
    sizes = {node.gpu_type: node.gpus for node in scenario.nodes}
    replayed = a_scenario(
        *scenario.arrivals,
        nodes=nodes_for_holds(holds, sizes),
        profiles=scenario.profiles,
        types=[kind.name for kind in scenario.gpu_types],
    )

    replay = replay_holds(replayed, holds, COSTLY)

    assert len(replay.segments) == len(run.segments) > 0
    np.testing.assert_allclose(replay.end_s, np.where(np.isfinite(run.end_s), run.end_s, np.inf))
