"""The pure parts of both demonstrations: their jobs, their proof, their record and their pictures."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.runtimes import JAX, RUNTIMES
from tessera.formulation.values import GpuType
from tessera.service.cli.demo import command as demo
from tessera.service.cli.demo.picture import FREE_BRIGHTNESS, RoundPair, draw_picture, gpu_image
from tessera.service.cli.demo.train import jobs, picture, proof
from tessera.service.cli.demo.train.command import Result, show_results, table_row
from tessera.service.cli.demo.train.fleet import (
    REPEATABLE,
    UNKNOWN_MEMORY_BYTES,
    Fleet,
    own_fleet,
    virtual_fleet,
)
from tessera.service.cli.demo.train.recorder import Event, Recorder, Start, describe_starts
from tessera.service.cli.demo.train.undisturbed import run_undisturbed
from tessera.simulator.traces.profiles import parse_profiles
from tessera.v1 import jobs_pb2, jobs_pb2_grpc, scheduler_pb2
from tests.support.nvml import FakeNvml, some_gpus

NODES = [("a", "a100", 4), ("b", "v100", 2)]


def a_decision(job: str, node: str = "", *gpus: int, kind: str = "keep") -> scheduler_pb2.Decision:
    decision = scheduler_pb2.Decision(job=f"clusters/c/jobs/{job}", kind=kind)
    if node:
        share = jobs_pb2.NodeShare(node=f"clusters/c/nodes/{node}", gpu_indices=gpus)
        decision.allocation.shares.append(share)
    return decision


def test_each_gpu_has_the_colour_of_its_job_in_the_last_round(tmp_path: Path) -> None:
    decisions = [
        a_decision("one", "a", 0, 1),
        a_decision("two", "b", 1, kind="start"),
        a_decision("three", kind="wait"),
    ]
    image, strips = gpu_image(decisions, NODES)
    free = np.full(3, FREE_BRIGHTNESS)
    assert [label for label, _ in strips] == ["a100: 4 GPUs", "v100: 2 GPUs"]
    assert np.array_equal(image[0, 0], image[1, 0])
    assert not np.array_equal(image[0, 0], free)
    assert np.array_equal(image[2, 0], free)
    assert np.array_equal(image[0, 2], free)
    assert not np.array_equal(image[1, 2], free)
    assert not np.array_equal(image[1, 2], image[0, 0])
    file, value = tmp_path / "demo.png", scheduler_pb2.Round(placed_score=2.0, running=1, waiting=1)
    draw_picture(file, [RoundPair(ilp=value, greedy=value, call_s=0.1)], decisions, NODES)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_demo_ends_with_commands_to_try_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo, "out", Console(file=shown, width=200))
    greedy = scheduler_pb2.Round(placed_score=2.0, gap=0.6, bound_is_trivial=True)
    exact = scheduler_pb2.Round(name="clusters/c/rounds/1", placed_score=2.5, gap=1e-5)

    demo._show([RoundPair(ilp=exact, greedy=greedy, call_s=0.1)], [], tmp_path / "p.png")

    lines = shown.getvalue().splitlines()
    after = lines[lines.index("Next steps:") + 1 :]
    assert after[0].split()[:2] == ["tessera", "up"]


FLEET = virtual_fleet(nodes=2, node_gpus=4)
ONE_GPU = Fleet(
    nodes=(NodeSpec(name="host", gpu_type="h100", gpus=1),),
    gpu_type=GpuType(name="h100", memory_bytes=80 * 2**30),
    is_virtual=False,
    environment=REPEATABLE,
)
JAX_GPT, GPT, LINE = jobs.LEADS
PLAIN = [job for job in jobs.OTHERS if not job.needs_jax]


def an_execution(
    iteration: int, generation: int = 1, loss: float = 1.0, samples: tuple[int, ...] = ()
) -> proof.Execution:
    return proof.Execution(generation=generation, iteration=iteration, loss=loss, samples=samples)


def a_start(generation: int, *gpus: tuple[str, int], begun_s: float = 0.0) -> Start:
    return Start(
        generation=generation, gpus=gpus, begun_s=begun_s, running_s=begun_s, ended_s=begun_s + 5
    )


def in_order(total: int, batch: int, samples: int) -> dict[int, proof.Execution]:
    """Return iterations that use the samples in turn."""
    return {
        n: an_execution(n, samples=tuple((n * batch + k) % samples for k in range(batch)))
        for n in range(total)
    }


def a_result(**changes: object) -> Result:
    job = jobs_pb2.Job(state=jobs_pb2.SUCCEEDED, iterations=400, iterations_done=400)
    job.training.restart_seconds = 10.04
    result = Result(
        spec=GPT,
        job=job,
        starts=[a_start(1, *ALL[:4]), a_start(2, ALL[0]), a_start(3, ALL[3])],
        executions=[],
        undisturbed=[],
        difference=7.2e-7,
        ledger_fault="",
    )
    return replace(result, **changes)  # type: ignore[arg-type]


ALL = tuple((node.name, index) for node in FLEET.nodes for index in range(node.gpus))


def test_what_is_not_installed_is_left_out_and_another_job_is_scaled() -> None:
    lead, torch, *others = jobs.choose_jobs(FLEET, has_jax=True, has_torch=True)
    assert (lead, torch.name, torch.guaranteed) == (JAX_GPT, "gpt", False)
    assert others == list(jobs.OTHERS)
    assert jobs.choose_jobs(FLEET, has_jax=True, has_torch=False) == (JAX_GPT, *jobs.OTHERS)
    assert jobs.choose_jobs(FLEET, has_jax=False, has_torch=True) == (GPT, *PLAIN)
    assert jobs.choose_jobs(FLEET, has_jax=False, has_torch=False) == (LINE, *PLAIN)


def test_on_one_real_gpu_jobs_take_turns_and_have_real_work() -> None:
    lead, second, *others = jobs.choose_jobs(ONE_GPU, has_jax=True, has_torch=True)
    assert [lead.name, second.name] == ["gpt", "gpt-jax"]
    assert lead.arguments[-len(jobs.LARGE) :] == jobs.LARGE
    assert all(job.needs_jax for job in others), "the others would leave the GPU idle"
    for job in (lead, second, *others):
        assert not job.guaranteed, "nothing else could run"
        assert {plan.gpus for plan in job.plans} <= {1}
        assert not job.counts or job.counts == (1,)
        words = job.submission(Path("/x"), 400)
        assert "--work-s" not in words[words.index("--command") + 1]
        assert f"XLA_FLAGS={REPEATABLE['XLA_FLAGS']}" in words
    with pytest.raises(InvalidInput, match="needs PyTorch or JAX"):
        jobs.choose_jobs(ONE_GPU, has_jax=False, has_torch=False)
    assert str(ONE_GPU) == "1 h100 GPU on 1 node"
    assert str(FLEET) == "8 virtual GPUs on 2 nodes"


def test_the_fleet_of_a_machine_is_what_its_driver_reports() -> None:
    product, new = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
    fleet = own_fleet(FakeNvml(*some_gpus(2, product)))
    (node,) = fleet.nodes
    assert (node.gpu_type, node.gpus, fleet.gpus, fleet.is_virtual) == ("h100", 2, 2, False)
    assert fleet.gpu_type.memory_bytes == 80 * 2**30
    other = own_fleet(FakeNvml(*some_gpus(1, new)))
    assert (other.gpu_type.name, other.gpu_type.memory_bytes) == ("l4", UNKNOWN_MEMORY_BYTES)
    with pytest.raises(InvalidInput, match="no GPUs"):
        own_fleet(FakeNvml())


def test_a_plan_that_failed_is_infeasible_and_pipelines_are_slower() -> None:
    times = {
        r.plan: r.iter_time_s for r in jobs.plan_estimates([JAX_GPT], "cpu", failed=[jobs.REPLICAS])
    }
    assert times[jobs.REPLICAS] == math.inf
    before = {r.plan: r.iter_time_s for r in jobs.plan_estimates([JAX_GPT], "cpu")}
    assert (
        before[jobs.REPLICAS]
        < before[jobs.PIPELINE]
        == times[jobs.PIPELINE]
        < before[JAX_GPT.plans[0]]
    )
    assert all(not RUNTIMES[JAX].refuse_plan(plan) for job in jobs.OTHERS for plan in job.plans)
    records = parse_profiles(jobs.profiles_csv((GPT, *PLAIN), FLEET).encode(), "profiles.csv")
    shapes = [(r.cell.gpus, r.cell.nodes) for r in records if r.workload.model == GPT.model]
    assert shapes == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]
    assert {(r.source.name, r.provenance) for r in records} == {("ANALYTIC", jobs.PROVENANCE)}
    assert len(records) == len(shapes) + 3  # the other jobs share a model


def test_a_submission_names_the_script_alone_for_launchers_of_scripts() -> None:
    gpt, plain = (job.submission(Path("/x"), 400) for job in (GPT, PLAIN[0]))
    assert gpt[gpt.index("--command") + 1].startswith("/x/train_gpt.py ")
    assert "--guaranteed" in gpt
    assert " /x/train_plain.py " in plain[plain.index("--command") + 1]
    assert plain[plain.index("--iterations") + 1] == "200"


def test_ledgers_of_ranks_are_joined_and_a_line_that_was_cut_off_is_left_out(
    tmp_path: Path,
) -> None:
    def line(iteration: int, *samples: int) -> str:
        entry = {"iteration": iteration, "samples": samples, "loss": 2.0 - iteration}
        return json.dumps(entry) + "\n"

    (tmp_path / "1-0.jsonl").write_text(line(0, 1, 2) + line(1, 5, 6) + line(2, 9)[:-9])
    (tmp_path / "1-1.jsonl").write_text(line(0, 3, 4) + line(1, 7, 8))
    (tmp_path / "2-0.jsonl").write_text(line(1, 8, 7, 6, 5))
    last = proof.last_executions(proof.read_ledger(tmp_path))
    assert last == {
        0: an_execution(0, 1, 2.0, (1, 2, 3, 4)),
        1: an_execution(1, 2, 1.0, (8, 7, 6, 5)),
    }
    late, early = an_execution(0, 10, 3.0), an_execution(0, 9, 2.0)
    assert proof.last_executions([late, early]) == proof.last_executions([early, late]) == {0: late}


def test_output_counts_iterations_from_one_and_other_lines_are_skipped() -> None:
    text = "hello\niteration 1 loss 0.5\r\niteration 2 loss 0.25\nan iteration 3 loss 1\niterat"
    assert proof.parse_output(4, text) == [an_execution(0, 4, 0.5), an_execution(1, 4, 0.25)]


def test_the_largest_difference_counts_and_a_missing_or_strange_loss_is_infinite() -> None:
    ours = {0: an_execution(0, loss=1.0), 1: an_execution(1, loss=2.0)}
    other = {0: an_execution(0, loss=1.5), 1: an_execution(1, loss=1.9)}
    assert proof.largest_difference(ours, other) == 0.5
    assert proof.largest_difference(ours, {0: other[0]}) == math.inf
    assert proof.largest_difference({0: ours[0]}, other) == math.inf
    assert proof.largest_difference({}, {}) == math.inf
    strange = other | {1: an_execution(1, loss=math.nan)}
    assert proof.largest_difference(ours, strange) == math.inf


@pytest.mark.parametrize("total", [0, 1, 5, 6, 10])
def test_samples_in_turn_are_right_also_over_several_epochs(total: int) -> None:
    assert proof.find_ledger_fault(in_order(total, 4, 10), total, 4, 10) == ""


def test_every_mistake_in_the_samples_is_found() -> None:
    def fault(change: dict[int, proof.Execution] | None = None, without: int | None = None) -> str:
        last = in_order(6, 4, 10) | (change or {})
        return proof.find_ledger_fault({n: e for n, e in last.items() if n != without}, 6, 4, 10)

    assert fault(without=3) == "iteration 4 is missing"
    assert fault({6: an_execution(6)}) == "iteration 7 is beyond the last, 6"
    assert fault({2: an_execution(2, samples=(8, 9, 0))}) == (
        "iteration 3 used 3 samples, and its batch is 4"
    )
    assert fault({2: an_execution(2, samples=(8, 9, 0, 10))}) == "sample 10 does not exist"
    twice = {2: an_execution(2, samples=(8, 0, 0, 1))}
    assert fault(twice) == "sample 0 was used 4 times, and 3 are right"
    skipped = {0: an_execution(0, samples=(0, 1, 2, 4)), 1: an_execution(1, samples=(3, 5, 6, 7))}
    assert fault(skipped) == ""
    fewer = {4: an_execution(4, samples=(6, 7, 4, 5))}
    assert fault(fewer) == "sample 8 was skipped: it was used 1 times of 2"


def test_a_record_has_one_start_for_each_allocation_and_the_time_when_it_trains() -> None:
    recorder = Recorder(jobs_pb2_grpc.JobsStub, "clusters/c")  # type: ignore[arg-type]
    job = jobs_pb2.Job(state=jobs_pb2.STARTING, iterations_done=7)
    job.allocation.generation = 1
    share = jobs_pb2.NodeShare(node="clusters/c/nodes/node-0", gpu_indices=[0, 1])
    job.allocation.shares.append(share)
    recorder.record({"gpt": job}, 1.0)
    job.state = jobs_pb2.RUNNING
    recorder.record({"gpt": job}, 2.0)
    job.iterations_done = 9
    recorder.record({"gpt": job}, 3.0)
    recorder.record({"gpt": jobs_pb2.Job(state=jobs_pb2.QUEUED)}, 4.0)
    job.allocation.generation = 2
    del job.allocation.shares[0].gpu_indices[1:]
    recorder.record({"gpt": job}, 5.0)

    first, second = recorder.starts["gpt"]
    assert first.gpus == (("node-0", 0), ("node-0", 1))
    assert (first.begun_s, first.running_s, first.ended_s, first.resumed) == (1.0, 2.0, 3.0, 7.0)
    assert (second.begun_s, second.resumed) == (5.0, 9.0)
    assert describe_starts(recorder.starts["gpt"]) == "2→1"


def test_a_program_that_fails_outside_of_tessera_ends_the_demonstration(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; print('no disk', flush=True); sys.exit(3)")
    stub: Any = SimpleNamespace(ListJobs=lambda _request: jobs_pb2.ListJobsResponse())
    with run_undisturbed(PLAIN[0], command, 10, tmp_path / "alone") as run:
        recorder = Recorder(stub, "clusters/c", [run.require_success])
        with pytest.raises(Unavailable, match=r"status 3 outside of Tessera:\nno disk"):
            recorder.wait(lambda _jobs: False, "the end")


def test_faults_name_the_job_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert a_result().faults == []
    row = ("gpt", "succeeded", "400/400", "4→1", "2", "10.0 s", "7.2e-07", "all once")
    assert table_row(a_result()) == row
    assert table_row(a_result(spec=LINE, difference=0.0))[-2:] == ("0", "-")
    show_results(FLEET, [a_result()], Path("train.png"))
    assert max(map(len, capsys.readouterr().out.partition("Plans:")[0].splitlines())) <= 80
    failed = jobs_pb2.Job(state=jobs_pb2.FAILED, iterations=400, last_error="no disk")
    (fault,) = a_result(job=failed).faults
    assert fault == "gpt did not finish: FAILED at iteration 0 of 400, no disk."
    (fault,) = a_result(difference=1.1e-5).faults
    assert fault == "A loss of gpt differs by 1.1e-05 from the other run."
    assert len(a_result(difference=math.nan).faults) == 1
    wrong = a_result(ledger_fault="iteration 4 is missing")
    assert wrong.faults == ["The ledger of gpt is wrong: iteration 4 is missing."]
    assert table_row(wrong)[-1] == "wrong"


def test_plans_in_turn_are_shown_once_and_a_change_names_both() -> None:
    plans = ("dp4", "2 x tp2", "dp1", "dp1", "dp4")
    starts = [replace(a_start(n, *ALL[:4]), plan=plan) for n, plan in enumerate(plans)]
    assert describe_starts(starts) == "dp4→2 x tp2→dp1→dp4"
    assert describe_starts([]) == "-"
    assert picture.describe_change(starts[0], starts[1]) == "dp4 → 2 x tp2"
    assert picture.describe_change(starts[2], starts[3]) == "4 GPUs, resumed"
    moved = [a_start(1, *ALL[:4]), a_start(2, ALL[0]), a_start(3, ALL[3])]
    changes = [picture.describe_change(a, b) for a, b in pairwise(moved)]
    assert changes == ["4 → 1 GPU", "1 GPU, moved"]


def test_the_picture_of_training_is_written(tmp_path: Path) -> None:
    file = tmp_path / "train.png"
    starts = [a_start(1, *ALL), a_start(2, ALL[0], begun_s=6.0)]
    executions = [an_execution(n, 1 + (n > 4), 5.0 - n) for n in range(9)]
    events = [
        Event(time_s=0.0, text="gpt arrives"),
        Event(time_s=2.0, text="node-0 drained", node="node-0"),
        Event(time_s=4.0, text="node-0 back", node="node-0"),
    ]
    assert picture.find_drains(events) == [(2.0, 4.0, "node-0")]
    assert picture.label_events(events[1:], near_s=2.5) == [(2.0, "node-0 drained, node-0 back")]
    assert len(picture.label_events(events, near_s=1.0)) == 3
    shown = {"gpt": starts, "plain-1": [a_start(1, ALL[1], begun_s=7.0)]}
    picture.draw_training(file, shown, executions, executions, events, FLEET.nodes)
    assert file.read_bytes().startswith(b"\x89PNG")
