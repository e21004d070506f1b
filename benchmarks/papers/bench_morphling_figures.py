"""The figures of Morphling's evaluation, repeated with our code on its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.options import RoundsOption, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.papers.bench_morphling import OURS, TICK_S, USUAL_ROUNDS
from tessera.benchmarks.papers.morphling_figures import pairs, runs, shrinking
from tessera.benchmarks.papers.morphling_figures.records import FIGURE_SET
from tessera.benchmarks.papers.morphling_figures.runs import Row
from tessera.benchmarks.schedulers.bench_load import points_of, run_points
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.comparison.policies import is_ours
from tessera.simulator.comparison.runs import RunRequest
from tessera.simulator.comparison.workload import WorkloadSpec
from tessera.simulator.data import require_data_file
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.traces.morphling import read_measured, read_resources

BASE_TRACE: Final = "morphling-base"
LOADS, LARGES = "0.5,1,2", "0.25,0.5,0.75"

_SWEEP_BOUNDS: Final = ("figure10_least_jct_ratio", "figure11_least_jct_ratio")
"""Bounds that hold for our usual policy on the whole trace."""

Part = tuple[dict[str, Figure], list[Row]]
"""The figures and the rows of a part of the report."""


@register_case(
    "morphling-figures",
    smoke={
        "rounds": 12,
        "loads": "1",
        "larges": "0.5",
        "ours": "greedy:jct",
        "workers": 0,
    },
    figure3_regret=("<=", 1e-9),
    figure3_only_offload_runs=("==", 1),
    figure3_offload_fails=("==", 1),
    figure7_regret=("<=", 0.02),
    figure7_unseen_regret=("<=", 0.02),
    figure7_measured_regret=("<=", 0.02),
    figure7_memory_mistakes=("==", 0),
    figure8_gain=(">=", 0.8),
    figure8_sound_gain=(">=", 0.3),
    figure10_least_jct_ratio=(">=", 1.0),
    figure11_least_jct_ratio=(">=", 1.0),
    figure10_unfinished=("==", 0),
    figure11_unfinished=("==", 0),
)
@with_sweep
def repeat_morphling_figures(
    *,
    ours: Annotated[str, typer.Option(help="Policy of ours on the traces.")] = OURS,
    loads: Annotated[str, typer.Option(help="Factors on the arrival rate.")] = LOADS,
    larges: Annotated[str, typer.Option(help="Shares of large models.")] = LARGES,
    rounds: RoundsOption = USUAL_ROUNDS,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Repeat figures of Morphling's evaluation with our rounds, models and traces.

    Speeds are the measurements of Morphling's artifact on A800. Jobs in Figures 3, 7 and 8 are
    decided by our program for throughput, in a round on the stated part of a cluster. The text of
    the paper lacks the drawings, so that its numbers are those of its text, and of the artifact's
    tables.

    **Figure 3.** RoBERTa and T5 under shrinking limits, decided by the measured times. The paper's
    larger T5 can run on one GPU only with ZeRO-Offload, and not with 10 GB of host memory. That is
    true of T5-3B (``figure3_only_offload_runs``, ``figure3_offload_fails``). T5-1.2B was also
    measured on one GPU without it. ``figure3_*_gap`` is the largest ratio of speeds of plan families
    in a step; the paper has 1.7 for T5 and 2.7 for RoBERTa.

    **Figure 7.** LLaMA-2-7B from 32 GPUs to 1, and then with twice the CPUs. ``regret`` is the speed
    lost against the best measured plan. ``figure7_regret`` is the largest one if rounds see
    estimates of our performance model, fitted to seven runs of each model, without those on the
    step's own number of GPUs. ``figure7_unseen_regret`` is the same without any run of this set: the
    other sets have LLaMA-7B with another batch. Our memory model says which plans run, and
    ``figure7_memory_mistakes`` counts its errors. ``figure7_measured_regret`` is that of rounds that
    see the measured table, which is also what scores. The aim is 0.02. Nothing is fitted to scored
    points, but we saw this figure with earlier forms of the model, which lost 0.125 and 0.105. Two
    mistakes were found by it: stages on one node used the network, and plans without a pipeline had
    no micro-batches. ``figure7_over_paper`` is the largest excess of a choice by measurements over
    Morphling's. ``figure7_cpu_speedup`` is the gain by the CPUs: 1.43 in the artifact's measurements,
    and 1.7 in the paper's text.

    **Figure 8.** RoBERTa and T5-3B on 4 GPUs, as speed-ups over a rigid plan on all four, added up.
    ``figure8_gain`` compares our program with 2 GPUs for each job. The paper has 1.44 against 0.78, a
    gain of 0.85. The data have a defect: RoBERTa on one GPU is as fast as on two.
    ``figure8_sound_*`` leaves these points out. T5-3B's step from 2 to 3 GPUs, 3.8 times faster, is
    taken as measured, although 3 does not divide its attention heads.

    **Figures 10 and 11.** The base trace with jobs that arrive faster, and with more large models
    (``tessera bench load``). ``*_jct_ratio`` is Synergy's mean JCT over ours, and ``peer`` that over
    our implementation of Morphling's algorithm. The paper has up to 3.5 (JCT) and 1.4 (makespan) by
    load, and 2.6 to 3.4 by large models. It does not state its loads and shares. Our objective lets
    short jobs go first, which explains most of our ratio. All points use all 406 jobs and 64 GPUs.
    """
    if not is_ours(ours):
        raise InvalidInput("ours", f"{ours!r} is not ours; write ilp:OBJECTIVE, e.g. ilp:jct")
    folder = require_data_file("morphling", "measured.csv").parent
    records = read_measured(folder / "measured.csv", read_resources(folder / "plan_resources.csv"))
    asked = RunRequest(
        work=WorkloadSpec(trace=BASE_TRACE, rounds=rounds, seed=seed),
        policy="",
        overheads="morphling",
        round_s=TICK_S,
    )
    parts = [
        _shrinking(records, folder),
        _pairs(records),
        _sweeps(asked, (loads, larges), ours, sweep),
    ]
    figures: dict[str, Figure] = {}
    for own, _ in parts:
        figures |= own
    every = [row for _, rows in parts for row in rows]
    is_usual = rounds >= USUAL_ROUNDS and ours == OURS
    waived = frozenset() if is_usual else frozenset(_SWEEP_BOUNDS)
    return Report(seed=seed, figures=figures, table=every, waived=waived)


def _of_model(records: Sequence[EstimateRecord], model: str) -> list[EstimateRecord]:
    return [record for record in records if record.workload.model == model]


def _shrinking(records: Sequence[EstimateRecord], folder: Path) -> Part:
    """Return Figures 3 and 7."""
    by_model = {
        model: shrinking.shrink_by_measurements(shrinking.FIGURE_3_STEPS, _of_model(records, model))
        for model in shrinking.FIGURE_3_MODELS
    }
    llama = _of_model(records, FIGURE_SET)
    measured = shrinking.shrink_by_measurements(shrinking.FIGURE_7_STEPS, llama)
    honest, unseen = shrinking.shrink_by_estimates(shrinking.FIGURE_7_STEPS, llama, folder)
    rows = [step.row("3", model) for model, steps in by_model.items() for step in steps]
    rows += [step.row("7", "by estimates") for step in honest]
    rows += [step.row("7", "by estimates without its own runs") for step in unseen]
    rows += [step.row("7", "by measurements") for step in measured]
    figures = {
        **shrinking.figure_3_figures(by_model),
        **shrinking.figure_7_figures(honest, unseen, measured),
        "figure7_memory_mistakes": shrinking.memory_mistakes(llama),
    }
    return figures, rows


def _pairs(records: Sequence[EstimateRecord]) -> Part:
    roberta, t5 = (_of_model(records, model) for model in pairs.PAIR_MODELS)
    sound = pairs.without_defect(roberta)
    shared = {
        "ours": pairs.share_gpus([roberta, t5]),
        "equal split": pairs.share_gpus([roberta, t5], gpus_each=2),
        "ours, without the defective points": pairs.share_gpus([sound, t5]),
        "equal split, without the defective points": pairs.share_gpus([sound, t5], gpus_each=2),
    }
    figures = pairs.figure_8_figures(*shared.values())
    return figures, [one.row(name) for name, one in shared.items()]


def _sweeps(asked: RunRequest, points: tuple[str, str], ours: str, sweep: Sweep) -> Part:
    """Return Figures 10 and 11."""
    loads, larges = points
    result = run_points(
        asked,
        {"load": points_of("loads", loads), "large": points_of("larges", larges)},
        [*runs.SWEEP_POLICIES, ours],
        range(asked.work.seed, asked.work.seed + 1),
        sweep,
    )
    return runs.sweep_figures(result, ours), runs.sweep_rows(result, ours)
