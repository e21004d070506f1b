"""The listing of plans, by hand-counted cases, and a small run of the comparison with it."""

from __future__ import annotations

import numpy as np

from tessera.benchmarks.estimator.bench_plan_search import judge_plan_search
from tessera.benchmarks.estimator.drawn_settings import draw_setting
from tessera.benchmarks.estimator.listed_stages import PlanList, list_divisions, list_switches
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.hardware import A100
from tessera.estimator.memory import States
from tessera.estimator.plans import Shape, Training


def four_blocks_on_four_gpus() -> Setting:
    """Return six layers, of which the first and the last are no blocks, and six samples."""
    graph = transformer_graph(
        Transformer(name="small", layers=4, hidden=64, heads=4, sequence=64, vocabulary=512)
    )
    assert len(graph) == 6
    shape = Shape(nodes=1, gpus_per_node=4)
    return data_sheet_setting(graph, Training(global_batch=6), A100, shape, States())


def test_all_divisions_of_a_small_model_are_listed_once() -> None:
    setting = four_blocks_on_four_gpus()
    counts = {
        degree: [(stages.chunks, len(stages.rows)) for stages in list_divisions(setting, degree)]
        for degree in (1, 2, 3, 4)
    }
    # One stage: dp4, and dp2 tp2 and tp4, each with and without sequence parallelism.
    # Two stages: five cuts, two GPUs each, as dp2, tp2, or tp2 with sequence parallelism.
    # Three stages: ten pairs of cuts, and any stage may have two GPUs. Four stages: ten triples.
    # Two chunks are possible for two stages only, since each has at least one of the four blocks.
    assert counts == {1: [(1, 5)], 2: [(1, 45), (2, 3)], 3: [(1, 90)], 4: [(1, 10)]}
    for degree in counts:
        for stages in list_divisions(setting, degree):
            assert len(np.unique(stages.rows, axis=0)) == len(stages.rows)
    assert len(list(list_switches(setting))) == 4 * 4 * 3  # micro-batches of 6, 3, 2 and 1 samples


def test_the_fastest_listed_plan_is_the_fastest_of_all_that_fit() -> None:
    setting = draw_setting(np.random.default_rng(8))
    (stages, *_) = list_divisions(setting, 2)
    for switches in list(list_switches(setting))[::5]:
        plans = PlanList(setting, stages, stages.candidates, *switches)
        prices = [price for i in range(len(plans.rows)) if (price := plans.price(i)) is not None]
        times_s = [price.iter_time_s for price in prices if price.overflow is None]
        best = plans.fastest(np.inf)
        assert (best.iter_time_s if best else np.inf) == min(times_s, default=np.inf)


def test_a_small_run_compares_old_and_listed_plans() -> None:
    figures = judge_plan_search(cases=1).figures
    assert figures["exhaustive_cases"] == 1
    assert figures["cells_compared"] >= 1
    zero_figures = ("worse_than_old", "worse_than_exhaustive", "infeasible_but_feasible")
    assert all(figures[name] == 0 for name in zero_figures)
    assert "models_jax" not in figures
