"""Hostile callers, whose calls are counted by their answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import grpc
import numpy as np

from tessera.benchmarks.service.hostile.tally import LEFT_CODE, CallTally, merge_tallies
from tessera.client import PLAIN_TEXT, open_channel

CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 128 << 20),  # large, to test whether the server accepts it
    ("grpc.use_local_subchannel_pool", 1),  # a separate connection for each caller
]

AN_HOUR_S: Final = 3600.0

PAUSE_S: Final = 0.05
"""The pause after an answer with the code UNAVAILABLE."""


@dataclass(slots=True, kw_only=True)
class AttackOrders:
    """The orders of one attacker: the target, the load and the end of the attack."""

    address: str
    load: float
    """The share of the full attack, in (0, 1]."""
    seed: int
    until_s: float
    """The time at which to leave, by ``time.monotonic``."""
    _turns: itertools.count[int] = field(default_factory=itertools.count)

    def scaled(self, full: int, least: int = 1) -> int:
        """Return ``full`` scaled by the load, but at least ``least``."""
        return max(least, round(full * self.load))

    def next_turn(self) -> int:
        """Return the number of the next call, counted over all threads."""
        return next(self._turns)

    @property
    def is_over(self) -> bool:
        """Return whether it is time to leave."""
        return time.monotonic() >= self.until_s


class Caller:
    """A connection whose calls are counted, and abandoned when the attack is over."""

    def __init__(self, attack: AttackOrders, number: int) -> None:
        self.attack, self.tally = attack, CallTally()
        self.rng = np.random.default_rng((attack.seed, number))
        self._channel = open_channel(attack.address, PLAIN_TEXT, CHANNEL_OPTIONS)

    def call(
        self,
        path: str,
        message: bytes,
        *,
        timeout_s: float,
        what: str = "",
        leave_after_s: float = AN_HOUR_S,
    ) -> bytes | None:
        """Return the answer, or None if there was none. Abandon a call that outlasts the attack."""
        started_s, what = time.monotonic(), what or path.rpartition("/")[2]
        patience_s = min(leave_after_s, self.attack.until_s - started_s)
        answer, code, details = None, "OK", ""
        # Without serializers, bytes are sent unchanged.
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(path)
        call = method.future(message, timeout=timeout_s)
        try:
            answer = call.result(timeout=max(0.0, patience_s))
        except grpc.FutureTimeoutError:
            call.cancel()
            code = LEFT_CODE
        except grpc.RpcError as error:
            code, details = error.code().name, error.details() or ""
        self.tally.record(what, code, time.monotonic() - started_s, details)
        if code == "UNAVAILABLE":
            time.sleep(PAUSE_S)
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def call_from_threads(
    attack: AttackOrders, threads: int, work: Callable[[Caller], None], most_calls: int
) -> CallTally:
    """Repeat ``work`` from threads with a connection each.

    They stop when the attack is over or ``most_calls`` calls have been made.
    """
    callers = [Caller(attack, number) for number in range(threads)]

    def repeat(caller: Caller) -> None:
        while not attack.is_over and attack.next_turn() < most_calls:
            work(caller)

    with ThreadPoolExecutor(threads) as pool:
        repeated = [pool.submit(repeat, caller) for caller in callers]
    for caller in callers:
        caller.close()
    for one in repeated:
        one.result()
    return merge_tallies(caller.tally for caller in callers)
