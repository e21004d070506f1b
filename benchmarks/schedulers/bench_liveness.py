"""A benchmark of promised starts: adversarial streams of jobs, in which none may starve or thrash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import BaselinesOption, SeedsOption, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.server_streams import SERVER_STREAMS, run_on_server
from tessera.benchmarks.schedulers.stream_kinds import STREAMS, draw_stream
from tessera.benchmarks.schedulers.stream_runs import (
    MAX_WRONG_RATIO,
    StreamRequest,
    StreamRun,
)
from tessera.benchmarks.schedulers.streams import SPACING_S
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.simulator.comparison.policies import DEFAULT_POLICY, is_ours, options_of, split_list
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.registry import scheduler_names

EASY: Final = "easy"
CONSERVATIVE: Final = "conservative"
BASELINES: Final = ",".join(("fcfs", EASY, CONSERVATIVE, "arena", "sia", "srt"))
SERVER: Final = "server"
"""The suffix of the figures of a real server, and the policy in its rows of the table."""
SERVER_FIGURES: Final = {
    "jobs": "jobs",
    "starved": "starved",
    "unpromised": "unpromised",
    "unfinished": "unfinished",
    "max_wait_over_promise_exact": "max_wait_over_promise",
    "short_starts": "short_starts",
    "restarts": "restarts",
    "restart_share_over_bound": "restart_share_over_bound",
    "refused_rounds": "refused_rounds",
}
"""The figures of a simulated policy that a server also has, and their names there."""
SERVER_JOBS: Final = 12
"""The number of jobs of a stream on a server, so that each ends within minutes."""
MAX_NAMES: Final = 5
"""The number of starved jobs that a row of the table names."""

RunKey = tuple[str, int, str]
"""(stream, seed, policy)."""
Runs = Mapping[RunKey, StreamRun]
PairRuns = Mapping[tuple[str, int], StreamRun]
"""The runs of a policy by (stream, seed)."""


@register_case(
    "liveness",
    smoke={
        "seeds": 1,
        "streams": "one-gang,pinned-types,underestimates",
        "jobs": 24,
        "baselines": "easy,conservative",
        "workers": 0,
    },
    starved=("==", 0),
    unpromised=("==", 0),
    max_wait_over_promise_exact=("<=", 1.0),
    max_wait_over_promise_wrong=("<=", MAX_WRONG_RATIO),
    promised_wait_over_conservative_median=("<=", 1.2),
    promised_wait_over_conservative_worst=("<=", 1.2),
    short_starts=("==", 0),
    restart_share_over_bound=("<=", 1.0),
    promises_broken=("==", 0),
    jct_over_easy=("<=", 1.0),
    utilisation_over_easy=(">=", 0.98),
    starved_server=("==", 0),
    unpromised_server=("==", 0),
    max_wait_over_promise_server=("<=", 1.0),
    short_starts_server=("==", 0),
    restart_share_over_bound_server=("<=", 1.0),
    refused_rounds_server=("==", 0),
)
@with_sweep
def find_starvation(
    *,
    seeds: SeedsOption = 3,
    streams: Annotated[
        str, typer.Option(help="Comma-separated kinds of streams. Default: all kinds.")
    ] = ",".join(STREAMS),
    jobs: Annotated[int, typer.Option(min=12, help="Number of jobs of a stream.")] = 100,
    policy: Annotated[
        str, typer.Option(help="Our policy, as in other benchmarks: ilp:OBJECTIVE@OPTION=VALUE.")
    ] = DEFAULT_POLICY,
    baselines: BaselinesOption = BASELINES,
    server_seeds: Annotated[
        int, typer.Option(min=0, help="Seeds that a real server runs. Default: 0, no server.")
    ] = 0,
    server_streams: Annotated[
        str, typer.Option(help="Comma-separated kinds of streams that a real server runs.")
    ] = "one-gang,elastic",
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Run streams of jobs that try to starve a job, to break a promised start, or to cause thrashing.

    Each kind of stream (``stream_kinds``) has a small cluster and hours of jobs, and rounds as a
    server has them: on events at least 30 s apart, and every 300 s. Starts cost what
    ``simulator/overheads`` says. The policy runs with its default options, apart from the deadlines,
    weights of queues and fair shares that are the subject of a stream. Published schedulers run the
    same streams. One that breaks a rule of a stream, such as a node selector, is left out there.

    A job's promise is the time by which the first round that saw it said that it would start. In
    ``exact`` streams, no job lasts longer than its estimate, and no node fails. ``starved`` counts
    the jobs that never started, or started later than promised by more than one spacing of rounds,
    30 s; in other streams, after more than three times the promised wait. ``unpromised`` counts the
    jobs that had to wait and got no promise, of a start or of a deadline.
    ``max_wait_over_promise_exact`` and ``_wrong`` are the largest waits from submission to first
    start, over the promised wait and one spacing.
    ``max_wait_over_plan_exact`` is the same over the wait that conservative backfilling would have
    planned, next to the jobs that ran when the job came. It shows starvation without promises.

    ``promised_wait_over_conservative_median`` and ``_worst`` are over the kinds of streams: our mean
    promised wait over the mean wait that conservative backfilling plans for the same jobs in its own
    run, both with one spacing added. ``..._same_state_*`` compare with the waits that it would plan
    next to the jobs that run under our policy. A job without a promise counts with its real wait.

    ``short_starts`` counts the stops, moves and changes by an optimization before a job has trained
    for ``change_spacing`` times the cost of its start (an option of the policy, 0 if it has none).
    Streams in which quotas or deadlines force stops are counted in ``short_starts_forced``.
    ``restart_share`` is the largest share of a job's held time that went to starts which an
    optimization caused, and ``restart_share_over_bound`` multiplies it by ``change_spacing`` + 1.
    ``promises_broken`` counts promised deadlines that were missed in exact streams.

    ``jct_over_easy`` is the geometric mean over streams and seeds of our mean JCT over EASY's, over
    the jobs that both finished. ``utilisation_over_easy`` is the ratio of the shares of GPUs that
    jobs hold until the last arrival. ``jct_over_NAME`` is the same for each published scheduler.

    With ``server_seeds``, a server runs the streams of a kind, of 12 jobs each, next to each other
    on clusters of their own. It is a process with PostgreSQL, its agents are processes, and so are
    their jobs, which replay training 30 times as fast. Rounds are 30 times closer together: 1 s apart
    on events, and every 10 s. Figures that end in ``_server`` are those above, from the store's jobs,
    their histories and the snapshots of rounds. Times count as training, so one spacing is 30 s, as
    there. A start may be as late again for the latencies of the server, 1 s of its clock: to decide and
    commit rounds, to start processes, and to report ends. A start costs 60 s of training. A job's
    promise is the first that a round stored.
    """
    kinds = split_list(streams, tuple(STREAMS))
    server_kinds = split_list(server_streams, SERVER_STREAMS)
    options = options_of(policy)
    rivals = [name for name in split_list(baselines) if name in scheduler_names()]
    if not is_ours(policy):
        raise InvalidInput("policy", f"must be one of ours, e.g. {DEFAULT_POLICY}")
    requests = {
        (kind, k, name): StreamRequest(stream=kind, seed=k, jobs=jobs, policy=name)
        for kind in kinds
        for k in range(seed, seed + seeds)
        for name in (policy, *rivals)
    }
    results = sweep.run([request.task() for request in requests.values()])
    runs = {key: StreamRun.read(results[request.task().name]) for key, request in requests.items()}
    figures = liveness_figures(runs, policy)
    rows = list(stream_rows(runs))
    if server_seeds:
        server_runs = run_server_streams(server_kinds, range(seed, seed + server_seeds), options)
        figures |= {"seeds_server": server_seeds, **server_figures(list(server_runs.values()))}
        rows += stream_rows(server_runs)
    return Report(seed=seed, figures={"streams": len(kinds), "seeds": seeds, **figures}, table=rows)


def run_server_streams(
    kinds: Sequence[str], seeds: Sequence[int], options: RoundOptions
) -> dict[RunKey, StreamRun]:
    """Run each kind of stream on a server, with all seeds next to each other."""
    runs: dict[RunKey, StreamRun] = {}
    for kind in kinds:
        streams = {f"{kind}-{k}": draw_stream(kind, k, SERVER_JOBS) for k in seeds}
        kind_runs = run_on_server(streams, options).values()
        runs |= {(kind, k, SERVER): run for k, run in zip(seeds, kind_runs, strict=True)}
    return runs


def server_figures(runs: Sequence[StreamRun]) -> dict[str, Figure]:
    """Return the figures of runs on a real server. One without a value is left out."""
    counts = _promise_counts(runs)
    return {
        f"{name}_{SERVER}": counts[key]
        for key, name in SERVER_FIGURES.items()
        if not np.isnan(counts[key])
    }


def liveness_figures(runs: Runs, policy: str) -> dict[str, Figure]:
    """Return the figures of the runs of ``policy``, compared with the others.

    A figure without a value is left out, so that its bound is not judged without its streams.
    """
    our_runs = select_runs(runs, policy)
    result = _promise_counts(list(our_runs.values()))
    result |= _wait_figures("same_state", _wait_ratios(our_runs, our_runs))
    for name in dict.fromkeys(name for _, _, name in runs if name != policy):
        rival_runs = {
            key: run for key, run in select_runs(runs, name).items() if not run.refused_rounds
        }
        if name == CONSERVATIVE:
            result |= _wait_figures(name, _wait_ratios(our_runs, rival_runs))
        result |= _comparison_figures(name, our_runs, rival_runs)
    return {key: value for key, value in result.items() if not np.isnan(value)}


def select_runs(runs: Runs, policy: str) -> PairRuns:
    """Return the runs of a policy."""
    return {(kind, seed): run for (kind, seed, name), run in runs.items() if name == policy}


def _promise_counts(runs: Sequence[StreamRun]) -> dict[str, Figure]:
    """Return the figures of a policy alone."""
    free = [run for run in runs if not run.forces]
    return {
        "jobs": sum(len(run.names) for run in runs),
        "starved": sum(len(run.starved_jobs()) for run in runs),
        "unpromised": sum(run.unpromised_jobs for run in runs),
        "unfinished": sum(run.unfinished_jobs for run in runs),
        "max_wait_over_promise_exact": _max_ratio(run.wait_ratios() for run in runs if run.exact),
        "max_wait_over_promise_wrong": _max_ratio(
            run.wait_ratios() for run in runs if not run.exact
        ),
        "max_wait_over_plan_exact": _max_ratio(run.plan_ratios() for run in runs if run.exact),
        "short_starts": sum(run.short_starts for run in free),
        "short_starts_forced": sum(run.short_starts for run in runs if run.forces),
        "restarts": sum(run.restarts for run in runs),
        "restart_share": max((run.restart_share for run in free), default=np.nan),
        "restart_share_over_bound": max(
            (run.restart_share * (run.spacing + 1) for run in free), default=np.nan
        ),
        "deadlines_promised": sum(sum(run.has_deadline) for run in runs),
        "promises_broken": sum(run.promises_broken for run in runs if run.exact),
        "refused_rounds": sum(run.refused_rounds for run in runs),
    }


def _max_ratio(ratios: Iterable[Floats]) -> float:
    """Return the largest of several runs' ratios, or NaN without any."""
    values = np.concatenate([np.zeros(0), *ratios])
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else np.nan


def _wait_ratios(our_runs: PairRuns, planning_runs: PairRuns) -> list[float]:
    """Return, for each kind of stream, our mean promised wait over the mean planned wait.

    One spacing is added to both. Jobs that conservative backfilling plans no start for do not count.
    """
    waits: dict[str, list[tuple[float, float]]] = {}
    for (kind, seed), run in our_runs.items():
        if (kind, seed) in planning_runs:
            planned_s = planning_runs[kind, seed].planned_wait_s
            promised_s = np.where(np.isinf(run.promised_wait_s), run.wait_s, run.promised_wait_s)
            has_plan = np.isfinite(planned_s)
            pairs = zip(promised_s[has_plan], planned_s[has_plan], strict=True)
            waits.setdefault(kind, []).extend(pairs)
    means = [np.mean(pairs, axis=0) + SPACING_S for pairs in waits.values() if pairs]
    return [float(promised_s / planned_s) for promised_s, planned_s in means]


def _wait_figures(name: str, ratios: Sequence[float]) -> dict[str, Figure]:
    prefix = f"promised_wait_over_{name}"
    if not ratios:
        return {}
    return {f"{prefix}_median": float(np.median(ratios)), f"{prefix}_worst": max(ratios)}


def _comparison_figures(name: str, our_runs: PairRuns, rival_runs: PairRuns) -> dict[str, Figure]:
    """Return our figures over a published scheduler's, on the streams that it can run."""
    pairs = [(key, run, rival_runs[key]) for key, run in our_runs.items() if key in rival_runs]
    by_kind: dict[str, list[float]] = {}
    for (kind, _), run, rival in pairs:
        if np.isfinite(ratio := jct_ratio(run, rival)):
            by_kind.setdefault(kind, []).append(np.log(ratio))
    if not by_kind:
        return {}
    logs = np.concatenate(list(by_kind.values()))
    use = [run.utilisation / rival.utilisation for _, run, rival in pairs]
    return {
        f"jct_over_{name}": float(np.exp(logs.mean())),
        f"jct_over_{name}_worst": max(float(np.exp(np.mean(logs))) for logs in by_kind.values()),
        f"utilisation_over_{name}": float(np.mean(use)),
    }


def jct_ratio(run: StreamRun, rival: StreamRun) -> float:
    """Return the mean JCT over the rival's, over the jobs that both finished, or NaN without any."""
    common = run.has_ended & rival.has_ended
    if not common.any():
        return np.nan
    return float(run.jct_s[common].mean() / rival.jct_s[common].mean())


def stream_rows(runs: Runs) -> Iterator[dict[str, Figure | str]]:
    """Yield a row for each stream and policy, over all seeds."""
    for kind, name in dict.fromkeys((kind, name) for kind, _, name in runs):
        pairs = {key: run for key, run in select_runs(runs, name).items() if key[0] == kind}
        yield {"stream": kind, "policy": name, **_row(pairs)}


def _row(pairs: PairRuns) -> dict[str, Figure | str]:
    runs = list(pairs.values())
    names = [f"{job} (seed {k})" for (_, k), run in pairs.items() for job in run.starved_jobs()]
    wait_s = np.concatenate([run.wait_s for run in runs])
    jct_s = np.concatenate([run.jct_s[run.has_ended] for run in runs])
    return {
        "exact": runs[0].exact,
        **_promise_counts(runs),
        "starved_jobs": ", ".join(names[:MAX_NAMES]),
        "max_wait_over_promise": _max_ratio(run.wait_ratios() for run in runs),
        "max_wait_over_plan": _max_ratio(run.plan_ratios() for run in runs),
        "promised_wait_over_same_state": max(_wait_ratios(pairs, pairs), default=np.nan),
        "wait_mean_s": float(wait_s.mean()),
        "wait_p95_s": float(np.percentile(wait_s, 95)),
        "wait_max_s": float(wait_s.max()),
        "jct_mean_s": float(jct_s.mean()) if len(jct_s) else np.nan,
        "utilisation": float(np.mean([run.utilisation for run in runs])),
        "decide_s": sum(run.decide_s for run in runs),
    }
