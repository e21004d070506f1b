"""grpc.health.v1 for the store: serving only while the store answers and its schema is right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2

from tessera.db.store.store import Store
from tessera.formulation.base.errors import Unavailable
from tessera.service.server.tasks.calls import Calls

log = logging.getLogger(__name__)


INSTANCE_KEY: Final = "tessera-instance"
"""Key of the initial metadata in which a health check names the instance that answers."""


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc] # it ships no types
    """The health service, which also reports the instance of the server that answers."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if self._instance:
            await context.send_initial_metadata(((INSTANCE_KEY, self._instance),))
        return await super().Check(request, context)


class HealthChecker:
    """A background check of the store every ``period_s``.

    It reports the result for the server ("") and for each service. ``calls`` is a
    thread that nothing else uses, so that a busy pool does not look like a lost database.
    """

    def __init__(
        self,
        store: Store,
        calls: Calls,
        services: Iterable[str],
        period_s: float,
        instance: str = "",
    ) -> None:
        self.servicer = _HealthServicer(instance)
        self._store, self._period_s = store, period_s
        self._services = ["", *services]
        self._calls = calls
        self._ready: bool | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Check once, then continue in the background."""
        await self._check()
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Report NOT_SERVING permanently, and stop checking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.servicer.enter_graceful_shutdown()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._check()

    async def _check(self) -> None:
        problem = ""
        try:
            async with asyncio.timeout(self._period_s):
                await self._calls.run(self._store.ready)
        except Unavailable as error:
            problem = str(error)
        except TimeoutError:
            problem = f"the store did not answer in {self._period_s:g} s"
        ready = not problem
        if ready is not self._ready:
            level = logging.INFO if ready else logging.ERROR
            log.log(
                level,
                "the store is ready" if ready else "the store is not ready",
                extra={"event": "store_readiness", "ready": ready, "error": problem},
            )
        self._ready = ready
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self.servicer.set(service, status.SERVING if ready else status.NOT_SERVING)
