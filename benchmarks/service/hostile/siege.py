"""The phases of the benchmark: no attack, each kind of attack, all together, and the end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Self

from tessera.benchmarks.service.forwarding import forward_from
from tessera.benchmarks.service.hostile.attacks import KINDS
from tessera.benchmarks.service.hostile.lab import LEASE_S, Lab
from tessera.benchmarks.service.hostile.monitor import (
    BUSY_SHARE,
    Monitor,
    measure_idle_share,
    measure_rss_mib,
    wait_until_given_back,
    wait_until_quiet,
)
from tessera.benchmarks.service.hostile.neighbour import (
    HEALTH_EVERY_S,
    PAUSE_S,
    CallSamples,
    HealthProbe,
    Neighbour,
    RepeatingThread,
)
from tessera.benchmarks.service.hostile.tally import CallTally, merge_tallies
from tessera.benchmarks.service.hostile.verdicts import QUIET_WITHIN_S, AttackPhase
from tessera.db.invariants import count_long_transactions, find_broken_rules, load_epochs
from tessera.formulation.errors import Unavailable

COMBINED_PHASE: Final = "together"
"""The name of the phase with all kinds of attacks at the same time."""

NEIGHBOUR_HOST: Final = "127.0.0.2"
"""The source host of the well-behaved caller, since the server distinguishes clients by host."""

LEAVES_WITHIN_S: Final = 30.0
"""The time after an attack within which attackers must leave. Then they are killed."""

KILLED_CODE: Final = "KILLED"
"""The code in the tally of an attacker that did not leave, and whose counts are lost."""

SIGTERM_EXTRA_S: Final = 20.0
"""The time after its grace at which a server that still runs is killed."""


class Attackers:
    """Processes that attack at the same time."""

    def __init__(
        self,
        address: str,
        kinds: Sequence[str],
        *,
        seconds: float,
        load: float,
        seed: int,
    ) -> None:
        self._seconds = seconds
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tessera.benchmarks.service.hostile.attacker",
                    kind,
                    address,
                    f"--seconds={seconds}",
                    f"--load={load}",
                    f"--seed={seed}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind in kinds
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("an attacker did not start")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def begin(self) -> None:
        """Let all attackers begin."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()

    def wait(self) -> CallTally:
        """Wait until all attackers have left, and return their merged tallies."""
        until_s = time.monotonic() + self._seconds + LEAVES_WITHIN_S
        tallies = []
        for process in self._processes:
            try:
                out, _ = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
                tallies.append(CallTally.from_json(json.loads(out)) if out else CallTally())
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                tallies.append(CallTally())
                tallies[-1].record("attacker", KILLED_CODE, self._seconds)
        return merge_tallies(tallies)


class Siege:
    """A run of phases against a lab, with their measurements."""

    def __init__(self, lab: Lab, *, seconds: float, load: float, seed: int) -> None:
        self._lab, self._seconds, self._load, self._seed = lab, seconds, load, seed
        self._samples = CallSamples()
        self._left = ExitStack()
        own_address = self._left.enter_context(forward_from(NEIGHBOUR_HOST, lab.address))
        self._neighbour = Neighbour(own_address, self._samples)
        self._working = RepeatingThread(self._neighbour.work, PAUSE_S)
        self._monitor = Monitor(lab.database, lab.watched_agents())
        self._busy_share = BUSY_SHARE
        self._epochs: dict[str, int] = {}

    def __enter__(self) -> Self:
        enter = self._left.enter_context
        enter(self._working)
        addresses = {"health": self._lab.address, "control": self._lab.control_address}
        for kind, address in addresses.items():
            enter(RepeatingThread(HealthProbe(address, self._samples, kind).ask, HEALTH_EVERY_S))
        self._follow()
        enter(self._monitor)
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _follow(self) -> None:
        pid = self._lab.server.process.pid
        self._monitor.follow(pid, measure_rss_mib(pid))

    def rest(self) -> AttackPhase:
        """Measure the well-behaved callers alone."""
        self._working.pause()
        self._wait_until_idle()
        self._working.resume()
        began_s = time.monotonic()
        time.sleep(self._seconds)
        self._working.pause()
        phase = AttackPhase(name="alone", samples=self._samples.select(began_s, time.monotonic()))
        self._forget()
        return phase

    def _wait_until_idle(self) -> None:
        """Wait until the server's start-up work is done, and measure the load of idle threads."""
        pid = self._lab.server.process.pid
        wait_until_quiet(pid, time.monotonic(), QUIET_WITHIN_S, 4 * BUSY_SHARE)
        self._busy_share = min(0.3, max(BUSY_SHARE, 2 * measure_idle_share(pid)))

    def attack(self, name: str, kinds: Sequence[str]) -> AttackPhase:
        """Run attacks of some kinds, wait until the callers have left, and measure the effects."""
        pid = self._lab.server.process.pid
        before_mib = measure_rss_mib(pid)
        with Attackers(
            self._lab.address, kinds, seconds=self._seconds, load=self._load, seed=self._seed
        ) as attackers:
            self._monitor.take_seen()
            self._working.resume()
            began_s = time.monotonic()
            attackers.begin()
            tally = attackers.wait()
        left_s = time.monotonic()
        self._working.pause(wait=False)
        quiet_after_s, stuck = wait_until_quiet(pid, left_s, QUIET_WITHIN_S, self._busy_share)
        seen = self._monitor.take_seen()
        ended = self._lab.server.process.poll() is not None
        after_mib = (
            before_mib if ended else wait_until_given_back(pid, before_mib, left_s, QUIET_WITHIN_S)
        )
        unheard = sum(silence_s > LEASE_S for silence_s in seen.silence_s.values())
        self._working.pause()
        phase = AttackPhase(
            name=name,
            samples=self._samples.select(began_s, left_s),
            tally=tally,
            rss_before_mib=before_mib,
            rss_peak_mib=seen.rss_mib,
            rss_after_mib=after_mib,
            quiet_after_s=quiet_after_s,
            threads_stuck=stuck,
            transactions_stuck=count_long_transactions(self._lab.database, 5.0),
            silence_s=max(seen.silence_s.values(), default=0.0),
            leases_lost=unheard + self._lab.count_new_losses(),
            logged=self._lab.take_new_errors(),
            broken=self._find_broken(),
            server_ended=ended,
        )
        if ended or stuck:
            self._lab.restart_server()  # so that the next phase shows only its own faults
            self._follow()
            self._wait_until_idle()
            self._forget()
        return phase

    def _forget(self) -> None:
        """Discard losses and errors until now, so that the next phase does not count them."""
        self._monitor.take_seen()
        self._lab.count_new_losses()
        self._lab.take_new_errors()

    def _find_broken(self) -> list[str]:
        """Return the violated rules of the stored data, including the rule that epochs rise."""
        try:
            broken = find_broken_rules(self._lab.database)
            epochs = load_epochs(self._lab.database)
        except Unavailable as error:
            return [f"the database does not answer: {error}"]
        broken += [
            f"the epoch of {cluster} fell"
            for cluster, epoch in self._epochs.items()
            if epochs.get(cluster, -1) < epoch
        ]
        self._epochs = epochs
        return broken

    def find_missing(self) -> Sequence[str]:
        """Return the acknowledged jobs of the well-behaved caller that do not exist."""
        return self._neighbour.find_missing()

    def terminate(self) -> float:
        """Terminate the server during attacks of all kinds, and return the seconds that took.

        The result is infinity if the server had to be killed.
        """
        process = self._lab.server.process
        self._lab.dismiss_fleet()
        patience_s = self._lab.grace_s + SIGTERM_EXTRA_S
        seconds = self._seconds + patience_s
        with Attackers(
            self._lab.address, list(KINDS), seconds=seconds, load=self._load, seed=self._seed + 1
        ) as attackers:
            self._working.resume()
            attackers.begin()
            time.sleep(min(3.0, self._seconds))
            began_s = time.monotonic()
            process.terminate()
            try:
                process.wait(patience_s)
                took_s = time.monotonic() - began_s
            except subprocess.TimeoutExpired:
                took_s = math.inf
        self._lab.server.kill()
        return took_s
