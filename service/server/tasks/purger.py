"""The removal of deleted clusters' rows in the background, batch by batch, by any replica."""

from __future__ import annotations

import logging
from typing import Final

from tessera.db.store.store import Store
from tessera.db.upkeep.purge import purge_batch
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.tasks.noticed_task import NoticedTask

log = logging.getLogger(__name__)

RETRY_S: Final = 60.0
"""Seconds between checks of the store when no notice arrives, for example because one was lost."""


class ClusterPurger(NoticedTask):
    """A task that removes the rows of deleted clusters, at each deletion and periodically.

    It calls ``store.purge`` until nothing is left.
    """

    def __init__(self, store: Store, calls: Calls) -> None:
        super().__init__(
            log,
            "rows of deleted clusters are not removed yet",
            event="purge_failed",
            retry_s=RETRY_S,
        )
        self._store, self._calls = store, calls

    async def work(self) -> None:
        """Remove all rows of deleted clusters. Raises what the store raises."""
        while await self._calls.run(self._store.update, purge_batch):
            pass
