"""A node's desired network: maps on its interfaces and marks for the jobs that start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tessera.formulation.answer.network.tags import TagSettings
from tessera.formulation.base.errors import InvalidInput
from tessera.service.agent.network.backend import Backend, MapChange, find_differences, split_stages
from tessera.service.agent.network.devices import SYSFS_ROOT, forced_traffic_classes
from tessera.service.agent.network.launch import (
    LaunchSettings,
    find_overridden_marks,
    marking_environment,
)

log = logging.getLogger(__name__)

DRAIN_S = 0.1
"""Seconds after which queues have drained.

64 MB at 200 Gb/s take 3 ms, and pauses by flow control come on top.
"""


class NodeNetwork:
    """An applier of ``TagSettings`` to a node's interfaces, in steps that keep packets in order.

    New entries and moves down come first, and moves up follow ``drain_s`` later. Any two steps are
    at least ``drain_s`` apart. Nothing here waits: ``desired`` and ``advance`` do what is due by
    ``clock``, and ``advance`` returns when to call it again. Both run commands, so an event loop
    calls them in a thread (a ``tc`` of 64 entries takes 2 s).
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        clock: Callable[[], float],
        drain_s: float = DRAIN_S,
        launch: LaunchSettings | None = None,
        sys: Path = SYSFS_ROOT,
    ) -> None:
        if not drain_s >= 0:
            raise InvalidInput("drain_s", f"must be at least 0, not {drain_s}")
        self._backends = tuple(backends)
        self._clock = clock
        self._drain_s = drain_s
        self._launch = launch or LaunchSettings()
        self._sys = sys
        self._settings = TagSettings(tags={}, priorities={})
        self._not_before_s = clock()
        self._logged: tuple[str, ...] = ()

    def desired(self, settings: TagSettings) -> None:
        """Make ``settings`` hold as far as possible now. The same settings again change nothing.

        Raises:
            InvalidInput, NotAllowed, Unavailable: as in ``Backend.apply``; earlier changes stay.
        """
        self._settings = settings
        self.advance()

    def advance(self) -> float | None:
        """Take the next step if it is due.

        Return the seconds after which to call again, or None if all is done.
        """
        left_s = self._not_before_s - self._clock()
        if left_s > 0:
            return left_s
        waiting = [self._step(backend) for backend in self._backends]
        return max(0.0, self._not_before_s - self._clock()) if any(waiting) else None

    def _step(self, backend: Backend) -> bool:
        """Make the changes that are allowed now; return whether more must follow."""
        wanted = self._settings.priorities
        if backend.dry_run:
            self._log_dry_run(backend.apply(wanted))
            return False
        at_once, later = split_stages(find_differences(backend.interface, backend.read(), wanted))
        step = at_once or later
        if not step:
            return False
        self._not_before_s = self._clock() + self._drain_s  # even if it fails halfway
        for c in backend.apply({change.tag: change.after for change in step}):
            log.info(
                "changed the priority of a tag",
                extra={
                    "event": "priority_changed",
                    "interface": c.interface,
                    "dscp": c.tag,
                    "before": c.before,
                    "after": c.after,
                },
            )
        return bool(at_once and later)

    def environment(self, job: str) -> Mapping[str, str]:
        """Return the environment variables for the processes of ``job``; empty if it has no tag."""
        return marking_environment(job, self._settings, self._launch)

    def findings(self) -> tuple[str, ...]:
        """Return sentences on what keeps the settings from having an effect. Raises Unavailable."""
        return (*self._settings.remarks, *self._on_interfaces())

    def _on_interfaces(self) -> Iterable[str]:
        for backend in self._backends:
            yield from backend.findings()
            classes = forced_traffic_classes(backend.interface, self._sys)
            for job in self._settings.tags:
                yield from find_overridden_marks(job, self._settings, classes)

    def _log_dry_run(self, changes: Sequence[MapChange]) -> None:
        """Log once what a back end that does nothing would have done."""
        sentences = tuple(
            f"{c.interface or 'any interface'}: DSCP {c.tag} to priority {c.after}" for c in changes
        )
        if sentences and sentences != self._logged:
            log.info(
                "dry run, so this is not applied",
                extra={"event": "priority_change_skipped", "changes": sentences},
            )
            self._logged = sentences
