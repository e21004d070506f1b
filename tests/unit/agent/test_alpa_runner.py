"""The runner of Alpa jobs under a keeper: it trains, writes checkpoints, stops and goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.formulation.exit_reasons import ExitReason
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit, MemberHandle, Progress
from tests.support.agents import until
from tests.support.alpa_jobs import IMAGE, an_alpa_gang, calls_of, two_stages
from tests.support.programs import ProgramBench, end_of

SUCCESS = MemberExit(outcome=ExitOutcome.SUCCEEDED)
STOPPED = MemberExit(outcome=ExitOutcome.STOPPED)
SLOWLY = "time.sleep(0.05)"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProgramBench]:
    program_bench = ProgramBench(tmp_path)
    yield program_bench
    await program_bench.clean()


def observed(handle: MemberHandle) -> Progress:
    progress = handle.observe()
    assert isinstance(progress, Progress)
    return progress


def losses(iterations: int) -> list[float]:
    """Return the losses of the program, computed here."""
    weight, found = 1.0, []
    for iteration in range(iterations):
        error = weight - iteration % 3 / 4
        weight -= 0.25 * error
        found.append(error * error)
    return found


async def test_a_job_trains_by_the_plan_in_alpas_options(bench: ProgramBench) -> None:
    handle = bench.start(an_alpa_gang(bench, plan=two_stages()))
    assert await end_of(handle) == SUCCESS
    progress = observed(handle)
    assert (progress.iterations, progress.runtime, progress.remark) == (10, "alpa", "")
    assert progress.loss == losses(10)[-1]
    (method,) = calls_of(bench, "PipeshardParallel")
    assert method["num_micro_batches"] == 2
    assert method["pipeline_schedule"] == "1f1b"
    assert method["stage_option"]["forward_stage_layer_ids"] == [[0, 1], [2]]
    assert method["stage_option"]["submesh_physical_shapes"] == [[1, 1], [1, 1]]
    assert calls_of(bench, "init") == [
        {"cluster": "ray", "num_nodes": 1, "num_devices_per_node": 2}
    ]
    assert "plan of [{'end': 2, 'start': 0}, {'end': 3, 'start': 2}] with ['--lr', '0.25']" in (
        bench.output()
    )


async def test_a_job_without_a_plan_leaves_the_choice_to_alpa(bench: ProgramBench) -> None:
    assert await end_of(bench.start(an_alpa_gang(bench))) == SUCCESS
    (method,) = calls_of(bench, "ShardParallel")
    assert method == {"devices": None, "num_micro_batches": None, "auto_sharding_option": {}}


async def test_a_stopped_job_goes_on_from_its_checkpoint(bench: ProgramBench) -> None:
    first = bench.start(an_alpa_gang(bench, step=SLOWLY, iterations_total=1e6, plan=two_stages()))
    await first.begun()
    await until(lambda: observed(first).iterations > 2)
    first.stop()
    assert await first.ended() == STOPPED
    done = int(observed(first).checkpoint_iterations or 0)
    assert done == observed(first).iterations > 2
    second = bench.start(an_alpa_gang(bench, 2, iterations_total=done + 3))
    assert await end_of(second) == SUCCESS
    assert observed(second).resumed_iterations == done
    assert observed(second).loss == pytest.approx(losses(done + 3)[-1], abs=1e-12)
    assert len(calls_of(bench, "restore_checkpoint")) == 1


async def test_a_job_is_asked_for_checkpoints_and_goes_on(bench: ProgramBench) -> None:
    handle = bench.start(an_alpa_gang(bench, step=SLOWLY, iterations_total=1e6))
    await handle.begun()
    handle.request_checkpoint()
    await until(lambda: observed(handle).checkpoint_iterations is not None)
    before = observed(handle).iterations
    await until(lambda: observed(handle).iterations > before)
    assert len(calls_of(bench, "save_checkpoint")) == 1
    handle.stop()
    assert await handle.ended() == STOPPED


async def test_a_checkpoint_that_a_worker_did_not_write_is_not_reported(
    bench: ProgramBench,
) -> None:
    gang = an_alpa_gang(
        bench, step=SLOWLY, iterations_total=1e6, environment={"FAKE_ALPA": "loses parts"}
    )
    handle = bench.start(gang)
    await handle.begun()
    handle.request_checkpoint()
    end = await handle.ended()
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.ERROR)
    assert "no worker wrote" in end.error
    assert observed(handle).checkpoint_iterations is None


async def test_output_of_the_program_does_not_disturb_reports(bench: ProgramBench) -> None:
    step = (
        """print('{"iterations": 9999}'); print("half a line", end=""); os.write(1, b"\\xff@tes")"""
    )
    handle = bench.start(an_alpa_gang(bench, step=step))
    assert await end_of(handle) == SUCCESS
    assert (observed(handle).iterations, observed(handle).remark) == (10, "")


@pytest.mark.parametrize("head", ["", "STOP_IF_NOT_FINITE = False"])
async def test_a_loss_that_is_not_a_number_ends_the_job_unless_it_wants_to_go_on(
    bench: ProgramBench, head: str
) -> None:
    handle = bench.start(an_alpa_gang(bench, head=head, step="batch = float('nan')"))
    end = await end_of(handle)
    if head:
        assert end == SUCCESS
        assert observed(handle).iterations == 10
    else:
        assert (end.reason, end.error) == (
            ExitReason.LOSS_NOT_FINITE,
            "the loss of iteration 1 is nan",
        )
    assert observed(handle).loss is None
    assert "nan" in observed(handle).remark


@pytest.mark.parametrize(
    ("head", "environment", "reason", "error"),
    [
        ("del_build = 1 / 0", {}, ExitReason.ERROR, "ZeroDivisionError: division by zero"),
        ("import absent", {}, ExitReason.NOT_STARTED, "No module named 'absent'"),
        ("", {"FAKE_RAY": "fails"}, ExitReason.ERROR, "Ray did not start on this node"),
        ("", {"PYTHONPATH": ""}, ExitReason.NOT_STARTED, "No module named 'alpa'"),
    ],
)
async def test_a_program_that_cannot_begin_fails_with_its_reason(
    bench: ProgramBench,
    head: str,
    environment: dict[str, str],
    reason: ExitReason,
    error: str,
) -> None:
    end = await end_of(bench.start(an_alpa_gang(bench, head=head, environment=environment)))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, reason)
    assert error in end.error


async def test_a_program_may_be_a_module_and_gets_its_arguments(bench: ProgramBench) -> None:
    gang = an_alpa_gang(bench, environment={"PYTHONPATH": f"{IMAGE}:{bench.root}"})
    (bench.root / "lab.py").write_text((bench.root / "train-1.py").read_text())
    gang = replace(gang, command=("-m", "lab", "--seed", "1"))
    assert await end_of(bench.start(gang)) == SUCCESS
    assert "plan of None with ['--seed', '1']" in bench.output()


async def test_a_program_without_build_is_refused(bench: ProgramBench) -> None:
    gang = an_alpa_gang(bench)
    (bench.root / "train-1.py").write_text("def train(): ...")
    end = await end_of(bench.start(gang))
    assert end.reason is ExitReason.REFUSED
    assert "defines no function build(plan)" in end.error


async def stop_after_an_iteration(bench: ProgramBench) -> None:
    """Run a job until it has written a checkpoint."""
    handle = bench.start(an_alpa_gang(bench, step=SLOWLY, iterations_total=1e6))
    await handle.begun()
    await until(lambda: observed(handle).iterations > 0)
    handle.stop()
    assert await handle.ended() == STOPPED


async def test_a_checkpoint_with_a_missing_part_is_not_read(bench: ProgramBench) -> None:
    await stop_after_an_iteration(bench)
    (part,) = bench.store.glob("generation-1/iteration-*/state.w/metadata_0")
    part.unlink()
    end = await end_of(bench.start(an_alpa_gang(bench, 2, iterations_total=1e6)))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.BAD_CHECKPOINT)
    assert "no checkpoint of the job is intact" in end.error


async def test_a_checkpoint_that_alpa_cannot_restore_is_named(bench: ProgramBench) -> None:
    await stop_after_an_iteration(bench)
    gang = an_alpa_gang(bench, 2, iterations_total=1e6, environment={"FAKE_ALPA": "cannot restore"})
    end = await end_of(bench.start(gang))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.BAD_CHECKPOINT)
    assert "cannot be restored: ValueError('another model')" in end.error


async def test_nodes_join_the_first_one_and_stay_until_it_has_ended(bench: ProgramBench) -> None:
    shares = (("n0", (0, 1)), ("n1", (0, 1)))
    gang = an_alpa_gang(
        bench,
        step=SLOWLY,
        iterations_total=1e6,
        shares=shares,
        members=("n0", "n1"),
        member_gpus=(2, 2),
    )
    leader, follower = bench.start(gang, "n0"), bench.start(gang, "n1")
    await leader.begun()
    await until(lambda: observed(leader).iterations > 0)
    follower.stop()
    leader.stop()
    assert await leader.ended() == STOPPED
    assert await follower.ended() == STOPPED
    assert observed(leader).checkpoint_iterations
    starts = (bench.store / "files" / "ray-starts.jsonl").read_text().splitlines()
    (head, *joined) = map(json.loads, starts)
    assert head == [True, None, "2"]
    assert [[is_head, gpus] for is_head, _, gpus in joined] == [[False, "2"]]
    assert calls_of(bench, "init")[0]["num_nodes"] == 2
