"""The removal of deleted clusters' rows in the background, batch by batch, by any replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from tessera.formulation.errors import TesseraError
from tessera.service.ports import Store
from tessera.service.rpc.calls import Calls

log = logging.getLogger(__name__)

RETRY_S: Final = 60.0
"""Seconds between checks of the store when no notice arrives, for example because one was lost."""


class ClusterPurger:
    """A task that removes the rows of deleted clusters, at each deletion and periodically.

    It calls ``store.purge`` until nothing is left.
    """

    def __init__(self, store: Store, calls: Calls) -> None:
        self._store, self._calls = store, calls
        self._notice = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """End after the batch that is being removed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self, _cluster: str) -> None:
        """Note that a cluster was deleted."""
        self._notice.set()

    async def purge(self) -> None:
        """Remove all rows of deleted clusters. Raises what the store raises."""
        while await self._calls.run(self._store.purge):
            pass

    async def _repeat(self) -> None:
        while True:
            self._notice.clear()
            try:
                await self.purge()
            except TesseraError as error:
                log.warning(
                    "rows of deleted clusters are not removed yet: %s",
                    error,
                    extra={"action": "purge_failed"},
                )
            except Exception:  # the outermost guard of this task: it must outlive any mistake
                log.exception(
                    "rows of deleted clusters are not removed yet", extra={"action": "purge_failed"}
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._notice.wait()
