"""The output of ``tessera simulate``: a table, warnings, one JSON object and a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tessera.formulation.job.lifecycle import JobState
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_number,
    format_percent,
    format_span,
    show_facts,
    show_table,
)
from tessera.service.cli.simulation.runs import PolicyRun, ReplayOutcome
from tessera.service.cli.simulation.world import ChosenScenario
from tessera.simulator.comparison.comparisons import comparison_row
from tessera.simulator.completion_bound import CompletionBound
from tessera.simulator.figures import Figure
from tessera.simulator.network.figures import contention_figures
from tessera.simulator.network.slowdowns import ContentionRecord
from tessera.simulator.provenance import json_number
from tessera.simulator.run import Conditions, Result

PolicyRow = dict[str, Figure | str]

ENDED_STATES: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.REJECTED}
)
MAX_JOBS_NAMED: Final = 10
"""The maximum number of jobs that a warning names. The JSON output has all of them."""
HIDDEN_FIGURES: Final = frozenset({"ours", "stuck", "stuck_runs"})
"""Figures of benchmarks that have no meaning in a single simulation."""


def policy_rows(runs: Sequence[PolicyRun], bound: CompletionBound) -> list[PolicyRow]:
    """Return each policy's figures.

    ``bound`` is that of the scenario. ``jct`` is over the jobs that all policies finished
    (``jobs_of_all``). Policies that finished no job are left out of this comparison.
    """
    able = {run.policy: [run.ran] for run in runs if run.ran.figures["completed"]}
    full = (
        {
            **run.ran.figures,
            **comparison_row(run.policy, {**able, run.policy: [run.ran]}, "", [bound]),
        }
        for run in runs
    )
    shown = [
        {key: value for key, value in entry.items() if key not in HIDDEN_FIGURES} for entry in full
    ]
    return [
        {"policy": entry.pop("policy"), **_contention_row(run), **entry}
        for run, entry in zip(runs, shown, strict=True)
    ]


def _contention_row(run: PolicyRun) -> PolicyRow:
    """Return the figures of contention, or {} without a network."""
    if not run.network:
        return {}
    return {"network": run.network, **contention_figures(run.result, run.met or ContentionRecord())}


def unfinished_jobs(result: Result) -> list[str]:
    """Return the jobs that had arrived but had not ended when the run ended."""
    jobs = zip(result.scenario.arrivals, result.state, strict=True)
    return [
        arrival.spec.name
        for arrival, state in jobs
        if state not in ENDED_STATES and arrival.arrival_s <= result.ended_s
    ]


def run_warnings(
    runs: Sequence[PolicyRun], chosen: ChosenScenario, conditions: Conditions
) -> list[str]:
    """Return the caveats that a reader of the figures must know."""
    texts, horizon_s = list(chosen.notes), conditions.horizon_s
    if late := sum(arrival.arrival_s > horizon_s for arrival in chosen.scenario.arrivals):
        texts.append(
            f"{count_noun(late, 'job')} of {len(chosen.scenario.arrivals):,} arrive after the horizon"
        )
    for run in runs:
        texts += [f"{run.policy}: {text}" for text in _run_caveats(run.result)]
    if conditions.failures or conditions.stragglers:
        drawn_s = min(horizon_s, chosen.ample_s)
        longer = [run.policy for run in runs if run.result.ended_s > drawn_s]
        if longer:
            texts.append(
                f"{', '.join(longer)}: no failures were drawn after {format_span(drawn_s)}"
            )
    return texts


def _run_caveats(result: Result) -> Iterator[str]:
    names = unfinished_jobs(result)
    if result.stuck:
        yield f"stuck after {format_span(result.ended_s)}: nothing would ever start {_named(names)}"
    elif names:
        yield f"not finished at the horizon of {format_span(result.ended_s)}: {_named(names)}"
    rejected = [
        arrival.spec.name
        for arrival, state in zip(result.scenario.arrivals, result.state, strict=True)
        if state == JobState.REJECTED
    ]
    if rejected:
        yield f"rejected {_named(rejected)}"
    if result.refused:
        yield f"{result.refused:,} of {len(result.rounds):,} rounds broke a rule and were refused"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_JOBS_NAMED])
    return (
        f"{count_noun(len(names), 'job')}: {shown}{', ...' if len(names) > MAX_JOBS_NAMED else ''}"
    )


def show_runs(
    runs: Sequence[PolicyRun],
    table: Sequence[PolicyRow],
    chosen: ChosenScenario,
    facts: Mapping[str, Any],
) -> None:
    """Print the simulated scenario, and a row for each policy."""
    scenario, first = chosen.scenario, runs[0].ran.figures
    gpus = Counter[str]()
    for node in scenario.nodes:
        gpus[node.gpu_type] += node.gpus
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in gpus.items())
    load = f", load {chosen.load:.3g}" if math.isfinite(chosen.load) else ""
    show_facts(
        [
            ("cluster", f"{scenario.gpus:,} GPUs on {len(scenario.nodes):,} nodes: {kinds}"),
            ("jobs", f"{len(scenario.arrivals):,} over {format_span(chosen.last_s)}{load}"),
            ("dropped", f"{len(chosen.dropped):,}" if chosen.dropped else ""),
            ("rounds", str(facts["rounds"])),
            ("hazards", _hazards(facts)),
            ("network", _network(facts)),
            ("throughput", f"in effective GPUs, over the first {format_span(first['horizon_s'])}"),
            ("JCT", _jct_scope(runs, table)),
            ("JCT bound", _bound(facts["jct_bound_s"])),
        ]
    )
    columns = (
        POLICY_COLUMNS if any("deadlines" in entry for entry in table) else POLICY_COLUMNS[:-1]
    )
    show_table(table, (*columns, *CONTENTION_COLUMNS) if "topology" in facts else columns)


def _hazards(facts: Mapping[str, Any]) -> str:
    """Return the counts of drawn hazards, or "" if none were drawn."""
    counts = [f"{facts[key]:,} {key}" for key in ("failures", "stragglers") if facts[key]]
    return ", ".join(counts)


def _network(facts: Mapping[str, Any]) -> str:
    """Return the shared network and the mechanisms that decide on it, or "" without a network."""
    if "topology" not in facts:
        return ""
    mechanisms = ", ".join(facts["networks"])
    size = f"{facts['hosts']:,} hosts, {facts['links']:,} links"
    return f"{size}, {facts['network_levels']} levels: {mechanisms}"


def _jct_scope(runs: Sequence[PolicyRun], table: Sequence[PolicyRow]) -> str:
    """Return the jobs that JCT covers, or "" if it covers all that each policy finished."""
    able = [entry for entry in table if entry["completed"]]
    count = max((int(float(entry["jobs_of_all"])) for entry in able), default=0)
    if all(float(entry["completed"]) == count for entry in able):
        return ""
    none = "" if len(able) == len(runs) else " (except those that finished no job)"
    return f"mean over the {count_noun(count, 'job')} that all policies{none} finished"


def _bound(mean_s: float | None) -> str:
    """Return the mean JCT that no schedule can beat, or "" if no job can run."""
    return "" if mean_s is None else f"no schedule has a mean below {format_span(mean_s)}"


def _time(key: str) -> Column[PolicyRow]:
    def shown(figures: PolicyRow) -> str:
        seconds = float(figures[key])
        return format_span(seconds) if math.isfinite(seconds) else "-"

    title = {"jct_mean_s": "JCT", "jct_p50_s": "MEDIAN", "jct_p95_s": "P95"}
    return Column(title.get(key, "QUEUE"), shown, right=True)


def _share(title: str, part: str, whole: str) -> Column[PolicyRow]:
    return Column(title, lambda figures: f"{figures[part]:g}/{figures[whole]:g}", right=True)


POLICY_COLUMNS: Final[Sequence[Column[PolicyRow]]] = (
    Column("POLICY", lambda row: str(row["policy"])),
    _share("FINISHED", "completed", "jobs"),
    *map(_time, ("jct_mean_s", "jct_p50_s", "jct_p95_s", "queue_mean_s")),
    Column("THROUGHPUT", lambda row: format_number(float(row["throughput"])), right=True),
    Column("USED %", lambda row: format_percent(float(row["utilisation"]), 1.0), right=True),
    Column("RESTARTS", lambda row: f"{float(row['restarts']):.2f}", right=True),
    Column("ROUNDS", lambda row: f"{row['rounds']:,.0f}", right=True),
    Column(
        "MS/ROUND",
        lambda row: f"{1e3 * float(row['decide_s']) / max(float(row['rounds']), 1):.1f}",
        right=True,
    ),
    _share("DEADLINES MET", "deadlines_met", "deadlines"),
)
"""Times are means unless the title says otherwise."""

CONTENTION_COLUMNS: Final[Sequence[Column[PolicyRow]]] = (
    Column("LOST %", lambda row: format_percent(float(row["contention_loss"]), 1.0), right=True),
    _share("CONTENDED", "jobs_met", "jobs_trained"),
    Column("SLOWDOWN", lambda row: f"{float(row['slowdown_mean']):.3f}", right=True),
    Column(
        "MS/REPLAN",
        lambda row: (
            f"{1e3 * float(row['network_plan_s']) / max(float(row['network_plans']), 1):.1f}"
        ),
        right=True,
    ),
)
"""Columns on contention (``tessera.simulator.network.figures``).

They are the share of the held GPU time that was lost, the jobs that shared links with others, and
the mean slowdown of jobs.
"""


def as_json(
    runs: Sequence[PolicyRun],
    table: Sequence[PolicyRow],
    chosen: ChosenScenario,
    facts: Mapping[str, Any],
    checks: Mapping[str, ReplayOutcome],
    warned: Sequence[str],
) -> dict[str, Any]:
    """Return all results in a form that JSON can hold."""
    policies = []
    for run, figures in zip(runs, table, strict=True):
        stuck = unfinished_jobs(run.result) if run.result.stuck else []
        entry: dict[str, Any] = {k: json_number(v) for k, v in figures.items()}
        entry |= {"ended_s": run.result.ended_s, "stuck_jobs": stuck}
        if run.policy in checks:
            check = checks[run.policy]
            off = json_number(check.off)
            entry["replay"] = {"jobs": check.jobs, "off": off, "wrong": check.wrong}
        policies.append(entry)
    scenario = chosen.scenario
    return {
        **facts,
        "gpus": scenario.gpus,
        "nodes": len(scenario.nodes),
        "jobs": len(scenario.arrivals),
        "load": json_number(chosen.load),
        "dropped": [figures._asdict() for figures in chosen.dropped],
        "warnings": list(warned),
        "policies": policies,
    }


def with_jobs(document: Mapping[str, Any], runs: Sequence[PolicyRun]) -> dict[str, Any]:
    """Return ``as_json``'s object with the outcome of each job, for a file."""
    policies = [
        {**entry, "outcomes": _outcomes(run.result)}
        for entry, run in zip(document["policies"], runs, strict=True)
    ]
    return {**document, "policies": policies}


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
            "job": arrival.spec.name,
            "arrival_s": arrival.arrival_s,
            "state": state,
            "first_start_s": json_number(start_s),
            "end_s": json_number(end_s),
            "restarts": restarts,
        }
        for arrival, state, start_s, end_s, restarts in columns
    ]
