"""Work in the background that a notice of the database starts, whichever replica gets it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod

from tessera.formulation.base.errors import TesseraError


class NoticedTask(ABC):
    """A task that works at each notice, and after ``retry_s`` seconds without one, as it may be lost.

    If the work fails, ``log`` gets ``problem`` with the cause, and it is tried again.
    """

    def __init__(self, log: logging.Logger, problem: str, event: str, retry_s: float) -> None:
        self._log, self._problem, self._event = log, problem, event
        self._retry_s = retry_s
        self._notice = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """End after the part of the work that is being done."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self, _cluster: str) -> None:
        """Note that there is something to do."""
        self._notice.set()

    @abstractmethod
    async def work(self) -> None:
        """Do all that there is to do. Raises what the store raises."""

    async def _repeat(self) -> None:
        while True:
            self._notice.clear()
            try:
                await self.work()
            except TesseraError as error:
                self._log.warning(self._problem, extra={"event": self._event, "error": error})
            except Exception:  # noqa: BLE001 - the outermost guard of this task: it must outlive any mistake
                self._log.exception(self._problem, extra={"event": self._event})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._notice.wait()
