"""Notices of changes of clusters: LISTEN, in a separate thread and on a separate connection."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, Self

import psycopg2
from psycopg2.extensions import ISOLATION_LEVEL_AUTOCOMMIT

from tessera.db.base.turn import STATE_CHANNEL
from tessera.db.schema.engine import KEEPALIVES, sqlalchemy_url

log = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 1.0, 30.0
"""Seconds until the first attempt to reconnect, doubled after each one, and their maximum."""

EVERY_CLUSTER = ""
"""The name that subscribers receive after the connection was lost: any cluster may have changed."""


class Listener:
    """A thread that calls its subscribers with the name of each cluster that changes.

    The channel says what changed: the desired state (``tessera.db.base.turn``), or the workloads to
    estimate (``tessera.db.estimates.derived_estimates``).

    No change is missed: after a lost connection subscribers are called with ``EVERY_CLUSTER``.
    """

    def __init__(self, url: str) -> None:
        self._dsn = sqlalchemy_url(url).set(drivername="postgresql").render_as_string(False)
        self._subscribers: dict[str, list[Callable[[str], None]]] = {STATE_CHANNEL: []}
        self._closed, self.listening = threading.Event(), threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="tessera-listen", daemon=True)

    def subscribe(self, callback: Callable[[str], None], channel: str = STATE_CHANNEL) -> None:
        """Call ``callback`` with each message on ``channel`` after ``start``. It must not block."""
        self._subscribers.setdefault(channel, []).append(callback)

    def start(self) -> Self:
        """Begin to listen. ``listening`` is set once the database has confirmed it."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._closed.set()
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> Self:
        """Begin to listen."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self.close()

    def _run(self) -> None:
        retry_s = 0.0  # 0: no attempt has failed since the connection last worked
        while not self._closed.is_set():
            try:
                with closing(
                    psycopg2.connect(
                        self._dsn,
                        application_name="tessera-listen",
                        connect_timeout=10,
                        **KEEPALIVES,
                    )
                ) as c:
                    self._listen(c)
            except psycopg2.Error as error:
                if self.listening.is_set():
                    retry_s = 0.0
                self.listening.clear()
                if not retry_s:
                    log.warning(
                        "lost the connection for the database's notices; trying to reconnect",
                        extra={"event": "notices_lost", "error": " ".join(str(error).split())},
                    )
                retry_s = min(2 * retry_s or RETRY_S, MAX_RETRY_S)
                self._closed.wait(retry_s)

    def _listen(self, connection: Any) -> None:
        connection.set_isolation_level(ISOLATION_LEVEL_AUTOCOMMIT)
        with connection.cursor() as cursor:
            for channel in self._subscribers:
                cursor.execute(f"LISTEN {channel}")
        self.listening.set()
        log.info("listening for the database's notices", extra={"event": "notices_begun"})
        self._tell({(channel, EVERY_CLUSTER) for channel in self._subscribers})
        while not self._closed.is_set():
            ready, _, _ = select.select([connection.fileno(), self._wake_read], [], [])
            if self._wake_read in ready:
                return
            connection.poll()
            changed = {(note.channel, note.payload) for note in connection.notifies}
            connection.notifies.clear()
            self._tell(changed)

    def _tell(self, changed: set[tuple[str, str]]) -> None:
        for channel, cluster in sorted(changed):
            for callback in self._subscribers[channel]:
                callback(cluster)
