"""Views of a round: a row of a table, all its details, and a comparison with its replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.job.execution_plan import read_execution_plan
from tessera.formulation.job.reasons import LOST_SAMPLES_KEY, RESTART_GPU_S_KEY, ReasonCode
from tessera.formulation.round.policy import NETWORK_LEVELS, Policy
from tessera.service.cli.jobs.jobview import allocation_text
from tessera.service.cli.names import short_name
from tessera.service.cli.render import (
    Column,
    format_age,
    format_indices,
    format_number,
    format_span,
    format_time,
    print_line,
    print_note,
    show_facts,
    show_table,
)
from tessera.v1 import scheduler_pb2

UNCHANGED_KINDS = ("keep", "wait")
"""Kinds of decisions that change nothing."""

GREEDY_SOLVER: Final = "greedy"

_USUAL: Final = Policy()
"""The policy whose values are not shown."""

UNPROVEN_TEXT: Final = "?"
"""The text that is shown for an unproven bound, and for its gap."""

PROOF_TEXTS: Final = {
    "prices": "prices",
    "branching": "branching and prices",
    "knapsacks": "knapsacks and prices",
    "cp-sat": "the word of CP-SAT",
    "levels": "a search over levels",
}
"""The text that is shown for what proves a bound."""

UNCOMMITTED_TEXTS: Final = {
    "dry_run": "(dry run, nothing was committed)",
    "replay": "(solved here, nothing was committed)",
}
"""The text that is shown for a round without a name, by its outcome."""


def round_columns(now: Timestamp) -> Sequence[Column[scheduler_pb2.Round]]:
    """Return the columns of a list of rounds. Ages are relative to ``now``."""
    return (
        Column("ROUND", lambda r: short_name(r.name), right=True),
        Column("OUTCOME", lambda r: r.outcome),
        Column("STATUS", lambda r: r.status),
        Column("OBJECTIVE", lambda r: format_number(r.objective), right=True),
        Column("GAP", lambda r: format_gap(r), right=True),
        Column("RUNNING", lambda r: str(r.running), right=True),
        Column("WAITING", lambda r: str(r.waiting), right=True),
        Column("STARTED", lambda r: str(r.started), right=True),
        Column("CHANGED", lambda r: str(r.changed), right=True),
        Column("REPLANNED", lambda r: str(r.replanned), wide=True, right=True),
        Column("SUSPENDED", lambda r: str(r.suspended), right=True),
        Column("SECONDS", lambda r: f"{sum(r.seconds.values()):.2f}", right=True),
        Column("AGE", lambda r: format_age(r.create_time, now), right=True),
        Column("SOLVER", solver_text, wide=True),
        Column("GREEDY", lambda r: format_number(r.greedy_objective), wide=True, right=True),
        Column("BOUND", lambda r: proven_bound(r), wide=True, right=True),
        Column("PROVED BY", lambda r: proof_text(r), wide=True),
        Column("SAMPLES/S", lambda r: format_number(r.samples_per_s), wide=True, right=True),
        Column("EPOCH", lambda r: str(r.epoch), wide=True, right=True),
    )


def solver_text(value: scheduler_pb2.Round) -> str:
    """Return the solver or published scheduler that decided, with the parameters that it had."""
    return _with_parameters(value.solver, value.options)


def _with_parameters(name: str, chosen: scheduler_pb2.RoundOptions) -> str:
    return name + (f" ({chosen.scheduler_parameters})" if chosen.scheduler_parameters else "")


def format_gap(value: scheduler_pb2.Round | scheduler_pb2.GoalResult) -> str:
    """Return the gap in percent, or "?" if no bound was proven."""
    known = isfinite(value.gap) and not value.bound_is_trivial
    return f"{100 * value.gap:.3g} %" if known else UNPROVEN_TEXT


def proven_bound(value: scheduler_pb2.Round | scheduler_pb2.GoalResult) -> str:
    """Return the bound, or "?" if none was proven."""
    return UNPROVEN_TEXT if value.bound_is_trivial else format_number(value.bound)


def proof_text(value: scheduler_pb2.Round | scheduler_pb2.GoalResult) -> str:
    """Return what proves the bound, in words; "" if it is trivial."""
    return PROOF_TEXTS.get(value.proved_by, value.proved_by)


def show_round(value: scheduler_pb2.Round, *, everything: bool, wide: bool) -> None:
    """Print a round and its decisions. If ``everything``, include those that change nothing."""
    show_facts(_facts(value, wide=wide))
    if len(value.goals) > 1:
        show_table(value.goals, GOAL_COLUMNS)
    shown = [d for d in value.decisions if everything or d.kind not in UNCHANGED_KINDS]
    if shown:
        show_table(shown, _decisions(_plan_texts(value)), wide=wide)
    replanned = [d for d in shown if d.reason.code == ReasonCode.REPLANNED]
    if replanned:
        show_table(replanned, REPLAN_COLUMNS)
    hidden = Counter(
        d.kind for d in value.decisions if not everything and d.kind in UNCHANGED_KINDS
    )
    if hidden:
        left_out = ", ".join(f"{count} {kind}" for kind, count in sorted(hidden.items()))
        print_note(f"not shown: {left_out}; --all shows all decisions")


def _facts(value: scheduler_pb2.Round, *, wide: bool) -> list[tuple[str, str]]:
    unit = value.unit or "units"
    gain, compared = value.objective - value.greedy_objective, not value.options.scheduler
    facts = [
        ("round", UNCOMMITTED_TEXTS.get(value.outcome, value.name)),
        ("outcome", value.outcome),
        ("violations", "; ".join(value.violations)),
        ("failed stages", "; ".join(value.failures)),
        ("decided", format_time(value.create_time)),
        ("policy", _policy(value)),
        ("objective", f"{format_number(value.objective)} {unit}, {value.status}; {_proof(value)}"),
        ("proved by", _proof_of_bound(value)),
        (
            "greedy",
            f"{format_number(value.greedy_objective)} ({_compare_greedy(value, gain)})"
            if compared
            else "",
        ),
        ("throughput", f"{format_number(value.samples_per_s)} samples/s"),
        (
            "jobs",
            f"{value.running} running, {value.waiting} waiting;"
            f" {value.started} started, {_changed(value)}, {value.suspended} suspended",
        ),
        ("deadlines", _deadlines(value.decisions)),
        ("in use", _pairs({k: str(v) for k, v in value.used_gpus.items()})),
        ("shadow prices", _pairs({k: format_number(v) for k, v in value.prices.items()})),
        ("solver", f"{solver_text(value)}, seed {value.options.seed}"),
        ("seconds", _pairs({k: f"{v:.3f}" for k, v in value.seconds.items()})),
    ]
    if wide:
        facts += [
            ("placed score", format_number(value.placed_score)),
            ("work", _pairs({w.solver: format_number(w.work) for w in value.work})),
            ("epoch", str(value.epoch)),
            ("snapshot", value.snapshot_digest),
            ("versions", ", ".join(value.versions)),
        ]
    return facts


def _changed(value: scheduler_pb2.Round) -> str:
    replanned = f" ({value.replanned} replanned)" if value.replanned else ""
    return f"{value.changed} changed{replanned}"


def _proof(value: scheduler_pb2.Round) -> str:
    """Return what has been proven about a round's objective."""
    if not isfinite(value.bound):
        return "no bound is known"
    if value.bound_is_trivial:
        by = value.options.scheduler or value.solver
        if value.options.scheduler or by == GREEDY_SOLVER:
            return f"no bound is proven, because {by} does not compute one"
        return "no bound is proven, because the solver had too little time"
    return f"proven bound {format_number(value.bound)} (gap {format_gap(value)})"


def _proof_of_bound(value: scheduler_pb2.Round) -> str:
    """Return what proves the bound of the last goal, and whether anyone can check it."""
    if not value.proved_by:
        return ""
    certified = value.goals[-1].certified if value.goals else value.has_certificate
    return proof_text(value) + (", certified" if certified else ", not certified")


GOAL_COLUMNS: Final[Sequence[Column[scheduler_pb2.GoalResult]]] = (
    Column("GOAL", lambda g: g.name),
    Column("REACHED", lambda g: format_number(g.objective), right=True),
    Column("BOUND", lambda g: proven_bound(g), right=True),
    Column("GAP", lambda g: format_gap(g), right=True),
    Column("UNIT", lambda g: g.unit),
    Column("PROVED BY", lambda g: proof_text(g)),
)
"""The columns of an objective's goals, in order."""


def _capped(chosen: scheduler_pb2.RoundOptions) -> bool:
    return chosen.HasField("max_changes") and chosen.max_changes >= 0


def _policy(value: scheduler_pb2.Round) -> str:
    """Return the policy of a round, with the version of the standing policy if one was set."""
    text = policy_text(value.options)
    return f"{text} (policy version {value.policy_version})" if value.policy_version else text


def policy_text(chosen: scheduler_pb2.RoundOptions) -> str:
    """Return the objective, or the scheduler that decided, and the chosen rules."""
    rules = {
        "deadlines": chosen.deadlines,
        "queue weights": chosen.priority_weights,
        "caution": f"{chosen.caution:g}" if chosen.caution else "",
        "fair share": chosen.fair_share,
        "fair half-life": format_span(chosen.fair_half_life.ToSeconds())
        if chosen.fair_share and chosen.HasField("fair_half_life")
        else "",
        "network levels": "" if (n := chosen.network_levels) in (0, NETWORK_LEVELS) else str(n),
        "network floor": f"{chosen.network_floor:g}" if chosen.network_floor else "",
        "network measure": format_span(chosen.network_measure.ToSeconds())
        if chosen.network_measure.ToSeconds()
        else "",
        "keep requests": "no"
        if chosen.HasField("keep_requests") and not chosen.keep_requests
        else "",
        "promise starts": "no"
        if chosen.HasField("promise_starts") and not chosen.promise_starts
        else "",
        "change spacing": f"{chosen.change_spacing:g} restart times"
        if chosen.HasField("change_spacing") and chosen.change_spacing != _USUAL.change_spacing
        else "",
        "default run": format_span(chosen.default_run.ToSeconds())
        if chosen.HasField("default_run") and chosen.default_run.ToSeconds() != _USUAL.default_run_s
        else "",
        "replan spacing": f"{chosen.replan_spacing:g} restart times"
        if chosen.HasField("replan_spacing") and chosen.replan_spacing != _USUAL.replan_spacing
        else "",
        "maximum changes": str(chosen.max_changes) if _capped(chosen) else "",
    }
    texts = [f"{name} {value}" for name, value in rules.items() if value]
    decider = (
        f"the published scheduler {_with_parameters(chosen.scheduler, chosen)}"
        if chosen.scheduler
        else chosen.objective
    )
    return "; ".join([decider, *texts])


def _deadlines(decisions: Sequence[scheduler_pb2.Decision]) -> str:
    """Return the numbers of promised and refused deadlines, or "" if no job has a deadline."""
    codes = Counter(d.reason.code for d in decisions if not d.admitted)
    counts = {
        "promised": sum(d.admitted for d in decisions),
        "refused": codes["DEADLINE_REFUSED"],
        "out of reach": codes["DEADLINE_UNREACHABLE"],
        "past": codes["DEADLINE_PAST"],
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _plan_texts(value: scheduler_pb2.Round) -> dict[str, str]:
    """Return the short texts of a round's execution plans by digest."""
    return {
        digest: str(read_execution_plan("execution_plans", plan))
        for digest, plan in value.execution_plans.items()
    }


def _decisions(plans: Mapping[str, str]) -> Sequence[Column[scheduler_pb2.Decision]]:
    return (
        Column("JOB", lambda d: short_name(d.job)),
        Column("DECISION", lambda d: d.kind + (" (opportunistic)" if d.opportunistic else "")),
        Column(
            "RUNS ON", lambda d: allocation_text(d.allocation) if d.HasField("allocation") else ""
        ),
        Column("PLAN", lambda d: plans.get(d.allocation.cell.plan, ""), wide=True),
        Column("NODES", _nodes),
        Column("DEADLINE", lambda d: "promised" if d.admitted else ""),
        Column("REASON", lambda d: d.reason.code),
        Column("NOT APPLIED", lambda d: d.skipped),
    )


REPLAN_COLUMNS: Final[Sequence[Column[scheduler_pb2.Decision]]] = (
    Column("REPLANNED", lambda d: short_name(d.job)),
    Column("PRICE", lambda d: format_number(d.restart_price), right=True),
    Column("GPU-S", lambda d: d.reason.evidence.get(RESTART_GPU_S_KEY, ""), right=True),
    Column("LOST SAMPLES", lambda d: d.reason.evidence.get(LOST_SAMPLES_KEY, ""), right=True),
    Column("BECAUSE", lambda d: d.reason.message),
)
"""The price of each replan in units of the objective, in GPU-seconds and samples, and its reason."""


def _nodes(decision: scheduler_pb2.Decision) -> str:
    shares = decision.allocation.shares
    shown = [f"{short_name(s.node)}:{format_indices(s.gpu_indices)}" for s in shares[:4]]
    return " ".join(shown) + (f" +{len(shares) - 4} nodes" if len(shares) > 4 else "")


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(values.items()))


@dataclass(frozen=True, slots=True)
class _ComparedFigure:
    """A figure of a round and of its replay."""

    name: str
    recorded: str
    again: str


def show_replay(before: scheduler_pb2.Round, answer: scheduler_pb2.ReplayRoundResponse) -> None:
    """Print a round next to its replay."""
    again = answer.round
    rows = [
        _ComparedFigure("solver", solver_text(before), solver_text(again)),
        _ComparedFigure("status", before.status, again.status),
        _ComparedFigure(
            "objective", format_number(before.objective), format_number(again.objective)
        ),
        _ComparedFigure("bound", proven_bound(before), proven_bound(again)),
        _ComparedFigure("gap", format_gap(before), format_gap(again)),
        _ComparedFigure(
            "samples/s", format_number(before.samples_per_s), format_number(again.samples_per_s)
        ),
        _ComparedFigure("running", str(before.running), str(again.running)),
        _ComparedFigure("waiting", str(before.waiting), str(again.waiting)),
    ]
    columns: Sequence[Column[_ComparedFigure]] = (
        Column("", lambda s: s.name),
        Column("RECORDED", lambda s: s.recorded, right=True),
        Column("REPLAYED", lambda s: s.again, right=True),
    )
    show_table(rows, columns)
    compared = compare_with_recorded_bound(before, again)
    if compared:
        print_line(compared)
    print_note("all decisions are the same" if answer.same_decisions else "the decisions differ")


def compare_with_recorded_bound(before: scheduler_pb2.Round, again: scheduler_pb2.Round) -> str:
    """Return how far a replay without its own bound is from the recorded round's bound.

    Return "" if that bound says nothing about the replay. This is so if the replay has its own
    bound, if the recorded round has none, or if the two may not have been the same problem.
    """
    if not again.bound_is_trivial or not _same_problem(before, again):
        return ""
    recorded, reached = (
        (before.goals[0], again.goals[0]) if len(before.goals) > 1 else (before, again)
    )
    if recorded.bound_is_trivial or not isfinite(recorded.bound) or reached.gap == float("inf"):
        return ""
    short_of = abs(recorded.bound - reached.objective) / max(abs(recorded.bound), 1e-12)
    goal = f"{before.goals[0].name}: " if len(before.goals) > 1 else ""
    return (
        f"{goal}the replayed solution is {100 * short_of:.3g} % short of the recorded round's bound"
        f" ({format_number(recorded.bound)})"
    )


_SOLVING_OPTIONS: Final = ("solver", "gap", "seed", "solve_limit", "defragment_every_rounds")
"""Options that leave the problem unchanged."""


def _same_problem(before: scheduler_pb2.Round, again: scheduler_pb2.Round) -> bool:
    """Return whether both rounds, which share a snapshot, certainly solved the same problem.

    A scheduler states its own problem, and which deadlines are admitted depends on a search.
    """
    asked = []
    for value in (before, again):
        chosen = scheduler_pb2.RoundOptions()
        chosen.CopyFrom(value.options)
        for name in _SOLVING_OPTIONS:
            chosen.ClearField(name)
        asked.append(chosen)
    searched = asked[0].deadlines in ("look-ahead", "planned") or "deadline" in asked[0].objective
    alike = asked[0] == asked[1] and list(before.versions) == list(again.versions)
    return alike and len(before.goals) == len(again.goals) and not (searched or asked[0].scheduler)


def _compare_greedy(value: scheduler_pb2.Round, gain: float) -> str:
    """Return how greedy compares by the last goal. It is never better by the earlier goals."""
    if gain >= 0:
        return f"{format_number(gain)} less"
    return f"{format_number(-gain)} more, but worse in an earlier goal"
