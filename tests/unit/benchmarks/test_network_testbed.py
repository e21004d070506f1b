"""Crux's testbed: its models against published counts and hand-computed values, and its scenarios."""

from __future__ import annotations

import pytest

from tessera.benchmarks.network import families
from tessera.benchmarks.network.families import FAMILIES, GPT, family_traffic
from tessera.benchmarks.network.scenarios import SCENARIOS
from tessera.estimator.graph import Graph

GPU = "a100-80"


@pytest.mark.parametrize(
    ("graph", "millions"),
    [(families._resnet(50), 25.6), (families._resnet(152), 60.2), (families._gpt(), 1_700)],
)
def test_graphs_have_the_published_numbers_of_parameters(graph: Graph, millions: float) -> None:
    assert graph.parameters / 1e6 == pytest.approx(millions, rel=0.035)


@pytest.mark.parametrize("name", FAMILIES)
def test_work_grows_with_the_gpus_while_the_iteration_time_stays(name: str) -> None:
    one, two = (family_traffic(name, GPU, gpus) for gpus in (8, 16))
    assert (one.gpus, two.gpus) == (8, 16)
    assert two.work_flop == pytest.approx(2 * one.work_flop)
    assert two.compute_s == pytest.approx(one.compute_s, rel=1e-6)
    assert two.traffic().exchanges


def test_bert_sends_twice_its_gradients_and_begins_with_the_backward_pass() -> None:
    traffic = family_traffic("bert", GPU, 16)
    gradient_bytes = 2 * 336_297_858  # 16 bits
    assert traffic.stages[0].data[0] == pytest.approx(2 * gradient_bytes * 15 / 16, rel=1e-6)
    assert 0.25 < traffic.start_s / traffic.compute_s < 0.4  # forward: a third, less the update


def test_gpt_does_the_published_work_for_its_batch() -> None:
    traffic = family_traffic(GPT, GPU, 32)
    block = 96 * 512 * 2048 * 24 * 2304**2
    others = 2048 / (6 * 2304) + 51_200 / (16 * 24 * 2304)
    # Narayanan et al., SC 2021, section 5.1
    assert traffic.work_flop == pytest.approx(block * (1 + others), rel=0.05)


def test_gpts_gradients_wait_for_compute_and_fewer_sequences_take_less_time() -> None:
    whole, half = family_traffic(GPT, GPU, 32), family_traffic(GPT, GPU, 32, 8)
    assert whole.start_s == whole.compute_s
    assert half.compute_s / whole.compute_s == pytest.approx(0.5, rel=0.02)
    assert half.stages[0].data == whole.stages[0].data


def test_scenarios_have_the_papers_gpus_and_share_none() -> None:
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
