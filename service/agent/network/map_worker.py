"""The task that applies the servers' map outside of the agent's event loop.

A failure here is reported and stops no job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from tessera.formulation.answer.network.tags import (
    CODE_POINTS,
    CONTROL_TAG,
    PRIORITIES,
    TagSettings,
)
from tessera.formulation.base.errors import TesseraError
from tessera.service.agent.network.node import NodeNetwork
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""Seconds that gangs wait for their map; a tool that hangs must not hold them up."""

RECHECK_S: Final = 60.0
"""Seconds between two checks of an unchanged map.

It may have failed, or another program may have changed it.
"""


class NetworkMapWorker:
    """A worker that keeps the interfaces of this agent's nodes at the newest settings.

    ``nodes`` are handled separately, so that one failing interface does not hide another. ``spawn``
    is as in the supervisor. All methods belong to one event loop; commands run in threads.
    """

    def __init__(
        self,
        nodes: Sequence[NodeNetwork],
        *,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._nodes = tuple(nodes)
        self._clock, self._spawn = clock, spawn
        self._patience_s = patience_s
        self._settings: TagSettings | None = None  # None until a server has sent a network plan
        self._again_s = 0.0
        self._newer = False  # the settings differ from those being applied
        self._busy = False
        self._callback: Callable[[], None] = lambda: None
        self.settled = True
        self.remarks: tuple[str, ...] = ()
        """Sentences on what keeps the settings from having an effect here."""

    def call_on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``settled`` has become true or ``remarks`` have changed."""
        self._callback = callback

    def desired(self, settings: TagSettings | None) -> None:
        """Begin to apply ``settings``; until this is done or given up, ``settled`` is false.

        If ``settings`` is None, the servers have no plan. Interfaces then keep their treatment of
        the tags of running jobs.
        """
        if settings is None:
            if self._settings is None:
                return
            settings = TagSettings(tags={}, priorities={})
        if settings == self._settings and self._clock() < self._again_s:
            return
        if settings != self._settings:
            self.settled = False
            asyncio.get_running_loop().call_later(self._patience_s, self._give_up, settings)
        self._settings, self._newer = settings, True
        self._again_s = self._clock() + RECHECK_S
        if not self._busy:
            self._busy = True
            self._spawn(self._carry_out())

    def environment(self, job: str) -> Mapping[str, str]:
        """Return the environment variables for the processes of ``job``; empty if it has no tag."""
        return self._nodes[0].environment(job) if self._nodes else {}

    async def _carry_out(self) -> None:
        try:
            while self._newer and self._settings is not None:
                self._newer = False
                wanted = self._settings
                remarks = await asyncio.gather(*(self._on(node, wanted) for node in self._nodes))
                self._set_remarks(tuple(dict.fromkeys(text for each in remarks for text in each)))
        except Exception:  # the outermost guard of this task: jobs do not end with their network
            log.exception(
                "cannot apply the network plan; the network stays as it is",
                extra={"event": "network_plan_not_applied"},
            )
        finally:
            self._busy = False
            self.settled = True
        self._callback()

    async def _on(self, node: NodeNetwork, settings: TagSettings) -> tuple[str, ...]:
        """Apply ``settings`` to a node's interfaces; return what is wrong there."""
        try:
            await asyncio.to_thread(node.desired, settings)
            while (wait_s := await asyncio.to_thread(node.advance)) is not None:
                await asyncio.sleep(wait_s)
            return await asyncio.to_thread(node.findings)
        except (TesseraError, OSError) as error:
            return (str(error),)

    def _set_remarks(self, remarks: tuple[str, ...]) -> None:
        """Keep ``remarks``, and log the new ones."""
        for text in remarks:
            if text not in self.remarks:
                log.warning(
                    "something keeps the network plan from having an effect",
                    extra={"event": "network_remark", "remark": text},
                )
        self.remarks = remarks

    def _give_up(self, settings: TagSettings) -> None:
        if self.settled or settings != self._settings:
            return
        log.warning(
            "the map of tags is not in force; jobs start without it",
            extra={"event": "tag_map_late", "waited_s": self._patience_s},
        )
        self.settled = True
        self._callback()


def settings_from_message(desired: pb.Desired) -> TagSettings | None:
    """Return the gangs' tags and the map that a server sent, or None without a network plan.

    A gang whose tag is not in the map goes without it: its traffic is treated as unmarked.
    """
    if not desired.HasField("network"):
        return None
    network = desired.network
    priorities = {
        tag: priority
        for tag, priority in sorted(network.priorities.items())
        if 0 <= tag < CODE_POINTS and 0 <= priority < PRIORITIES
    }
    tag_of = {g.job: g.network.dscp for g in desired.gangs if g.HasField("network")}
    control = network.control_dscp
    return TagSettings(
        tags={job: tag for job, tag in tag_of.items() if tag in priorities},
        priorities=priorities,
        control_tag=control if 0 <= control < CODE_POINTS else CONTROL_TAG,
        remarks=tuple(
            f"job {job} has DSCP tag {tag}, but the servers sent no priority for this tag"
            for job, tag in sorted(tag_of.items())
            if tag >= 0 and tag not in priorities
        ),
    )
