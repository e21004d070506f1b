"""The embedded database of a server, which is started again when it has ended."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from tessera.db.schema import embedded
from tessera.service.server.tasks.noticed_task import NoticedTask

log = logging.getLogger(__name__)

WATCH_S: Final = 5.0
"""Seconds between two looks at the database, and between two attempts to start it again."""


class EmbeddedWatch(NoticedTask):
    """A task that starts the embedded database in ``directory`` again whenever it has ended.

    ``directory`` is None for the usual one.
    """

    def __init__(self, directory: Path | None) -> None:
        super().__init__(
            log,
            problem="the embedded database has ended, and does not start",
            event="database_ended",
            retry_s=WATCH_S,
        )
        self._directory = directory

    async def work(self) -> None:
        """Start the database unless it runs. Raises Unavailable if it does not start."""
        if await asyncio.to_thread(embedded.is_running, self._directory):
            return
        await asyncio.to_thread(embedded.start_server, self._directory, create=False)
        log.warning(
            "the embedded database had ended, and was started again",
            extra={"event": "database_restarted"},
        )
