"""The effect of callers without an identity on the other callers of a server with TLS."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final, Self

import psutil
import typer
from rich.console import Console

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.forwarding import forward_from
from tessera.benchmarks.service.hostile.knocks import TLS_KINDS
from tessera.benchmarks.service.hostile.lab import find_raised, make_small_cluster
from tessera.benchmarks.service.hostile.monitor import measure_rss_mib, wait_until_given_back
from tessera.benchmarks.service.hostile.neighbour import (
    HEALTH_EVERY_S,
    PAUSE_S,
    CallSamples,
    HealthProbe,
    Neighbour,
    RepeatingThread,
)
from tessera.benchmarks.service.hostile.requests import NEIGHBOUR_CLUSTER
from tessera.benchmarks.service.hostile.siege import COMBINED_PHASE, NEIGHBOUR_HOST, Attackers
from tessera.benchmarks.service.hostile.verdicts import (
    BUSY_MACHINE_S,
    OTHER_CALLS,
    QUIET_WITHIN_S,
    AttackPhase,
)
from tessera.service.cli.authority import make_authority
from tessera.service.cli.demo.stack import Stack, free_port, run_stack
from tessera.simulator.figures import Figure, Report

MAX_DESCRIPTORS_LEFT: Final = 20
"""Number of open files of the server by which it may exceed those before an attack."""


@register_case(
    "hostile-tls",
    smoke={"load": 0.02, "seconds": 2.0},
    health_max_s=("<=", 1.0),
    other_failures=("==", 0),
    rss_growth_mib=("<=", 256.0),
    descriptors_left=("<=", MAX_DESCRIPTORS_LEFT),
    internal_errors=("==", 0),
    servers_ended=("==", 0),
)
def attack_tls_port(
    load: Annotated[
        float, typer.Option(help="Share of the full attack to run.", min=0.001, max=1.0)
    ] = 1.0,
    seconds: Annotated[
        float, typer.Option(help="Length of each attack in seconds.", min=1.0)
    ] = 10.0,
    seed: int = 0,
) -> Report:
    """Attack the port of a server with TLS without any identity, and measure what others see.

    Hostile callers speak without TLS, send garbage, hold 2,000 connections in the middle of their handshake,
    or call with unknown tokens: each kind in turn, and then all together. A caller with a token submits,
    lists and schedules, and another one asks for health, half of the time over a new connection.

    The bounds are those of `tessera bench hostile`. Ten seconds after the attack, the server may hold 20 more
    open files than before (``descriptors_left``), so connections that are not used are closed.
    """
    err = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="tessera-tls-") as name:
        folder = Path(name) / "tls"
        make_authority(folder, ["127.0.0.1"])
        with run_stack(tls=folder) as stack, TlsSiege(stack, seconds, load, seed) as siege:
            phases = [siege.attack("alone", [])]
            for phase in (*TLS_KINDS, COMBINED_PHASE):
                kinds = list(TLS_KINDS) if phase == COMBINED_PHASE else [phase]
                phases.append(siege.attack(phase, kinds))
                err.print(f"hostile-tls: {siege.describe(phases[-1])}", highlight=False)
            left = siege.descriptors_left
    figures = _sum_up(phases[0], phases[1:])
    figures["descriptors_left"] = left
    is_busy = figures["control_max_s"] > BUSY_MACHINE_S
    return Report(
        seed=seed,
        figures=figures,
        waived=frozenset({"health_max_s"} if is_busy else ()),
        table=[{k: v for k, v in phase.row().items() if k in _SHOWN} for phase in phases],
    )


_SHOWN: Final = (
    "phase",
    "calls",
    "answers",
    "health_max_s",
    "control_max_s",
    "other_rounds",
    "other_round_max_s",
    "other_call_max_s",
    "other_failures",
    "rss_growth_mib",
    "internal_errors",
    "server_ended",
)


class TlsSiege:
    """Attacks on a server with TLS, with callers that have a token next to them."""

    def __init__(self, stack: Stack, seconds: float, load: float, seed: int) -> None:
        self._stack, self._seconds, self._load, self._seed = stack, seconds, load, seed
        self._samples, self._left = CallSamples(), ExitStack()
        self._process = psutil.Process(stack.servers[0].process.pid)
        self._errors = 0
        self.descriptors_left = 0
        """Largest number of open files that an attack has left in the server."""

    def __enter__(self) -> Self:
        """Start the other callers, and a control process that only answers health checks."""
        enter, address = self._left.enter_context, self._stack.addresses[0]
        make_small_cluster(self._stack, NEIGHBOUR_CLUSTER)
        control = f"127.0.0.1:{free_port()}"
        bare = subprocess.Popen(
            [sys.executable, "-m", "tessera.benchmarks.service.hostile.bare", control]
        )
        self._left.callback(bare.wait)
        self._left.callback(bare.kill)
        own_address = enter(forward_from(NEIGHBOUR_HOST, address))
        settings = self._stack.channel
        neighbour = Neighbour(own_address, self._samples, settings)
        enter(RepeatingThread(neighbour.work, PAUSE_S))
        for probe in (
            HealthProbe(own_address, self._samples, "health", settings),
            HealthProbe(control, self._samples, "control"),
        ):
            probe.ask()
            enter(RepeatingThread(probe.ask, HEALTH_EVERY_S))
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def attack(self, name: str, kinds: Sequence[str]) -> AttackPhase:
        """Run attacks of some kinds at the same time, and measure the effects."""
        pid, before_fds = self._process.pid, self._process.num_fds()
        before_mib = measure_rss_mib(pid)
        with Attackers(
            self._stack.addresses[0],
            kinds,
            seconds=self._seconds,
            load=self._load,
            seed=self._seed,
            authorities=self._stack.channel.authorities,
        ) as attackers:
            began_s = time.monotonic()
            attackers.begin()
            if not kinds:
                time.sleep(self._seconds)
            tally = attackers.wait()
        left_s = time.monotonic()
        has_ended = self._stack.servers[0].process.poll() is not None
        after_mib = before_mib
        if kinds and not has_ended:
            after_mib = wait_until_given_back(pid, before_mib, left_s, QUIET_WITHIN_S)
            left = self._wait_for_descriptors(before_fds, left_s) - before_fds
            self.descriptors_left = max(self.descriptors_left, left)
        raised = find_raised(self._stack.servers[0].log.read_text().splitlines(keepends=True))
        logged, self._errors = raised[self._errors :], len(raised)
        return AttackPhase(
            name=name,
            samples=self._samples.select(began_s, left_s),
            tally=tally,
            rss_before_mib=before_mib,
            rss_after_mib=after_mib,
            logged=logged,
            server_ended=has_ended,
        )

    def _wait_for_descriptors(self, before: int, left_s: float) -> int:
        """Return the number of open files once it is as before, or ``QUIET_WITHIN_S`` have passed."""
        while True:
            number = self._process.num_fds()
            if number <= before + MAX_DESCRIPTORS_LEFT:
                return number
            if time.monotonic() > left_s + QUIET_WITHIN_S:
                return number
            time.sleep(0.2)

    @staticmethod
    def describe(phase: AttackPhase) -> str:
        """Return the results of a phase in one line, with failures."""
        row = {k: v for k, v in phase.row().items() if k in _SHOWN}
        shown = [f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
        return "; ".join([*shown, *dict.fromkeys([*phase.failures, *phase.logged])])[:2000]


def _sum_up(alone: AttackPhase, phases: Sequence[AttackPhase]) -> dict[str, Figure]:
    """Return the worst phase of each figure, or the sum of counts."""
    return {
        "health_max_s": max(phase.longest_s("health") for phase in phases),
        "health_alone_max_s": alone.longest_s("health"),
        "control_max_s": max(phase.longest_s("control") for phase in (alone, *phases)),
        "other_round_alone_s": alone.longest_s("round"),
        "other_round_max_s": max(phase.longest_s("round") for phase in phases),
        "other_call_alone_s": alone.longest_s(*OTHER_CALLS),
        "other_call_max_s": max(phase.longest_s(*OTHER_CALLS) for phase in phases),
        "other_failures": sum(len(phase.failures) for phase in phases),
        "rss_growth_mib": max(phase.rss_growth_mib for phase in phases),
        "internal_errors": sum(p.tally.internal + len(p.logged) for p in phases),
        "servers_ended": sum(phase.server_ended for phase in phases),
        "hostile_calls": sum(phase.tally.calls for phase in phases),
    }
