"""The progress that a program reports, checked and timed.

A program may report nonsense: backwards, not a number, 10^300. What cannot be true is ignored, and
the job's user gets a sentence about it.
"""

from __future__ import annotations

import math
from collections import deque

MAX_LOSS = 1e300
MAX_MEMORY_BYTES = 1 << 60
MAX_ITERATIONS = 1e12
"""The largest number of iterations of a job whose program decides when it is done."""
PAIRS = 32
"""Number of latest pairs of reports whose median is the iteration time."""

MIN_STALL_S, STALL_ITERATIONS = 600.0, 20
"""A program hangs after the longer of these seconds and this number of iterations, without progress."""


class ProgressMeter:
    """The checked progress of a job in one generation. Times are monotonic seconds."""

    def __init__(self, total: float, resumed: int | None, *, may_exceed: bool = False) -> None:
        """Begin at ``resumed`` iterations of ``total``. None: the program decides where it begins.

        If it ``may_exceed`` the total, that is only the expected number.
        """
        self._total = total
        self.most_iterations = MAX_ITERATIONS if may_exceed else max(total, 0.0)
        self.resumed = resumed
        self.iterations = resumed or 0
        self.loss: float | None = None
        self.memory_bytes = 0
        self.remark = ""
        self.advanced_s: float | None = None  # when the latest progress came
        self.first_s: float | None = None  # when the first iteration of this generation was done
        self._last: tuple[float, int] | None = None
        self._latest: dict[str, int] = {}  # iterations that each source reported last
        self._times: deque[float] = deque(maxlen=PAIRS)

    @property
    def iter_time_s(self) -> float:
        """Return the median time of an iteration, or 0 if it is not known yet."""
        if not self._times:
            return 0.0
        ordered = sorted(self._times)
        return ordered[len(ordered) // 2]

    @property
    def is_complete(self) -> bool:
        """Return whether all iterations are done."""
        return self._total > 0 and self.iterations >= self._total

    def feed(
        self,
        now_s: float,
        iterations: object,
        loss: object = None,
        memory_bytes: object = None,
        done_s: object = None,
        source: str = "",
    ) -> bool:
        """Take a report in; return whether it shows progress.

        ``done_s`` is when the iteration was done, if the program says so. A program may report in
        several ways, of which one ``source`` is behind another. None may go back.
        """
        count = read_number(iterations)
        if count is None or not 0 <= count <= self.most_iterations * (1 + 1e-9):
            most = self.most_iterations
            self._ignore(f"{_shown(iterations)} iterations, but the job has {most:g}")
            return False
        count = int(count)
        self._feed_facts(loss, memory_bytes)
        before, self._latest[source] = self._latest.get(source, 0), count
        if count < before:
            self._ignore(f"{count} iterations after {before}")
        elif count < (self.resumed or 0):
            self._ignore(f"{count} iterations, but was to go on from iteration {self.resumed}")
        if count < self.iterations:
            return False
        at_s = now_s if (stated := read_number(done_s)) is None else stated
        if not now_s - 86_400 <= at_s <= now_s + 1:
            at_s = now_s
        if self.resumed is None:  # the program goes on from a checkpoint of its own
            self.resumed, self.iterations, self._last = count, count, (at_s, count)
            self.advanced_s = now_s
            return True
        if count == self.iterations:
            return False
        self._time(at_s, count)
        self.iterations, self.advanced_s = count, now_s
        self.first_s = self.first_s if self.first_s is not None else at_s
        return True

    def stalls_at_s(self, limit_s: float, began_s: float) -> float:
        """Return when the program counts as hanging, or infinity.

        A ``limit_s`` that is stated counts from ``began_s`` until the first report. If it is 0, the
        default limit counts from the first report on, because a program may report nothing at all.
        """
        if self.advanced_s is None:
            return began_s + limit_s if limit_s else math.inf
        default_s = max(MIN_STALL_S, STALL_ITERATIONS * self.iter_time_s)
        return self.advanced_s + (limit_s or default_s)

    def _feed_facts(self, loss: object, memory_bytes: object) -> None:
        if loss is not None:
            value = read_number(loss)
            if value is None or abs(value) > MAX_LOSS:
                self._ignore(f"the loss {_shown(loss)}")
            else:
                self.loss = value
        memory = read_number(memory_bytes) if memory_bytes is not None else None
        if memory is not None and 0 <= memory <= MAX_MEMORY_BYTES:
            self.memory_bytes = max(self.memory_bytes, int(memory))

    def _time(self, at_s: float, count: int) -> None:
        if self._last is not None:
            before_s, before = self._last
            if at_s > before_s:
                self._times.append((at_s - before_s) / (count - before))
        self._last = (at_s, count)

    def _ignore(self, what: str) -> None:
        self.remark = f"the program reported {what}; that was ignored"


def read_number(value: object) -> float | None:
    """Return a finite number, also from a text, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    return repr(value)[:40]
