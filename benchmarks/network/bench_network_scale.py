"""Timings of priority compression and of whole network re-plans for thousands of jobs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.network import clos_jobs
from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.base.tables import Ints
from tessera.simulator.figures import Figure, Report
from tessera.solvers.network.compression import compression_of, sample_orders
from tessera.solvers.network.compression.cuts import cut_of
from tessera.solvers.network.compression.dag import Dag, dag_of
from tessera.solvers.network.priorities import order_of
from tessera.solvers.network.replan import PlanningOptions, replan

NETWORKS: Final = {
    "packed": clos_jobs.pack_jobs,
    "scattered": clos_jobs.scatter_jobs,
    "crossing": clos_jobs.crossing_jobs,
}
DENSE_GRAPHS: Final = {"half": clos_jobs.half_shared, "one-link": clos_jobs.one_link}
USUAL_JOBS: Final = 5_000
LEVELS: Final = 8
"""Priority levels after compression."""
SAMPLES: Final = 10
"""Topological orders that are cut."""
WARM_UP_JOBS: Final = 20
"""Jobs of the warm-up run, which keeps compilation out of the timings."""

TimedResult = TypeVar("TimedResult")


@register_case(
    "network-scale",
    smoke={"jobs": 150, "repeats": 1},
    compress_s=("<=", 1.0),
    replan_s=("<=", 10.0),
    unproven=("==", 0),
    differ=("==", 0),
    violations=("==", 0),
)
def network_scale(
    jobs: Annotated[
        int, typer.Option(help="Number of jobs that train at the same time.", min=2)
    ] = USUAL_JOBS,
    repeats: Annotated[
        int, typer.Option(help="Number of repetitions, of which the median counts.", min=1)
    ] = 3,
    seed: int = 0,
) -> Report:
    """Time the compression of priorities, and whole re-plans, for jobs on a two-layer Clos.

    Hosts are those of Crux's testbed (8 A100, four NICs of 200 Gb/s), 32 to a ToR. Each ToR is
    joined to each of 16 aggregation switches by 800 Gb/s, and there are as many ToRs as the jobs
    need. Jobs reduce gradients in rings over hosts, one ring for each GPU of a host. In ``packed``
    and ``scattered``, two thirds of the jobs fit on a host, and the hosts of a job are adjacent, or
    anywhere. In ``crossing``, no job fits on a host, and its hosts are anywhere. ``half`` and
    ``one-link`` are not networks but denser graphs: half of all pairs of jobs share links, and all
    jobs share one link.

    ``compress_s`` (at most 1) is the longest time of the three networks from demands on the paths
    of a re-plan to levels: the graph, the dynamic program on each of m orders, and minimum cuts
    from the best of them. ``dense_s`` is that of ``half``. ``replan_s`` (at most 10) is the longest
    whole re-plan with its default options; ``violations`` counts those that the checker finds in
    these plans. ``plain_ratio`` is how many times longer the O(n^2 K) program takes than ours for
    the same cut of ``crossing``; ``differ`` counts graphs where the two cuts differ. ``unproven``
    counts the networks whose levels are not proven to lose the least.

    In the table, ``vertices`` are jobs that share links with others, and ``degree`` is the number
    of jobs with which each of them does. ``*_lost`` is the share of the intensity at stake that
    stays inside levels: for the best cut of the order of urgency alone, for the best of m orders,
    and for the levels returned. Times of another number of jobs have no bounds.
    ``*_cpu_s`` are processor seconds, which other programs disturb less.
    """
    _row("warm", clos_jobs.crossing_jobs(WARM_UP_JOBS, seed), repeats, seed)
    table = []
    for at in track_steps(len(NETWORKS) + len(DENSE_GRAPHS), "graphs"):
        name = [*NETWORKS, *DENSE_GRAPHS][at]
        make: Callable[[int, int], Contention | LinkDemand] = (NETWORKS | DENSE_GRAPHS)[name]
        table.append(_row(name, make(jobs, seed), repeats, seed))
    rows = {str(row["graph"]): row for row in table}
    networks = [rows[name] for name in NETWORKS]
    clocks = "compress_s", "compress_cpu_s", "replan_s", "replan_cpu_s"
    figures: dict[str, Figure] = {
        **{clock: max(float(row[clock]) for row in networks) for clock in clocks},
        "dense_s": float(rows["half"]["compress_s"]),
        "plain_ratio": float(rows["crossing"]["plain_ratio"]),
        "differ": sum(not row["alike"] for row in table),
        "unproven": sum(not row["proven"] for row in networks),
        "violations": sum(int(row["violations"]) for row in networks),
        "jobs": jobs,
    }
    return Report(
        seed=seed,
        figures=figures,
        table=table,
        waived=frozenset() if jobs == USUAL_JOBS else frozenset({"compress_s", "replan_s"}),
    )


def _row(
    name: str, graph: Contention | LinkDemand, repeats: int, seed: int
) -> dict[str, Figure | str]:
    """Return the row of one graph. If the graph is a network, it is planned first."""
    row: dict[str, Figure | str] = {"graph": name}
    if isinstance(graph, Contention):
        network = graph
        options = PlanningOptions(samples=SAMPLES, seed=seed)
        plan, row["replan_s"], row["replan_cpu_s"] = _timed(
            lambda: replan(network, levels=LEVELS, options=options).plan, repeats
        )
        row["violations"] = len(find_network_violations(network, plan))
        demand, order = demand_of(network, plan.chosen), plan.order
    else:
        demand, order = graph, order_of(graph.intensity)
    result, row["compress_s"], row["compress_cpu_s"] = _timed(
        lambda: compression_of(demand, order, LEVELS, samples=SAMPLES, seed=seed), repeats
    )
    dag, row["dag_s"], _ = _timed(lambda: dag_of(demand, order), repeats)
    best, row["cuts_s"], _ = _timed(lambda: sample_orders(dag, LEVELS, SAMPLES, seed), repeats)
    one = sample_orders(dag, LEVELS, 1, seed)
    largest = np.diff(dag.part_start).max(initial=0)
    stake = dag.at_stake or 1.0
    return row | {
        "gpus": int(graph.gpus.sum()) if isinstance(graph, Contention) else 0,
        "vertices": len(dag.job),
        "edges": dag.edges,
        "degree": 2 * dag.edges / max(len(dag.job), 1),
        "parts": dag.parts,
        "largest": int(largest),
        "urgency_lost": dag.lost(one.level) / stake,
        "orders_lost": dag.lost(best.level) / stake,
        "lost": result.lost / stake,
        "proven": result.proven,
        **_compare_with_plain(dag, repeats),
    }


def _compare_with_plain(dag: Dag, repeats: int) -> dict[str, Figure | str]:
    """Compare the plain program with ours on the largest part, in the order of urgency."""
    if not dag.parts:
        return {"plain_ratio": 1.0, "alike": True}
    part = dag.part(int(np.argmax(np.diff(dag.part_start))))
    order: Ints = np.arange(len(part.job), dtype=np.int64)
    ours, _, took_s = _timed(lambda: cut_of(part, order, LEVELS), repeats)
    plain, _, plain_s = _timed(lambda: cut_of(part, order, LEVELS, plainly=True), repeats)
    return {"plain_ratio": plain_s / took_s, "alike": ours.level.tolist() == plain.level.tolist()}


def _timed(work: Callable[[], TimedResult], repeats: int) -> tuple[TimedResult, float, float]:
    """Return the result of the work, with the medians of its wall and processor seconds."""
    wall_s, cpu_s = [], []
    for _ in range(repeats):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        result = work()
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    return result, statistics.median(wall_s), statistics.median(cpu_s)
