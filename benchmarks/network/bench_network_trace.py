"""A trace on Crux's two simulated networks, under each mechanism and job scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import parse_number_list, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.network.fabrics import FABRICS
from tessera.benchmarks.network.traces import SCHEDULERS, SimulatedTrace
from tessera.benchmarks.network.workload import DAY_S, TraceWorkload
from tessera.simulator.comparison.policies import split_list
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.solvers.network.mechanisms import mechanism_names

FIRST_FIT: Final = "first-fit"
"""The placement that stands for no job scheduler of the paper."""
PLAIN, UNCOMPRESSED, OURS = "crux-paper", "crux-ps-pa", "crux-full"
STACKED_MECHANISMS: Final = f"ecmp,{PLAIN},{OURS}"
_SHOWN: Final = (
    "of_all",
    "of_held",
    "computing_of_held",
    "flop",
    "held_share",
    "ended",
    "slowdown",
    "worst_slowdown",
    "link_use",
    "busiest_link_use",
    "shared",
    "plans",
    "slowest_plan_s",
)
_STATISTICS: Final = (
    "jobs",
    "jobs_of_128",
    "largest",
    "peak_gpus",
    "peak_jobs",
    "contended_jobs",
    "contended_gpus",
    "contended_gpu_time",
)

Runs = Mapping[SimulatedTrace, Mapping[str, Any]]


@register_case(
    "network-trace",
    smoke={
        "days": 0.04,
        "gpus": 128,
        "jobs_a_day": 400,
        "largest": 64,
        "noises": "0.1",
        "workers": 0,
        "mechanisms": "ecmp,crux-ps-pa,crux-paper",
        "stacked": "ecmp,crux-paper",
    },
    compression_loss=("<=", 0.005),
)
@with_sweep
def network_trace(
    *,
    days: Annotated[
        float, typer.Option(help="Length of the trace in days; Crux's has 14.", min=0.0)
    ] = 0.5,
    jobs_a_day: Annotated[
        float, typer.Option(help="Number of jobs that arrive in a day.", min=0.0)
    ] = 360.0,
    gpus: Annotated[int, typer.Option(help="Number of GPUs, 8 on each host.", min=8)] = 2_000,
    demand: Annotated[
        float, typer.Option(help="Average share of the GPUs that jobs request.")
    ] = 0.6,
    largest: Annotated[int, typer.Option(help="GPUs of the largest job.", min=1)] = 512,
    levels: Annotated[int, typer.Option(help="Number of priority levels.", min=1, max=8)] = 8,
    mechanisms: Annotated[str, typer.Option(help="Comma-separated mechanisms.")] = ",".join(
        mechanism_names()
    ),
    stacked: Annotated[
        str, typer.Option(help="Comma-separated mechanisms to run under job schedulers.")
    ] = STACKED_MECHANISMS,
    fabrics: Annotated[str, typer.Option(help="Comma-separated networks.")] = ",".join(FABRICS),
    schedulers: Annotated[
        str, typer.Option(help="Comma-separated job schedulers on the first network. Empty: none.")
    ] = ("hived,muri"),
    beside: Annotated[
        str,
        typer.Option(
            help="Comma-separated mechanisms to judge on the jobs of plain Crux at each time. Empty: none."
        ),
    ] = f"ecmp,{UNCOMPRESSED}",
    noises: Annotated[
        str,
        typer.Option(
            help="Comma-separated errors of t, judged in the same way on the first network."
        ),
    ] = "0.05,0.1,0.2",
    background: Annotated[
        float, typer.Option(help="Share of the links beyond hosts that storage uses.", min=0.0)
    ] = 0.0,
    speed: Annotated[
        float, typer.Option(help="Factor on the speed of links between switches.")
    ] = 1.0,
    window: Annotated[
        float,
        typer.Option(
            help="Number of iterations of the longest job for which jobs that share links are simulated."
        ),
    ] = 20.0,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Run jobs that arrive and end over two weeks, or over their first hours, on 2,000 GPUs (Crux 6).

    Networks: a two-layer Clos of 173 ToRs and 16 aggregation switches, 100 Gb/s a cable; a
    double-sided one of 6 ToRs, 12 aggregation switches and 32 cores, 2 : 1 oversubscribed at its
    ToRs. Our sources on the paper give no link speeds, wiring, placement, sizes of models or
    batches, so its absolute figures cannot be reproduced. Hosts are those of its testbed.
    Everything else is ours and is defined in ``benchmarks/network`` (``fabrics.py``,
    ``workload.py``) and ``estimator/families.py``. Jobs are drawn by seed, and every run has the
    same ones. They are placed first fit; on the first network also by HiveD, and by Muri, adapted
    to whole GPUs. A plan follows each start and end. The work done until the days are over counts:
    the paper's U_T.

    In the table, ``of_all`` is the flop done over the peak of all GPUs, ``of_held`` over that of
    the GPUs that jobs held, and ``computing_of_held`` the share of their time in which they
    computed. ``gain`` is the flop done over that of ECMP under the same scheduler, less 1.
    ``jct_mean_s`` and ``jct_p95_s`` are of the jobs that ended in all runs of that network and
    scheduler. ``slowdown`` is relative to the job alone on the same paths, so it does not include
    collisions among a job's own flows. ``link_use`` is over the links that were ever used.
    ``contended_*``: the jobs that ever shared a link, their share of the requested GPUs, and the
    GPU time in which they did. ``stale`` is the share of time that planning took, during which the
    previous plan would still be in force.

    Which jobs run together changes when a job ends a little earlier, so two runs also differ by
    chance. Therefore, further mechanisms are judged under plain Crux at each time, on exactly the
    jobs that then run, and so is its own plan when t is wrong by a factor that each job keeps all
    its life (``noises``: the standard deviation of its logarithm).

    Figures: gains of plain Crux (``crux``) and of ours (``ours``: paths and orders of small groups
    tried on the engine) over ECMP and over the best other mechanism, by network; points of
    ``of_held``, as the paper counts; the gain under each job scheduler. On the same jobs at the
    same times: ``compression_loss`` (at most 0.005), the largest share of flop lost to ``levels``
    compared with a level for each job; ``noise_*_loss``; ``*_beside_ecmp_gain`` of plain Crux.
    """
    workload = TraceWorkload(
        days=days, jobs_a_day=jobs_a_day, gpus=gpus, demand=demand, largest=largest, seed=seed
    )
    alone, under = split_list(mechanisms, mechanism_names()), split_list(stacked, mechanism_names())
    nets = split_list(fabrics, tuple(FABRICS))
    stack = split_list(schedulers, SCHEDULERS) if schedulers else []
    errors = [
        n
        for n in parse_number_list(
            "--noises", noises, lambda n: 0 <= n < 1, "numbers from 0 to below 1"
        )
        if n > 0
    ]
    judged = tuple(split_list(beside, mechanism_names())) if beside else ()

    def asked(fabric: str, name: str, scheduler: str = FIRST_FIT) -> SimulatedTrace:
        plain = name == PLAIN and scheduler == FIRST_FIT
        return SimulatedTrace(
            fabric=fabric,
            mechanism=name,
            scheduler=scheduler,
            beside=judged if plain else (),
            noises=tuple(errors) if plain and fabric == nets[0] else (),
            levels=levels,
            background=background,
            speed=speed,
            window=window,
            workload=workload,
        )

    wanted = [asked(net, name) for net in nets for name in alone]
    wanted += [asked(nets[0], name, scheduler=way) for way in stack for name in under]
    result = sweep.run([one.task() for one in wanted])
    runs = {one: result[one.name] for one in wanted}
    return Report(seed=seed, figures=trace_figures(runs), table=run_rows(runs))


def run_rows(runs: Runs) -> list[dict[str, Figure | str]]:
    """Return a row for each run."""
    jct_s = _common_jct_s(runs)
    return [
        {
            "network": one.fabric,
            "scheduler": one.scheduler,
            "mechanism": one.mechanism,
            **{key: run[key] for key in _SHOWN},
            "gain": _over_ecmp(runs, one),
            "jct_mean_s": float(jct_s[one].mean()) if len(jct_s[one]) else np.nan,
            "jct_p95_s": float(np.quantile(jct_s[one], 0.95)) if len(jct_s[one]) else np.nan,
            "stale": run["plan_s"] / (one.workload.days * DAY_S),
            **{key: run["statistics"][key] for key in _STATISTICS},
        }
        for one, run in runs.items()
    ]


def trace_figures(runs: Runs) -> dict[str, Figure]:
    """Return the gains, the loss to compression and the loss to noise."""
    done = {(o.fabric, o.scheduler, o.mechanism): run for o, run in runs.items()}
    result: dict[str, Figure] = {}
    losses = []
    for fabric in dict.fromkeys(one.fabric for one in runs):
        key = _key(fabric)
        flop = {m: r["flop"] for (f, s, m), r in done.items() if (f, s) == (fabric, FIRST_FIT)}
        others = {m: x for m, x in flop.items() if not m.startswith("crux")}
        for label, name in (("crux", PLAIN), ("ours", OURS)):
            if name in flop and others:
                result[f"{key}_{label}_gain_over_best_other"] = (
                    flop[name] / max(others.values()) - 1
                )
            if name in flop and "ecmp" in flop:
                run, ecmp = done[fabric, FIRST_FIT, name], done[fabric, FIRST_FIT, "ecmp"]
                result[f"{key}_{label}_gain"] = flop[name] / flop["ecmp"] - 1
                result[f"{key}_{label}_points"] = 100 * (run["of_held"] - ecmp["of_held"])
        beside = done[fabric, FIRST_FIT, PLAIN]["beside_flop"] if PLAIN in flop else {}
        for name, other in beside.items():
            if name == UNCOMPRESSED:
                losses.append(1 - flop[PLAIN] / other)
            elif name in mechanism_names():
                result[f"{key}_beside_{_key(name)}_gain"] = flop[PLAIN] / other - 1
            else:
                result[f"{name.replace(' ', '_')}_loss"] = 1 - other / flop[PLAIN]
    if losses:
        result["compression_loss"] = max(losses)
    for (fabric, scheduler, name), run in done.items():
        label = {PLAIN: "crux", OURS: "ours"}.get(name, "")
        if label and scheduler != FIRST_FIT and (fabric, scheduler, "ecmp") in done:
            over = run["flop"] / done[fabric, scheduler, "ecmp"]["flop"] - 1
            result[f"{scheduler}_{label}_gain"] = over
    ours = [run for (_, _, name), run in done.items() if name == OURS]
    if ours:
        result["replan_worst_s"] = max(run["slowest_plan_s"] for run in ours)
    result["jobs"] = max(run["statistics"]["jobs"] for run in runs.values())
    return result


def _key(name: str) -> str:
    return name.replace("-", "_").rstrip("*")


def _over_ecmp(runs: Runs, one: SimulatedTrace) -> float:
    """Return a run's gain in flop over ECMP in the same setting, or NaN if ECMP was not run."""
    beside = [
        run["flop"]
        for other, run in runs.items()
        if (other.fabric, other.scheduler, other.mechanism) == (one.fabric, one.scheduler, "ecmp")
    ]
    return float(runs[one]["flop"] / beside[0] - 1) if beside else float("nan")


def _common_jct_s(runs: Runs) -> dict[SimulatedTrace, np.ndarray]:
    """Return the JCTs of jobs that ended in all runs of the same network and scheduler."""
    together: dict[tuple[str, str], list[SimulatedTrace]] = {}
    for one in runs:
        together.setdefault((one.fabric, one.scheduler), []).append(one)
    result: dict[SimulatedTrace, np.ndarray] = {}
    for group in together.values():
        jct_s = np.array([_floats(runs[one]["jct_s"]) for one in group])
        ended = np.isfinite(jct_s).all(axis=0)
        result |= {one: jct_s[at, ended] for at, one in enumerate(group)}
    return result


def _floats(values: Sequence[float | None]) -> list[float]:
    return [np.inf if value is None else value for value in values]
