"""The output of ``tessera simulate``: a table, warnings, one JSON object and a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tessera.formulation.lifecycle import JobState
from tessera.service.cli.render import (
    Column,
    count_noun,
    number,
    percent,
    show_facts,
    show_table,
    span,
)
from tessera.service.cli.simulate.runs import Replayed, Run
from tessera.service.cli.simulate.world import Chosen
from tessera.simulator.comparison.comparing import row
from tessera.simulator.comparison.plots import DRAWN, pictures
from tessera.simulator.figures import Figure, Report
from tessera.simulator.network.figures import contention_figures
from tessera.simulator.network.slowdowns import Met
from tessera.simulator.provenance import json_number
from tessera.simulator.report.model import RunReport, report_of
from tessera.simulator.run import Conditions, Result

Row = dict[str, Figure | str]

OVER: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.REJECTED}
)
NAMED: Final = 10
"""The number of jobs that a warning names. JSON holds them all."""
UNTOLD: Final = frozenset({"ours", "stuck", "stuck_runs", "optimum_share", "optimum_worst_share"})
"""Figures of benchmarks that mean nothing here."""


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return each policy's figures.

    ``jct`` is over the jobs that all policies finished (``jobs_of_all``). Policies that finished no
    job are left out of this comparison.
    """
    able = {run.policy: [run.ran] for run in runs if run.ran.figures["completed"]}
    every = (
        {**run.ran.figures, **row(run.policy, {**able, run.policy: [run.ran]}, "")} for run in runs
    )
    found = [{key: value for key, value in one.items() if key not in UNTOLD} for one in every]
    return [
        {"policy": one.pop("policy"), **_met(run), **one}
        for run, one in zip(runs, found, strict=True)
    ]


def _met(run: Run) -> Row:
    """Return the figures of contention, or {} without a network."""
    if not run.network:
        return {}
    return {"network": run.network, **contention_figures(run.result, run.met or Met())}


def unfinished_jobs(result: Result) -> list[str]:
    """Return the jobs that had arrived but had not ended when the run ended."""
    there = zip(result.scenario.arrivals, result.state, strict=True)
    return [
        one.spec.name
        for one, state in there
        if state not in OVER and one.arrival_s <= result.ended_s
    ]


def warnings(runs: Sequence[Run], chosen: Chosen, conditions: Conditions) -> list[str]:
    """Return caveats that a reader of the figures must know."""
    found, horizon_s = list(chosen.notes), conditions.horizon_s
    if late := sum(one.arrival_s > horizon_s for one in chosen.scenario.arrivals):
        found.append(
            f"{count_noun(late, 'job')} of {len(chosen.scenario.arrivals):,} arrive after the horizon"
        )
    for run in runs:
        found += [f"{run.policy}: {text}" for text in _warned(run.result)]
    if conditions.failures or conditions.stragglers:
        drawn_s = min(horizon_s, chosen.ample_s)
        longer = [run.policy for run in runs if run.result.ended_s > drawn_s]
        if longer:
            found.append(f"{', '.join(longer)}: no failures were drawn from {span(drawn_s)} on")
    return found


def _warned(result: Result) -> Iterator[str]:
    names = unfinished_jobs(result)
    if result.stuck:
        yield f"stuck after {span(result.ended_s)}: nothing would ever start {_named(names)}"
    elif names:
        yield f"not over at the horizon of {span(result.ended_s)}: {_named(names)}"
    rejected = [
        one.spec.name
        for one, state in zip(result.scenario.arrivals, result.state, strict=True)
        if state == JobState.REJECTED
    ]
    if rejected:
        yield f"rejected {_named(rejected)}"
    if result.refused:
        yield f"{result.refused:,} of {len(result.rounds):,} rounds broke a rule and were refused"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return f"{count_noun(len(names), 'job')}: {shown}{', ...' if len(names) > NAMED else ''}"


def show(
    runs: Sequence[Run], table: Sequence[Row], chosen: Chosen, told: Mapping[str, Any]
) -> None:
    """Print the simulated scenario, and a row for each policy."""
    scenario, first = chosen.scenario, runs[0].ran.figures
    gpus = Counter[str]()
    for node in scenario.nodes:
        gpus[node.gpu_type] += node.gpus
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in gpus.items())
    brought = f", load {chosen.load:.3g}" if math.isfinite(chosen.load) else ""
    show_facts(
        [
            ("cluster", f"{scenario.gpus:,} GPUs on {len(scenario.nodes):,} nodes: {kinds}"),
            ("jobs", f"{len(scenario.arrivals):,} over {span(chosen.last_s)}{brought}"),
            ("dropped", f"{len(chosen.dropped):,}" if chosen.dropped else ""),
            ("rounds", str(told["rounds"])),
            ("hazards", _hazards(told)),
            ("network", _network(told)),
            ("throughput", f"over the first {span(first['horizon_s'])}; in effective GPUs"),
            ("JCT", _over(runs, table)),
        ]
    )
    columns = COLUMNS if any("deadlines" in one for one in table) else COLUMNS[:-1]
    show_table(table, (*columns, *NETWORK) if "topology" in told else columns)


def _hazards(told: Mapping[str, Any]) -> str:
    """Return the counts of drawn hazards, or "" if none were drawn."""
    drawn = [f"{told[key]:,} {key}" for key in ("failures", "stragglers") if told[key]]
    return ", ".join(drawn)


def _network(told: Mapping[str, Any]) -> str:
    """Return the shared network and the mechanisms that decide on it, or "" without a network."""
    if "topology" not in told:
        return ""
    deciding = ", ".join(told["networks"])
    return f"{told['hosts']:,} hosts, {told['links']:,} links, {told['network_levels']} levels: {deciding}"


def _over(runs: Sequence[Run], table: Sequence[Row]) -> str:
    """Return the jobs that JCT covers, or "" if it covers all that each policy finished."""
    able = [one for one in table if one["completed"]]
    count = max((int(float(one["jobs_of_all"])) for one in able), default=0)
    if all(float(one["completed"]) == count for one in able):
        return ""
    none = "" if len(able) == len(runs) else ", but those that finished none,"
    return f"over the {count_noun(count, 'job')} that all policies{none} finished"


def _time(key: str) -> Column[Row]:
    def shown(one: Row) -> str:
        seconds = float(one[key])
        return span(seconds) if math.isfinite(seconds) else "-"

    title = {"jct_mean_s": "JCT", "jct_p50_s": "MEDIAN", "jct_p95_s": "P95"}
    return Column(title.get(key, "QUEUE"), shown, right=True)


def _share(title: str, part: str, whole: str) -> Column[Row]:
    return Column(title, lambda one: f"{one[part]:g}/{one[whole]:g}", right=True)


COLUMNS: Final[Sequence[Column[Row]]] = (
    Column("POLICY", lambda one: str(one["policy"])),
    _share("FINISHED", "completed", "jobs"),
    *map(_time, ("jct_mean_s", "jct_p50_s", "jct_p95_s", "queue_mean_s")),
    Column("THROUGHPUT", lambda one: number(float(one["throughput"])), right=True),
    Column("USED %", lambda one: percent(float(one["utilisation"]), 1.0), right=True),
    Column("RESTARTS", lambda one: f"{float(one['restarts']):.2f}", right=True),
    Column("ROUNDS", lambda one: f"{one['rounds']:,.0f}", right=True),
    Column(
        "MS/ROUND",
        lambda one: f"{1e3 * float(one['decide_s']) / max(float(one['rounds']), 1):.1f}",
        right=True,
    ),
    _share("DEADLINES MET", "deadlines_met", "deadlines"),
)
"""Times are means unless the title says otherwise."""

NETWORK: Final[Sequence[Column[Row]]] = (
    Column("LOST %", lambda one: percent(float(one["contention_loss"]), 1.0), right=True),
    _share("MET", "jobs_met", "jobs_trained"),
    Column("SLOWDOWN", lambda one: f"{float(one['slowdown_mean']):.3f}", right=True),
    Column(
        "MS/REPLAN",
        lambda one: (
            f"{1e3 * float(one['network_plan_s']) / max(float(one['network_plans']), 1):.1f}"
        ),
        right=True,
    ),
)
"""Columns on contention (``tessera.simulator.network.figures``).

They are the share of the held GPU time that was lost, the jobs that met others, and the jobs' mean
slowdown.
"""


def as_json(
    runs: Sequence[Run],
    table: Sequence[Row],
    chosen: Chosen,
    told: Mapping[str, Any],
    checks: Mapping[str, Replayed],
    warned: Sequence[str],
) -> dict[str, Any]:
    """Return all results in a form that JSON can hold."""
    policies = []
    for run, one in zip(runs, table, strict=True):
        stuck = unfinished_jobs(run.result) if run.result.stuck else []
        found: dict[str, Any] = {k: json_number(v) for k, v in one.items()}
        found |= {"ended_s": run.result.ended_s, "stuck_jobs": stuck}
        if run.policy in checks:
            check = checks[run.policy]
            off = json_number(check.off)
            found["replay"] = {"jobs": check.jobs, "off": off, "wrong": check.wrong}
        policies.append(found)
    scenario = chosen.scenario
    return {
        **told,
        "gpus": scenario.gpus,
        "nodes": len(scenario.nodes),
        "jobs": len(scenario.arrivals),
        "load": json_number(chosen.load),
        "dropped": [one._asdict() for one in chosen.dropped],
        "warnings": list(warned),
        "policies": policies,
    }


def with_jobs(found: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Return ``as_json``'s object with the outcome of each job, for a file."""
    policies = [
        {**one, "outcomes": _outcomes(run.result)}
        for one, run in zip(found["policies"], runs, strict=True)
    ]
    return {**found, "policies": policies}


def _outcomes(result: Result) -> list[dict[str, Any]]:
    columns = zip(
        result.scenario.arrivals,
        result.state,
        result.first_start_s.tolist(),
        result.end_s.tolist(),
        result.restarts.tolist(),
        strict=True,
    )
    return [
        {
            "job": one.spec.name,
            "arrival_s": one.arrival_s,
            "state": state,
            "first_start_s": json_number(start_s),
            "end_s": json_number(end_s),
            "restarts": restarts,
        }
        for one, state, start_s, end_s, restarts in columns
    ]


def report(
    runs: Sequence[Run],
    table: Sequence[Row],
    chosen: Chosen,
    told: Mapping[str, Any],
    warned: Sequence[str],
) -> RunReport:
    """Return the report page: table, courses over time, JCT, queue, gaps and GPU assignments."""
    by_policy = {run.policy: [run.ran] for run in runs}
    best = str(min(table, key=lambda one: float(one["jct_mean_s"]))["policy"])
    shown = [run.policy for run in runs][:DRAWN]
    first = runs[0].ran.figures
    figures: dict[str, Figure] = {
        "jobs": len(chosen.scenario.arrivals),
        "gpus": chosen.scenario.gpus,
        "load": chosen.load,
        "dropped": len(chosen.dropped),
        "window_s": first["horizon_s"],
    }
    return report_of(
        Report(seed=int(told["seed"]), figures=figures, table=list(table)),
        title="Simulation",
        options=told,
        notes=warned,
        plots=pictures(by_policy, best, shown, shown),
        summary=f"{len(runs)} policies on the same jobs, cluster and costs. Throughput, utilisation and the"
        f" courses are over the first {span(first['horizon_s'])}.",
    )
