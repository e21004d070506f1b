"""The base of the parts that make up PostgreSQL's store."""

from __future__ import annotations

from tessera.db.clock_watch import SilenceLimit
from tessera.db.migrate import MigratedDatabase
from tessera.formulation.records.store import StoreLimits


class StorePart:
    """A part of the store. Each of its methods is one transaction, unless it says otherwise."""

    def __init__(
        self,
        database: MigratedDatabase,
        silence: SilenceLimit,
        limits: StoreLimits,
        probation_s: float,
    ) -> None:
        """Remember what all parts share.

        A node that health drained is undrained after ``probation_s`` seconds of health.
        """
        self._database, self._silence = database, silence
        self._limits, self._probation_s = limits, probation_s
