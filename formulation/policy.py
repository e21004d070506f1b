"""What a round is asked to do: the objective and its options. Defaults carry their reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from formulation.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The choices that shape a round's statement."""

    objective: Literal["throughput"] = "throughput"
    raw_throughput: bool = False
    """Sum samples/s as they are (Arena Eq. 5 to the letter), which favours small models."""
    restart_horizon_s: float = 3600.0
    """Restart seconds are spread over the lesser of this and the job's remaining time."""
    max_restart_share: float = 0.9
    """A restart never costs more of a Cell's value than this, so that short jobs still start."""
    defragment_every_rounds: int = 12
    """Look for moves that mend fragmentation each such round (hourly at 300 s); 0: never."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not (math.isfinite(self.restart_horizon_s) and self.restart_horizon_s > 0):
            raise InvalidInput("restart_horizon_s", "must be a positive number of seconds")
        if not 0 <= self.max_restart_share < 1:
            raise InvalidInput("max_restart_share", "must lie in [0, 1)")
        if self.defragment_every_rounds < 0:
            raise InvalidInput("defragment_every_rounds", "must be 0 (never) or more")
