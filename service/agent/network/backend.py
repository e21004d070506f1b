"""Back ends that apply a map from DSCP tags to priorities to an interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tessera.formulation.answer.network.tags import PRIORITIES, check_tag
from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.service.agent.network.commands import RunCommand, run_command


@dataclass(frozen=True, slots=True, kw_only=True)
class MapChange:
    """A change of one entry of an interface's map. If ``before`` is None, there was no entry."""

    interface: str
    tag: int
    before: int | None
    after: int

    @property
    def raises(self) -> bool:
        """Return whether traffic in flight may move up, past its own earlier packets."""
        return self.before is not None and self.after > self.before


class Backend(Protocol):
    """A back end that applies a map to one interface."""

    @property
    def interface(self) -> str:
        """Return the interface's name."""
        ...

    @property
    def dry_run(self) -> bool:
        """Return whether ``apply`` only reports what it would do."""
        ...

    def read(self) -> dict[int, int]:
        """Return the priority of each tag that the interface maps now. Raises Unavailable."""
        ...

    def apply(self, wanted: Mapping[int, int]) -> tuple[MapChange, ...]:
        """Map each tag in ``wanted`` and leave others alone; return the changes.

        In a dry run, the changes are only returned. Otherwise, only the differences are written,
        and then read back.

        Raises:
            InvalidInput: not a map from DSCP tags to priorities.
            Unavailable: a tool is missing or failed, or what was written does not read back.
            NotAllowed: the interface is set up in a way that this would break.
        """
        ...

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        """Return the commands that ``apply`` runs for ``changes``."""
        ...

    def findings(self) -> tuple[str, ...]:
        """Return sentences on what keeps priorities from having an effect on this interface."""
        ...


class AdviceBackend:
    """The back end ``none``: it remembers the requested map and does nothing."""

    dry_run = True

    def __init__(self, interface: str = "") -> None:
        self.interface = interface
        self._asked: dict[int, int] = {}

    def read(self) -> dict[int, int]:
        """Return the requested map."""
        return dict(self._asked)

    def apply(self, wanted: Mapping[int, int]) -> tuple[MapChange, ...]:
        """Return the changes that a back end would have had to make."""
        changes = find_differences(self.interface, self._asked, wanted)
        self._asked |= wanted
        return changes

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        """Return an empty list."""
        return []

    def findings(self) -> tuple[str, ...]:
        """Report that nothing is applied."""
        return ("the back end none applies nothing: priorities are advice only",)


class ToolBackend(ABC):
    """A back end that reads and writes with a system command."""

    def __init__(
        self, interface: str, *, run: RunCommand = run_command, dry_run: bool = True
    ) -> None:
        self.interface = interface
        self.dry_run = dry_run
        self._run = run

    @abstractmethod
    def read(self) -> dict[int, int]:
        """Return the priority of each tag that the interface maps now. Raises Unavailable."""

    @abstractmethod
    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        """Return the commands that ``apply`` runs for ``changes``, including any setup."""

    def findings(self) -> tuple[str, ...]:
        """Return sentences on what keeps priorities from having an effect on this interface."""
        return ()

    def apply(self, wanted: Mapping[int, int]) -> tuple[MapChange, ...]:
        """Write the differences and read them back.

        Some tools exit with 0 although the driver refused.
        """
        changes = find_differences(self.interface, self.read(), wanted)
        if self.dry_run or not changes:
            return changes
        for argv in self.commands(changes):
            self._run(argv)
        left = find_differences(self.interface, self.read(), wanted)
        if left:
            wrong = ", ".join(f"tag {c.tag} is {_shown(c.before)}, not {c.after}" for c in left)
            raise Unavailable(
                f"{self.interface}: written but not in force: {wrong}; another program (lldpad), or DCBX"
                f" in the NIC's firmware, may own this table: end it, or hand the table to the system"
            )
        return changes


def find_differences(
    interface: str, found: Mapping[int, int], wanted: Mapping[int, int]
) -> tuple[MapChange, ...]:
    """Return the changes that turn ``found`` into ``wanted``, by tag. Raises InvalidInput."""
    for tag, priority in wanted.items():
        check_tag(tag, "tag")
        if not 0 <= priority < PRIORITIES:
            raise InvalidInput(f"tag {tag}", f"a priority is 0 to {PRIORITIES - 1}, not {priority}")
    return tuple(
        MapChange(interface=interface, tag=tag, before=found.get(tag), after=priority)
        for tag, priority in sorted(wanted.items())
        if found.get(tag) != priority
    )


def split_stages(
    changes: Iterable[MapChange],
) -> tuple[tuple[MapChange, ...], tuple[MapChange, ...]]:
    """Return the changes to write immediately, and those to write after these have drained.

    New entries and moves down do not reorder packets, because packets in the higher queue leave
    first. A move up lets packets overtake earlier ones of their queue pair, so it comes when fewer
    jobs crowd the higher queue.
    """
    every = tuple(changes)
    return tuple(c for c in every if not c.raises), tuple(c for c in every if c.raises)


def _shown(priority: int | None) -> str:
    return "not mapped" if priority is None else str(priority)
