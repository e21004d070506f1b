"""The rule for when the next round of a cluster is due, given its events, a spacing and a period.

The service and the simulator both follow it, so that their rounds take place at the same times.
"""

from __future__ import annotations

import math


class RoundTimes:
    """The times at which one cluster's rounds are due.

    An event asks for a round. It is due at once, or ``spacing_s`` after the beginning of the last
    round, so all events in between share one round. Without an event, a round is due ``period_s``
    after the last one, and the first is due at once. If ``period_s`` is inf, there are no such
    rounds. Neither they nor rounds that promises need wait for the spacing.

    Times are seconds of one clock that never goes back. Only the earliest request is kept, so the
    memory that this takes does not depend on the number of events. After a round, ask again for
    what is known to come later.
    """

    __slots__ = (
        "_asked_s",
        "_begun_s",
        "_expected_begun_s",
        "_expected_s",
        "_needed_s",
        "_period_from_s",
        "period_s",
        "spacing_s",
    )

    def __init__(self, spacing_s: float, period_s: float = math.inf) -> None:
        self.spacing_s, self.period_s = spacing_s, period_s
        self._begun_s = self._expected_begun_s = self._period_from_s = -math.inf
        self._asked_s = self._expected_s = self._needed_s = math.inf

    @property
    def is_asked(self) -> bool:
        """Return whether an event asks for a round that has not begun."""
        return self._asked_s < math.inf

    def ask(self, at_s: float) -> None:
        """Ask for a round because of an event at ``at_s``, now or later."""
        self._asked_s = min(self._asked_s, at_s)

    def expect(self, at_s: float) -> None:
        """Record that a start is planned for ``at_s``, or none if it is inf.

        This replaces an earlier call. Its round does not wait for other rounds, but only for the spacing
        after the last one of its kind: a job that hangs shortly before its end moves the start that is
        planned after it again and again.
        """
        self._expected_s = at_s

    def need(self, at_s: float) -> None:
        """Record that promises break without a round at ``at_s``, or not if it is inf.

        That round does not wait for the spacing. This replaces an earlier call.
        """
        self._needed_s = at_s

    def begin(self, now_s: float) -> bool:
        """Record that a round begins; return whether an event or a promise caused it.

        The round answers all events until now. A request for a later time stays, because this round
        cannot see that event.
        """
        caused = min(self._asked_s, self._expected_s, self._needed_s) <= now_s
        if self._asked_s <= now_s:
            self._asked_s = math.inf
        if self._expected_s <= now_s:
            self._expected_s, self._expected_begun_s = math.inf, now_s
        if self._needed_s <= now_s:
            self._needed_s = math.inf
        self._begun_s = self._period_from_s = now_s
        return caused

    def restart_period(self, now_s: float) -> None:
        """Count the period from now, because somebody else decided a round."""
        self._period_from_s = now_s

    def drop(self) -> None:
        """Forget all requests, because somebody else decides the rounds."""
        self._asked_s = self._expected_s = self._needed_s = math.inf

    def due_s(self, event_s: float = math.inf) -> float:
        """Return the time at which the next round is due, or inf if none is.

        It may lie in the past. ``event_s`` is the time of an event that is known to come.
        """
        asked_s = max(min(self._asked_s, event_s), self._begun_s + self.spacing_s)
        expected_s = max(self._expected_s, self._expected_begun_s + self.spacing_s)
        due_s = min(asked_s, expected_s, self._needed_s)
        return (
            due_s if math.isinf(self.period_s) else min(due_s, self._period_from_s + self.period_s)
        )
