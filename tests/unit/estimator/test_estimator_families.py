"""Traffic of the model families, against published counts and hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.estimator import families as module
from tessera.estimator.families import GPT_SIZES, family_traffic, gpt_traffic, known_families
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import CATALOGUE
from tessera.formulation.errors import InvalidInput

GPU = "a100-80"


@pytest.mark.parametrize(
    ("graph", "millions"),
    [
        (module._nmt("big", 1024, 16), 213),
        (module._nmt("base", 512, 8), 65),
        (module._resnet(50), 25.6),
        (module._resnet(152), 60.2),
        (module._bert_base(), 110),
        *(
            (module._gpt(size), m)
            for size, m in zip(GPT_SIZES, (1_700, 3_600, 7_500, 18_400, 39_100), strict=True)
        ),
    ],
)
def test_graphs_have_the_published_numbers_of_parameters(graph: Graph, millions: float) -> None:
    assert graph.parameters / 1e6 == pytest.approx(millions, rel=0.035)


def test_every_family_runs_on_one_host_and_on_two_and_names_its_source_and_overlap() -> None:
    assert len(known_families()) >= 11  # Crux has eleven models
    for name, family in known_families().items():
        assert family.source
        assert family.overlap
        for gpus in (8, 16):
            traffic = family_traffic(name, GPU, gpus)
            assert traffic.gpus == gpus
            assert 0 <= traffic.start_s <= traffic.compute_s
            assert traffic.traffic().exchanges


def test_work_grows_with_the_gpus_while_the_iteration_time_stays() -> None:
    for name in ("bert", "resnet", "nmt", "multi-interests", "ctr"):
        one, two = (family_traffic(name, GPU, gpus) for gpus in (8, 16))
        assert two.work_flop == pytest.approx(2 * one.work_flop)
        assert two.compute_s == pytest.approx(one.compute_s, rel=1e-6)


def test_bert_sends_twice_its_gradients_and_begins_with_the_backward_pass() -> None:
    traffic = family_traffic("bert", GPU, 16)
    gradient_bytes = 2 * 336_297_858  # 16 bits
    assert traffic.stages[0].data[0] == pytest.approx(2 * gradient_bytes * 15 / 16, rel=1e-6)
    assert 0.25 < traffic.start_s / traffic.compute_s < 0.4  # forward: a third, less the update


def test_gpt_uses_the_published_size_and_plan_for_its_gpu_count() -> None:
    for size in GPT_SIZES:
        traffic = family_traffic("gpt", GPU, size.gpus)
        assert len(traffic.stages) == size.stages
        assert {stage.tp for stage in traffic.stages} == {size.tp}
        assert not any(stage.tensor[0] for stage in traffic.stages)  # it is counted as compute
        block = 96 * size.batch * 2048 * size.layers * size.hidden**2
        others = 2048 / (6 * size.hidden) + 51_200 / (16 * size.layers * size.hidden)
        # Narayanan et al., SC 2021, section 5.1
        assert traffic.work_flop == pytest.approx(block * (1 + others), rel=0.05)
    assert family_traffic("gpt", GPU, 48).stages[0].tp == 1


def test_gpts_gradients_wait_for_compute_and_fewer_sequences_take_less_time() -> None:
    hardware = next(h for h in CATALOGUE if h.name == GPU)
    whole, half = gpt_traffic(hardware, 32), gpt_traffic(hardware, 32, 8)
    assert whole.start_s == whole.compute_s
    assert half.compute_s / whole.compute_s == pytest.approx(0.5, rel=0.02)
    assert half.stages[0].data == whole.stages[0].data


def test_compute_waits_for_tensor_group_reductions_at_nvlink_bandwidth() -> None:
    """Each replica of 4 GPUs has 16 samples; each layer reduces twice in each of three passes.

    An all-reduce sends 3 / 2 of its payload. The model has 7.5 B parameters on 128 GPUs.
    """
    hardware = next(h for h in CATALOGUE if h.name == GPU)
    twice = replace(hardware, link_bytes_per_s=2 * hardware.link_bytes_per_s)
    saved_s = gpt_traffic(hardware, 128).compute_s - gpt_traffic(twice, 128).compute_s
    sent_bytes = 16 * 2048 * 4096 * 2 * 36 * 2 * 3 * 1.5
    assert saved_s == pytest.approx(sent_bytes / hardware.link_bytes_per_s / 2, rel=0.05)


def test_recommenders_send_rows_to_all_gpus_and_hide_no_communication() -> None:
    traffic = family_traffic("multi-interests", GPU, 16)
    assert traffic.start_s == traffic.compute_s
    assert traffic.compute_s == pytest.approx((105.8e9 / 156e12 + 100.4e9 / 2039e9) / 0.7)
    assert traffic.stages[0].expert[0] * 16 == pytest.approx(122e6)


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "what"),
    [
        ("llama", GPU, 8, "family"),
        ("bert", "abacus", 8, "gpu_type"),
        ("bert", GPU, 12, "gpus"),
        ("ctr", GPU, 64, "gpus"),
        ("gpt", GPU, 4, "gpus"),
    ],
)
def test_unknown_families_are_refused(name: str, gpu: str, gpus: int, what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        family_traffic(name, gpu, gpus)
