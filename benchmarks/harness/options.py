"""The options that simulation benchmarks share, and the values built from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.options import with_options
from tessera.simulator.comparison.policies import INFORMATION, split_list
from tessera.simulator.comparison.workload import SYNTHETIC, OnBad, WorkloadSpec, default_trace
from tessera.simulator.figures import Report
from tessera.simulator.sweeps.runner import sweep_of_options
from tessera.simulator.workloads.published import NAMES

TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        help=f"CSV of a trace, or one of {', '.join((*NAMES, SYNTHETIC))}. Default: Philly.",
    ),
]
ProfilesOption = Annotated[
    Path | None, typer.Option("--profiles", help="CSV of profiles. Default: those of the trace.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", help="Name of a cluster of the papers. Default: the trace's."),
]
GpusShareOption = Annotated[
    float, typer.Option("--gpus-share", help="Share of the cluster's GPUs to use.")
]
JobsShareOption = Annotated[
    float, typer.Option("--jobs-share", help="Share of the trace's jobs to use, drawn by seed.")
]
RoundsOption = Annotated[
    int,
    typer.Option("--rounds", min=1, help="Horizon, in rounds of 300 s. Jobs arrive before it."),
]
JobsOption = Annotated[int, typer.Option("--jobs", help="Number of synthetic jobs.")]
LoadOption = Annotated[float, typer.Option("--load", help="Load of synthetic jobs on the GPUs.")]
OnBadOption = Annotated[
    OnBad, typer.Option("--on-bad", help="Treatment of jobs that cannot run as requested.")
]
PoliciesOption = Annotated[
    str,
    typer.Option(
        "--policies",
        help="Comma-separated policies. ilp:OBJECTIVE and greedy:OBJECTIVE are ours, and MODULE:CLASS"
        " is a scheduler of your own.",
    ),
]
InformationOption = Annotated[
    str,
    typer.Option(
        "--information", help=f"Information that all policies see: one of {', '.join(INFORMATION)}."
    ),
]
OverheadsOption = Annotated[
    str, typer.Option("--overheads", help="Costs of restarts, by name; see simulator/overheads.py.")
]
BaselinesOption = Annotated[
    str, typer.Option("--baselines", help="Comma-separated published schedulers to compare with.")
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, help="Number of runs, each with other jobs.")
]


def work_options(
    *,
    trace: TraceOption = None,
    profiles: ProfilesOption = None,
    cluster: ClusterOption = None,
    rounds: RoundsOption = 2000,
    on_bad: OnBadOption = "drop",
    seed: int = 0,
) -> WorkloadSpec:
    """Return the workload that the options describe, with its sizes left at their defaults."""
    return WorkloadSpec(
        trace=default_trace(trace),
        profiles=str(profiles or ""),
        cluster=cluster or "",
        rounds=rounds,
        on_bad=on_bad,
        seed=seed,
    )


def with_work(run: Callable[..., Report]) -> Callable[..., Report]:
    """Give a case the options of a workload in place of its parameter ``work``."""
    return with_options(run, "work", work_options)


def with_sweep(run: Callable[..., Report]) -> Callable[..., Report]:
    """Give a case the options of a sweep in place of its parameter ``sweep``."""
    return with_options(run, "sweep", sweep_of_options)


def parse_number_list(
    where: str, text: str, fits: Callable[[float], bool], what: str
) -> tuple[float, ...]:
    """Return the distinct numbers of a comma-separated list, in ascending order.

    Raises:
        InvalidInput: a part is not a number or does not fit; the message demands ``what``.
    """
    try:
        result = sorted({float(part) for part in split_list(text)})
    except ValueError:
        result = []
    if not result or not all(fits(one) for one in result):
        raise InvalidInput(where, f"must be comma-separated {what}, not {text!r}")
    return tuple(result)
