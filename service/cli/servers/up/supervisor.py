"""The supervision of the parts of ``tessera up``: one that ends is started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from tessera.formulation.base.errors import Unavailable
from tessera.service.cli.children import end_of_log

MAX_RESTARTS: Final = 5
"""The number of restarts of a part within ``WINDOW_S`` after which its end is the end of ``up``."""

WINDOW_S: Final = 600.0
FIRST_PAUSE_S: Final = 1.0
"""The pause before the second restart within ``WINDOW_S``. Each further one is twice as long."""


class Part(Protocol):
    """A part that can end, and that can be started again."""

    @property
    def name(self) -> str:
        """Return the name for messages."""
        ...

    @property
    def log(self) -> Path:
        """Return the file with the part's output."""
        ...

    def find_ending(self) -> str:
        """Return how the part ended, e.g. "was killed by SIGKILL", or "" while it runs."""
        ...

    def start(self) -> None:
        """Start the part again. If it cannot be started, it has ended."""
        ...


class Supervisor:
    """The parts, and when each was started again.

    ``tell`` is called with a line about each part that has ended. ``advice`` says what the user can
    do if a part ends too often.
    """

    def __init__(self, parts: Sequence[Part], tell: Callable[[str], None], advice: str) -> None:
        self._tell, self._advice = tell, advice
        self._restarts_s: dict[str, list[float]] = {part.name: [] for part in parts}
        self._due_s: dict[str, float] = {}
        self._parts = parts

    def check(self, now_s: float) -> None:
        """Start the parts that have ended again, those that end repeatedly after a pause.

        Raises:
            Unavailable: a part ended too often. The message has the end of its log.
        """
        for part in self._parts:
            if part.name not in self._due_s and (how := part.find_ending()):
                self._plan_restart(part, how, now_s)
            if self._due_s.get(part.name, now_s + 1) <= now_s:
                del self._due_s[part.name]
                self._restarts_s[part.name].append(now_s)
                part.start()

    def _plan_restart(self, part: Part, how: str, now_s: float) -> None:
        restarts_s = [at_s for at_s in self._restarts_s[part.name] if at_s > now_s - WINDOW_S]
        self._restarts_s[part.name] = restarts_s
        if len(restarts_s) >= MAX_RESTARTS:
            raise Unavailable(
                f"{part.name} was started again {len(restarts_s)} times within {WINDOW_S / 60:g} minutes, but"
                f" {how}; {self._advice}; {end_of_log(part.log)}"
            )
        pause_s = FIRST_PAUSE_S * 2 ** (len(restarts_s) - 1) if restarts_s else 0.0
        self._due_s[part.name] = now_s + pause_s
        when = f"in {pause_s:g} s" if pause_s else "now"
        self._tell(f"{part.name} {how}; it is started again {when}")
