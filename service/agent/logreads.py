"""The answers of an agent to requests for output on its node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

from tessera.service.agent.logs import read_output
from tessera.v1 import agents_pb2 as pb

READ_THREADS: Final = 4
"""Largest number of requests that are worked on at the same time."""

MAX_REQUESTS: Final = 64
"""Largest number of requests that are heeded at the same time. Servers send fewer."""


class LogAnswers:
    """The answers to the requests of one stream, each made once in a thread of ``threads``.

    A server repeats a request until it has the answer. A request that is no longer repeated is
    forgotten. It belongs to the event loop's thread.
    """

    def __init__(self, logs: Path, threads: ThreadPoolExecutor) -> None:
        self._logs, self._threads = logs, threads
        self._taken: dict[str, Future[pb.LogAnswer]] = {}
        self._ready: asyncio.Queue[asyncio.Future[pb.LogAnswer]] = asyncio.Queue()

    def take(self, requests: Iterable[pb.LogRead]) -> None:
        """Begin to answer the requests that are new."""
        wanted = {request.read_id: request for request in islice(requests, MAX_REQUESTS)}
        for read_id in self._taken.keys() - wanted.keys():
            self._taken.pop(read_id).cancel()
        for read_id, request in wanted.items():
            if read_id not in self._taken:
                future = self._threads.submit(answer_read, self._logs, request)
                self._taken[read_id] = future
                asyncio.wrap_future(future).add_done_callback(self._ready.put_nowait)

    async def next_answer(self) -> pb.LogAnswer:
        """Wait for an answer that was not returned before, and return it."""
        while (future := await self._ready.get()).cancelled():
            continue
        return future.result()


def answer_read(logs: Path, request: pb.LogRead) -> pb.LogAnswer:
    """Return the answer to a request. If the output cannot be read, it says why."""
    try:
        part = read_output(
            logs,
            request.job,
            request.generation,
            request.rank,
            request.offset,
            request.max_bytes,
            request.job_number,
        )
    except (OSError, ValueError) as error:
        return pb.LogAnswer(read_id=request.read_id, error=str(error))
    return pb.LogAnswer(
        read_id=request.read_id, offset=part.offset, data=part.data, ended=part.ended
    )
