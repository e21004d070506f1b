"""Retention in the background.

The replica that holds a cluster's lease deletes the cluster's old rows in batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from tessera.db.store.store import Store
from tessera.formulation.records.store import Retention

log = logging.getLogger(__name__)

PERIOD_S: Final = 600.0
"""Seconds between two passes over all clusters."""

PAUSE_S: Final = 0.05
"""Seconds between two batches, which leave the database to rounds and users."""

MAX_BATCHES: Final = 1000
"""Number of batches in one pass over a cluster. The next pass continues."""


class Pruner:
    """A pruner of rows that retention does not keep.

    Its batches are small, so that no call waits long for one.
    """

    def __init__(
        self, store: Store, retention: Retention, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._store, self._retention, self._sleep = store, retention, sleep

    def prune(
        self, cluster: str, cancelled: Callable[[], bool], _woken: Callable[[], bool] | None = None
    ) -> dict[str, int]:
        """Delete the cluster's old rows; return the deleted numbers by kind. Blocks."""
        total: dict[str, int] = {}
        for _ in range(MAX_BATCHES):
            if cancelled():
                break
            deleted = self._store.prune_batch(cluster, self._retention)
            total = {kind: total.get(kind, 0) + rows for kind, rows in deleted.items()}
            if not any(deleted.values()):
                break
            self._sleep(PAUSE_S)
        if any(total.values()):
            log.info(
                "deleted old rows",
                extra={
                    "event": "pruned",
                    "cluster": cluster,
                    **{f"{kind}_rows": rows for kind, rows in total.items() if rows},
                },
            )
        return total
