"""The runtimes that agents of this release include, and their abilities.

Runtimes are declared in this module only. Servers refuse at submission a job that no runtime can
run, and agents include exactly these. Agents import this module, so it stays light: it needs only
the standard library and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.formulation.errors import InvalidInput

REPLAY: Final = "replay"
"""Replays users' jobs, as a process that takes as long as training would but trains nothing."""

PROFILER: Final = "profile"
"""Measures layers, in the service's own tasks."""

FAIL_AT: Final = "fail-at"
"""The only command of a replayed job, for testing failures.

``fail-at N`` fails once N iterations are done.
"""

MAX_DIGITS: Final = 15
"""Digits of N in ``fail-at N``."""


def fail_at(command: Sequence[str], field: str = "command") -> int | None:
    """Return the iteration at which ``command`` asks a replayed job to fail, or None.

    Raises:
        InvalidInput: the replay runtime does not know such a command.
    """
    if not command:
        return None
    if len(command) == 2 and command[0] == FAIL_AT and _is_count(command[1]):
        return int(command[1])
    raise InvalidInput(
        field,
        f"this release's agents replay jobs and train nothing, so they cannot run {_shown(command)};"
        " submit the job without a command",
    )


def _check_replayed(field: str, command: Sequence[str]) -> None:
    fail_at(command, field)


def _check_task(field: str, command: Sequence[str]) -> None:
    if len(command) != 1:
        raise InvalidInput(field, "must be one word, the name of the profiling task")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """A runtime's abilities, by which servers judge jobs before they are queued.

    ``check_command`` raises InvalidInput for a command that the runtime cannot run, naming the
    field it is given. ``trains`` is true if the runtime trains the job's model.
    """

    trains: bool
    check_command: Callable[[str, Sequence[str]], None]


RUNTIMES: Final[dict[str, Capabilities]] = {
    REPLAY: Capabilities(trains=False, check_command=_check_replayed),
    PROFILER: Capabilities(trains=False, check_command=_check_task),
}
"""The runtimes of this release, by name."""

DEFAULT_RUNTIME: Final = REPLAY
"""The runtime of agents that do not name theirs. Earlier releases had no other one for users' jobs."""


def is_training(reported: str, requested: str) -> bool:
    """Return whether times from the runtime ``reported`` were measured on a job that trains.

    If the agent does not name a runtime (""), the one that the server requested counts; "" is the
    agents' default. A runtime that this release does not know counts as one that does not train,
    because nothing is called measured that may not have been.
    """
    runtime = RUNTIMES.get(reported or requested or DEFAULT_RUNTIME)
    return runtime is not None and runtime.trains


def _is_count(text: str) -> bool:
    """Return whether ``text`` is a whole number of a size that iterations can have."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _shown(command: Sequence[str]) -> str:
    text = " ".join(command)
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
