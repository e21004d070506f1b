"""Named clusters, as described in the papers."""

from __future__ import annotations

from collections import Counter

import pytest

from tessera.estimator.hardware import ALL, CATALOGUE
from tessera.estimator.samples import sample_profiles
from tessera.formulation.errors import InvalidInput
from tessera.simulator.clusters import PRESETS, hardware_of, preset_cluster


def nodes_and_gpus(name: str, share: float = 1.0) -> dict[str, tuple[int, int]]:
    """Return the numbers of nodes and GPUs of each type."""
    _, nodes = preset_cluster(name, share)
    count = Counter(n.gpu_type for n in nodes)
    return {t: (n, sum(x.gpus for x in nodes if x.gpu_type == t)) for t, n in count.items()}


def test_the_presets_have_the_papers_nodes_and_gpus() -> None:
    assert {name: nodes_and_gpus(name) for name in PRESETS} == {
        "arena-1280": {"a100": (80, 320), "v100": (20, 320), "a40": (160, 320), "a10": (160, 320)},
        "testbed-a": {"a40": (16, 32), "a10": (16, 32)},
        "testbed-b": {"h100": (16, 128), "l20": (16, 256)},
        "h100-128": {"h100": (16, 128)},
        "a800-64": {"a800": (8, 64)},
        "tiny": {"a100": (4, 16), "v100": (1, 16), "a40": (8, 16), "a10": (8, 16)},
    }


def test_a_share_keeps_that_part_of_each_type_but_at_least_one_node() -> None:
    assert nodes_and_gpus("testbed-b", 0.25) == {"h100": (4, 32), "l20": (4, 64)}
    assert nodes_and_gpus("arena-1280", 0.01) == {
        "a100": (1, 4),
        "v100": (1, 16),
        "a40": (2, 4),
        "a10": (2, 4),
    }


@pytest.mark.parametrize(("name", "share"), [("lab", 1.0), ("testbed-a", 0.0), ("testbed-a", -1.0)])
def test_an_unknown_cluster_is_refused(name: str, share: float) -> None:
    with pytest.raises(InvalidInput):
        preset_cluster(name, share)


def test_every_gpu_type_has_a_unique_name_and_presets_use_known_types() -> None:
    assert len({kind.name for kind in CATALOGUE}) == len(CATALOGUE)
    assert set(CATALOGUE[: len(ALL)]) == set(ALL)
    assert {kind for name in PRESETS for kind in hardware_of(name)} <= set(CATALOGUE)


def test_newer_gpus_run_the_same_cells_faster_in_sample_profiles() -> None:
    kinds = {kind.name: kind for kind in CATALOGUE}
    pair = sample_profiles([kinds["h100"], kinds["a100"]], gpu_counts=[8])
    best: dict[tuple[str, str], float] = {}
    for e in pair:
        key = (e.workload.key, e.cell.gpu_type)
        best[key] = min(best.get(key, float("inf")), e.iter_time_s)
    works = {work for work, _ in best}
    assert works
    assert all(best[work, "h100"] < best[work, "a100"] for work in works)
