"""The trace generator against figures of Crux's paper, and the accounting of runs against ones by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.benchmarks.harness.cases import find_cases
from tessera.benchmarks.harness.registry import run_case
from tessera.benchmarks.network.bench_network_trace import run_rows, trace_figures
from tessera.benchmarks.network.fabrics import three_layer, two_layer
from tessera.benchmarks.network.scenarios import SCENARIOS
from tessera.benchmarks.network.traces import (
    ContentionNetwork,
    SimulatedTrace,
    mismeasure_times,
    play_trace,
    simulate_trace,
    summarize_run,
)
from tessera.benchmarks.network.workload import (
    DAY_S,
    PEAK_FLOP_PER_S,
    TraceWorkload,
    jobs_of,
    models_of,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.traffic import Exchange, Pattern, Traffic
from tessera.formulation.placement import Gang
from tessera.formulation.topologies.topology import Tier
from tessera.simulator.network.trace import TraceJob

NVLINK_BYTES_PER_S = 300e9
EIGHT = Gang(members=((0, tuple(range(8))),))


def a_job(
    name: str, at_s: float = 0.0, iterations: float = 100.0, comm_s: float = 1.0, gpus: int = 8
) -> TraceJob:
    """Return a job that computes 10 flop in 1 s, then sends for ``comm_s`` over NVLink inside one host."""
    ring = Exchange(
        pattern=Pattern.RING, members=np.arange(gpus)[None], sent_bytes=comm_s * NVLINK_BYTES_PER_S
    )
    return TraceJob(
        name=name,
        arrival_s=at_s,
        gpus=gpus,
        iterations=iterations,
        traffic=Traffic(work_flop=10.0, compute_s=1.0, start_s=1.0, exchanges=(ring,)),
    )


def on_a_host(scheduler: str = "first-fit", days: float = 1.0) -> SimulatedTrace:
    return SimulatedTrace(
        fabric="clos",
        mechanism="ecmp",
        scheduler=scheduler,
        workload=TraceWorkload(days=days, gpus=8),
    )


def test_two_weeks_have_the_papers_numbers_of_jobs_and_sizes() -> None:
    jobs = jobs_of(TraceWorkload(seed=3))
    gpus = np.array([job.gpus for job in jobs])
    assert len(jobs) > 4_800  # more than 5,000 in the paper; 5,040 are expected here
    assert 0.1 < (gpus >= 128).mean() < 0.13
    assert gpus.max() == 512
    arrival_s = np.array([job.arrival_s for job in jobs])
    assert (np.diff(arrival_s) >= 0).all()
    assert arrival_s.max() < 14 * DAY_S
    days = np.bincount((arrival_s / DAY_S).astype(int), minlength=14)
    assert days.min() > 280
    morning = (arrival_s % DAY_S) < DAY_S / 2
    assert morning.mean() == pytest.approx(0.5 + 0.5 / np.pi, abs=0.02)  # the daily swing is a sine


def test_jobs_request_the_given_share_of_gpus() -> None:
    """Lengths are heavy-tailed, so the mean of 5,000 draws is only within a tenth."""
    w = TraceWorkload(demand=0.4, seed=1)
    jobs = jobs_of(w)
    requested_gpu_s = sum(job.gpus * job.iterations * job.traffic.compute_s for job in jobs)
    assert requested_gpu_s / (w.gpus * w.days * DAY_S) == pytest.approx(0.4, rel=0.12)


def test_equal_seeds_draw_equal_jobs_and_other_seeds_draw_others() -> None:
    w = TraceWorkload(days=0.2)
    names = [job.name for job in jobs_of(w)]
    assert names == [job.name for job in jobs_of(w)]
    assert names != [job.name for job in jobs_of(replace(w, seed=1))]


def test_large_jobs_are_mostly_gpts_and_small_jobs_never_are() -> None:
    assert "gpt" not in models_of(8)
    large = models_of(128)
    assert large["gpt"] > sum(large.values()) / 2
    assert not {"ctr", "multi-interests"} & large.keys()


def test_networks_have_the_papers_switches() -> None:
    for topology, counts in ((two_layer(), (173, 16, 0)), (three_layer(), (6, 12, 32))):
        tier = topology.vertices.tier
        assert (
            tuple(int((tier == t).sum()) for t in (Tier.TOR, Tier.AGGREGATION, Tier.CORE)) == counts
        )
        assert int((tier == Tier.GPU).sum()) == 2_000


def test_a_single_job_is_accounted_as_computed_by_hand() -> None:
    """The job has 100 iterations of 1 s of compute and 1 s of sending, on all 8 GPUs of a day of 86,400 s."""
    request, jobs = on_a_host(), [a_job("a", at_s=50.0)]
    figures = summarize_run(request.workload, jobs, *simulate_trace(request, jobs))
    assert figures["flop"] == pytest.approx(1_000)
    assert figures["jct_s"] == [pytest.approx(200)]
    assert figures["of_held"] == pytest.approx(1_000 / (8 * 200 * PEAK_FLOP_PER_S))
    assert figures["of_all"] == pytest.approx(figures["of_held"] * figures["held_share"])
    assert figures["computing_of_held"] == pytest.approx(0.5)
    assert (figures["slowdown"], figures["ended"], figures["shared"]) == (pytest.approx(1), 1, 0)
    assert figures["held_share"] == pytest.approx(200 / DAY_S)


def test_jobs_that_outlast_the_trace_have_no_jct() -> None:
    request, jobs = on_a_host(days=100 / DAY_S), [a_job("a")]
    figures = summarize_run(request.workload, jobs, *simulate_trace(request, jobs))
    assert figures["jct_s"] == [None]
    assert figures["flop"] == pytest.approx(500)


def test_under_muri_a_second_job_runs_in_the_gaps_of_the_first_and_gpus_count_once() -> None:
    """Each job computes while the other sends: two iterations in 2 s. In turn, the second ends at 400 s."""
    jobs = [a_job("a"), a_job("b")]
    in_turn, _ = simulate_trace(on_a_host(), jobs)
    assert in_turn.jct_s == pytest.approx([200, 400])
    request = on_a_host("muri")
    result, owner = simulate_trace(request, jobs)
    assert owner == {"a": "a", "b": "a"}
    assert result.jct_s == pytest.approx([200, 200], rel=0.05)
    figures = summarize_run(request.workload, jobs, result, owner)
    assert figures["computing_of_held"] == pytest.approx(1.0, rel=0.05)
    assert figures["shared"] == 1


def test_under_muri_the_remaining_job_continues_alone_and_keeps_the_gpus() -> None:
    """An iteration of both takes max(1, 0.2) + max(4, 1) = 5 s, and one of b alone 1.2 s.

    Job a sends for 4 s and job b for 0.2 s.
    """
    jobs = [a_job("a", iterations=20, comm_s=4.0), a_job("b", comm_s=0.2)]
    result, owner = simulate_trace(on_a_host("muri"), jobs)
    assert result.end_s[0] == pytest.approx(100, rel=0.05)
    assert result.end_s[1] == pytest.approx(100 + (100 - 20) * 1.2, rel=0.05)
    assert owner["b"] == "a"


def test_muri_does_not_pair_jobs_that_would_only_take_turns_or_differ_in_gpus() -> None:
    jobs = [a_job("a", comm_s=0.0), a_job("b", comm_s=0.0), a_job("small", gpus=4)]
    result, owner = simulate_trace(on_a_host("muri"), jobs)
    assert result.start_s[1] == pytest.approx(100)
    assert owner == {"a": "a", "b": "b", "small": "small"}


def test_a_mismeasured_job_has_all_its_traffic_scaled_by_one_factor() -> None:
    network = ContentionNetwork(two_layer(4))
    gang = Gang(members=((0, tuple(range(8))), (2, tuple(range(8)))))
    traffic = a_job("a", gpus=16).traffic
    part = network.part("a", traffic, gang)
    seen = mismeasure_times(part, 0.2, 0)
    factor = seen.bundle_bytes / part.bundle_bytes
    assert np.ptp(factor) < 1e-12
    assert factor[0] != 1
    assert seen.fixed_bytes / part.fixed_bytes == pytest.approx(factor[0])
    assert mismeasure_times(part, 0.2, 0).bundle_bytes.tolist() == seen.bundle_bytes.tolist()
    assert mismeasure_times(part, 0.0, 0) is part
    inside = a_job("a").traffic
    drawn = [
        float(mismeasure_times(network.part(f"{n}", inside, EIGHT), 0.2, 0).fixed_bytes[0])
        for n in range(200)
    ]
    exact = float(network.part("0", inside, EIGHT).fixed_bytes[0])
    assert np.mean(drawn) / exact == pytest.approx(1, abs=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.2, abs=0.03)


def test_storage_takes_its_share_only_of_links_beyond_hosts() -> None:
    whole, less = (
        ContentionNetwork(two_layer(4), share).part("a", a_job("a").traffic, EIGHT)
        for share in (0.0, 0.25)
    )
    ratio = less.link_bytes_per_s / whole.link_bytes_per_s
    assert set(np.round(ratio, 9).tolist()) == {0.75, 1.0}
    v, e = two_layer(4).vertices, two_layer(4).links
    inside = (v.host[e.source] >= 0) & (v.host[e.target] >= 0)
    assert (ratio[inside] == 1).all()
    assert (ratio[~inside] == 0.75).all()


def test_scenarios_use_each_gpu_once_and_as_many_as_in_the_paper() -> None:
    sizes = {}
    for scenario in SCENARIOS:
        held = [(h, g) for _, _, gang in scenario.jobs for h, at in gang for g in at]
        assert len(set(held)) == len(held)
        assert max(h for h, _ in held) < 12
        sizes[scenario.name] = sorted(job.gpus for job in scenario.network_jobs())
    assert sizes["four-job mix"] == [8, 8, 16, 16, 48]
    assert sizes["paths, 3 BERT"] == [8, 8, 8, 32]


def test_without_overlap_every_job_sends_after_it_has_computed() -> None:
    for job in SCENARIOS[0].network_jobs(6, hidden=False):
        assert job.traffic.start_s == job.traffic.compute_s


def test_figures_compare_with_ecmp_and_with_one_level_per_job() -> None:
    def a_run(flop: float, jct_s: list[float | None]) -> dict[str, object]:
        return played_like | {"flop": flop, "of_held": flop / 1e3, "jct_s": jct_s}

    request, jobs = on_a_host(), [a_job("a")]
    played_like = summarize_run(request.workload, jobs, *simulate_trace(request, jobs))
    runs = {
        replace(request, mechanism="ecmp"): a_run(100.0, [5.0, 9.0, None]),
        replace(request, mechanism="taccl*"): a_run(110.0, [5.0, 6.0, 7.0]),
        replace(request, mechanism="crux-ps-pa"): a_run(121.0, [4.0, None, 7.0]),
        replace(request, mechanism="crux-paper"): a_run(120.0, [4.0, 6.0, 7.0])
        | {"beside_flop": {"ecmp": 96.0, "taccl*": 100.0, "crux-ps-pa": 125.0, "noise 0.1": 114.0}},
    }
    figures = trace_figures(runs)
    assert figures["clos_crux_gain"] == pytest.approx(0.2)
    assert figures["clos_crux_gain_over_best_other"] == pytest.approx(120 / 110 - 1)
    assert figures["clos_crux_points"] == pytest.approx(2.0)
    assert figures["compression_loss"] == pytest.approx(0.04)
    assert figures["clos_beside_ecmp_gain"] == pytest.approx(0.25)
    assert figures["clos_beside_taccl_gain"] == pytest.approx(0.2)
    assert figures["noise_0.1_loss"] == pytest.approx(0.05)
    table = run_rows(runs)
    # the means of the first run only
    assert [row["jct_mean_s"] for row in table] == [5.0, 5.0, 4.0, 4.0]
    assert table[1]["gain"] == pytest.approx(0.1)


def test_meaningless_workloads_and_schedulers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="workload"):
        TraceWorkload(days=0)
    with pytest.raises(InvalidInput, match="swing"):
        TraceWorkload(swing=2)
    with pytest.raises(InvalidInput, match="scheduler"):
        simulate_trace(on_a_host("yarn"), [a_job("a")])


def test_a_drawn_trace_runs_and_the_mechanism_does_not_change_its_jobs() -> None:
    small = {"days": 0.05, "jobs_a_day": 300.0, "gpus": 64, "largest": 32}
    runs = [
        play_trace(fabric="double-sided", mechanism=name, workload=small)
        for name in ("ecmp", "crux-paper")
    ]
    assert runs[0]["statistics"]["jobs"] == runs[1]["statistics"]["jobs"] > 5
    assert runs[1]["flop"] >= runs[0]["flop"] * (1 - 1e-3)


@pytest.mark.full  # `make bench` runs the same cases and checks their bounds
def test_small_runs_of_both_benchmarks_keep_their_bounds() -> None:
    for name in ("network-trace", "network-testbed"):
        result = run_case(find_cases()[name], find_cases()[name].smoke, ["bench"])
        assert result["ok"]
        assert result["table"]
