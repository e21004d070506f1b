"""The price of TLS, of tokens and of certificates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.fleet import Fleet
from tessera.benchmarks.service.identity_checks import time_checks
from tessera.benchmarks.service.secure_pair import SecurePair, run_pair
from tessera.db.engine import connect_database
from tessera.estimator.samples import sample_profiles
from tessera.service.cli.demo.drive import (
    CLUSTER,
    add_estimates,
    make_cluster,
    schedule_round,
    submit_jobs,
    wait_until_settled,
)
from tessera.service.rpc.convert import job_spec_to_proto
from tessera.simulator.clusters import tiny_cluster
from tessera.simulator.figures import Figure, Report
from tessera.simulator.workloads.philly_like import philly_like

LEAST_SAMPLES: Final = 50
"""Number of calls and of checks below which quantiles have no meaning."""

BUSY_DATABASE_MS: Final = 2.5
"""Time of asking the database whether it is ready (p99), in milliseconds, above which the machine is
too busy for the bound of checks.
"""


@register_case(
    "security",
    smoke={
        "jobs": 20,
        "calls": 3,
        "checks": 10,
        "submissions": 20,
        "turns": 1,
        "enrolments": 4,
        "connections": 2,
    },
    tls_overhead=("<=", 0.5),
    token_check_ms=("<=", 5.0),
)
def time_security(
    jobs: Annotated[int, typer.Option(help="Number of jobs in each round.")] = 60,
    calls: Annotated[int, typer.Option(help="Number of Schedule calls to each server.")] = 300,
    checks: Annotated[int, typer.Option(help="Number of checks of each kind of token.")] = 2000,
    submissions: Annotated[int, typer.Option(help="Number of submissions in a turn.")] = 100,
    turns: Annotated[int, typer.Option(help="Number of turns of submissions.")] = 10,
    enrolments: Annotated[
        int, typer.Option(help="Number of agents that enrol.", min=1, max=200)
    ] = 150,
    connections: Annotated[int, typer.Option(help="Number of connections of each kind.")] = 100,
    seed: int = 0,
) -> Report:
    """Compare a server with TLS and tokens with one without, on the same database.

    ``tls_overhead`` is the median of whole Schedule calls with TLS and a token, divided by that without,
    less 1. The calls alternate between the servers. Rounds are small and greedy (64 GPUs), because the
    share of security falls as rounds grow. Its bound of 0.5 is a price that nobody turns security off for.

    ``token_check_ms`` is the largest p99 of four kinds of checks: of the server's own token and of one of
    an identity provider, remembered and not. Each kind has its p50 and p99. A token that is not remembered
    takes a thread, and the database or RSA. The bound of 5 ms keeps a first call from feeling slower. It is
    waived where asking the database whether it is ready takes above 2.5 ms (``control_p99_ms``).

    ``submissions_per_s`` is of single SubmitJob calls from four threads, to each server in turn, and
    ``enrolments_per_s`` of agents from four threads. A host may enrol 200 at once, and then 20 a second.
    ``first_call_*_ms`` is the median time from opening a connection to the answer of a small call, and
    ``handshake_*_ms`` how much of it exceeds the same without TLS. Both sides of TLS run on this machine.
    """
    err = Console(stderr=True)
    types, nodes = tiny_cluster()
    workload = [spec for _, spec in philly_like(jobs + submissions, seed)]

    def report(step: str) -> None:
        err.print(f"security: {step}")

    with run_pair(report) as pair:
        make_cluster(pair.stack, types, nodes)
        add_estimates(pair.stack, sample_profiles())
        with Fleet(pair.plain.address, CLUSTER, nodes, "fleet"):
            submit_jobs(pair.stack, workload[:jobs])
            schedule_round(pair.stack, 60.0, solver="greedy", seed=seed)
            wait_until_settled(pair.stack)
            report("Schedule calls")
            plain_s, secure_s = pair.time_schedule_calls(calls)
        figures = _overheads(plain_s, secure_s)
        report("checks of tokens")
        figures |= _check_figures(pair, checks)
        report("enrolments and connections")
        enrolled_s, certificate = pair.time_enrolments(enrolments)
        figures |= {"enrolments_per_s": enrolments / enrolled_s}
        figures |= _connection_figures(pair.time_first_calls(connections, certificate))
        report("submissions")
        messages = [job_spec_to_proto("", spec) for spec in workload[jobs:]]
        both_s = pair.time_submissions(messages, turns)
        without, with_security = (turns * submissions / took_s for took_s in both_s)
        figures |= {
            "submissions_per_s": with_security,
            "submissions_plain_per_s": without,
            "submissions_ratio": with_security / without,
        }
    waived = set()
    if calls < LEAST_SAMPLES:
        waived.add("tls_overhead")
    if checks < LEAST_SAMPLES or figures["control_p99_ms"] > BUSY_DATABASE_MS:
        waived.add("token_check_ms")
    return Report(seed=seed, figures=figures, waived=frozenset(waived))


def _overheads(plain_s: Sequence[float], secure_s: Sequence[float]) -> dict[str, Figure]:
    plain, secure = statistics.median(plain_s), statistics.median(secure_s)
    return {
        "tls_overhead": secure / plain - 1.0,
        "schedule_plain_p50_ms": 1e3 * plain,
        "schedule_tls_p50_ms": 1e3 * secure,
        "schedule_plain_p95_ms": 1e3 * find_quantile(plain_s, 95),
        "schedule_tls_p95_ms": 1e3 * find_quantile(secure_s, 95),
    }


def _check_figures(pair: SecurePair, checks: int) -> dict[str, Figure]:
    database = connect_database(pair.stack.database_url, pool_size=3)
    try:
        took = time_checks(database, pair.secure.channel.token, checks)
    finally:
        database.engine.dispose()
    figures: dict[str, Figure] = {
        "token_check_ms": 1e3
        * max(find_quantile(s, 99) for kind, s in took.items() if kind != "control")
    }
    for kind, seconds in took.items():
        figures[f"{kind}_p50_ms"] = 1e3 * statistics.median(seconds)
        figures[f"{kind}_p99_ms"] = 1e3 * find_quantile(seconds, 99)
    return figures


def _connection_figures(took: dict[str, list[float]]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {
        f"first_call_{kind}_ms": 1e3 * statistics.median(seconds) for kind, seconds in took.items()
    }
    for kind in ("token", "certificate"):
        figures[f"handshake_{kind}_ms"] = (
            figures[f"first_call_{kind}_ms"] - figures["first_call_plain_ms"]
        )
    return figures


def find_quantile(seconds: Sequence[float], percent: int) -> float:
    """Return a quantile of at least one number."""
    if len(seconds) < 2:
        return seconds[0]
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]
