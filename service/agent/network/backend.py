"""What carries a map from DSCP tags to priorities out on an interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.network.tags import PRIORITIES, check_tag
from tessera.service.agent.network.commands import Run, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry of the map of an interface. ``before``: None where there was none."""

    interface: str
    tag: int
    before: int | None
    after: int

    @property
    def raises(self) -> bool:
        """Return whether traffic that may be in flight is moved up, past its own earlier packets."""
        return self.before is not None and self.after > self.before


class Backend(Protocol):
    """Carries a map out on one interface."""

    @property
    def interface(self) -> str:
        """Return the interface's name."""
        ...

    @property
    def dry_run(self) -> bool:
        """Return whether ``apply`` only says what it would do."""
        ...

    def read(self) -> dict[int, int]:
        """Return the priority of each tag that the interface maps now. Raises Unavailable."""
        ...

    def apply(self, wanted: Mapping[int, int]) -> tuple[Change, ...]:
        """Map each tag in ``wanted``, leave others alone; return what was (dry run: would be) changed.

        Writes only what differs, and reads back.

        Raises:
            InvalidInput: not a map from DSCP tags to priorities.
            Unavailable: a tool is missing or failed, or what was written does not read back.
            NotAllowed: the interface is set up in a way that this would break.
        """
        ...

    def commands(self, changes: Sequence[Change]) -> list[list[str]]:
        """Return what ``apply`` runs for ``changes``."""
        ...

    def findings(self) -> tuple[str, ...]:
        """Return in sentences what on this interface keeps priorities from having an effect."""
        ...


class Advice:
    """The back end ``none``: remembers what it was asked for, and does nothing."""

    dry_run = True

    def __init__(self, interface: str = "") -> None:
        self.interface = interface
        self._asked: dict[int, int] = {}

    def read(self) -> dict[int, int]:
        """Return what was asked for."""
        return dict(self._asked)

    def apply(self, wanted: Mapping[int, int]) -> tuple[Change, ...]:
        """Return what a back end would have had to change."""
        changes = differences(self.interface, self._asked, wanted)
        self._asked |= wanted
        return changes

    def commands(self, changes: Sequence[Change]) -> list[list[str]]:
        """Return nothing."""
        return []

    def findings(self) -> tuple[str, ...]:
        """Say that nothing is carried out."""
        return ("back end none: priorities are advice only, nothing is carried out",)


class Tool(ABC):
    """A back end that reads and writes with a command of the system."""

    def __init__(self, interface: str, *, run: Run = run, dry_run: bool = True) -> None:
        self.interface = interface
        self.dry_run = dry_run
        self._run = run

    @abstractmethod
    def read(self) -> dict[int, int]:
        """Return the priority of each tag that the interface maps now. Raises Unavailable."""

    @abstractmethod
    def commands(self, changes: Sequence[Change]) -> list[list[str]]:
        """Return what ``apply`` runs for ``changes``, what must be set up before them included."""

    def findings(self) -> tuple[str, ...]:
        """Return in sentences what on this interface keeps priorities from having an effect."""
        return ()

    def apply(self, wanted: Mapping[int, int]) -> tuple[Change, ...]:
        """Write what differs, and read back: some tools end with 0 although the driver refused."""
        changes = differences(self.interface, self.read(), wanted)
        if self.dry_run or not changes:
            return changes
        for argv in self.commands(changes):
            self._run(argv)
        left = differences(self.interface, self.read(), wanted)
        if left:
            wrong = ", ".join(f"tag {c.tag} is {_shown(c.before)}, not {c.after}" for c in left)
            raise Unavailable(
                f"{self.interface}: written but not in force: {wrong}; another program (lldpad), or DCBX"
                f" in the NIC's firmware, may own this table: end it, or hand the table to the system"
            )
        return changes


def differences(
    interface: str, found: Mapping[int, int], wanted: Mapping[int, int]
) -> tuple[Change, ...]:
    """Return what must change in ``found`` for ``wanted`` to hold, by tag. Raises InvalidInput."""
    for tag, priority in wanted.items():
        check_tag(tag, "tag")
        if not 0 <= priority < PRIORITIES:
            raise InvalidInput(f"tag {tag}", f"a priority is 0 to {PRIORITIES - 1}, not {priority}")
    return tuple(
        Change(interface=interface, tag=tag, before=found.get(tag), after=priority)
        for tag, priority in sorted(wanted.items())
        if found.get(tag) != priority
    )


def stages(changes: Iterable[Change]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """Return what may be written at once, and what only after that has drained.

    New entries and moves down reorder nothing: what waits in the higher queue leaves first. A move up lets
    packets overtake earlier ones of their queue pair, so it comes when fewer jobs crowd the higher queue.
    """
    every = tuple(changes)
    return tuple(c for c in every if not c.raises), tuple(c for c in every if c.raises)


def _shown(priority: int | None) -> str:
    return "not mapped" if priority is None else str(priority)
