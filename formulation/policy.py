"""What a round is asked to do: the objective, the promises and limits. Defaults carry their reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import Stage, parse, require_bounded

DeadlineMode = Literal["ignore", "keep", "myopic", "look-ahead", "planned"]
DEADLINE_MODES: Final[tuple[DeadlineMode, ...]] = (
    "ignore",
    "keep",
    "myopic",
    "look-ahead",
    "planned",
)
KEEP: Final = "keep"
"""Keeps the deadlines that earlier rounds promised, as look-ahead does, and promises no others."""
PLANNED: Final = "planned"
"""Plans as look-ahead does, anew each round, and promises nothing."""
LOOKS_AHEAD: Final = (KEEP, "look-ahead", PLANNED)
PROMISES_NONE: Final = ("ignore", KEEP)
"""Modes under which a deadline that is not promised yet is not looked at."""

NETWORK_LEVELS: Final = 8
"""Priorities that NICs and switches have (IEEE 802.1Q); Crux section 4.3."""

MAX_QUEUE_WEIGHTS: Final = 64
MAX_QUEUE_WEIGHT: Final = 1e6
"""Queues that a caller may give a weight, and the largest, which is that of a job."""

MAX_FAIRNESS_LEVELS: Final = 64
"""Places that a caller may have settled one by one. Each takes up to 20 solves and adds a row to all later
problems; beyond the worst 64 jobs the sums of the next stage order the others well enough."""

MAX_CAUTION: Final = 10.0
"""More standard deviations than anyone means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The choices that shape a round's statement. Flat, so that it can be recorded with the round."""

    objective: str = "throughput"
    """What to optimise; ``tessera.formulation.grammar`` says how objectives combine."""
    raw_throughput: bool = False
    """Sum samples/s as they are (Arena Eq. 5 to the letter), which favours small models."""
    queue_weights: str = ""
    """Factor on the weight of each queue's jobs, e.g. ``1:4,2:1``; a queue that is absent has 1."""
    restart_horizon_s: float = 3600.0
    """Restart seconds are spread over the lesser of this and the job's remaining time."""
    max_restart_share: float = 0.9
    """A restart never costs more of a Cell's value than this, so that short jobs still start."""
    defragment_every_rounds: int = 12
    """Look for moves that mend fragmentation each such round (hourly at 300 s); 0: never."""
    round_s: float = 300.0
    """Seconds to the next round: a job that waits now is taken to wait so long; the first slot of plans."""

    deadlines: str = ""
    """One of ``DEADLINE_MODES``. Default: look-ahead if the objective names deadline, else keep."""
    run_to_completion: bool = False
    """No launched job is suspended (Arena section 3.5)."""
    min_run_s: float = 0.0
    """A job is neither moved, resized nor suspended before it has run so long."""
    max_changes: int = -1
    """At most so many running jobs are moved, resized or suspended, or as many as promises force; -1: any."""
    queue_order: bool = False
    """Launch by queue and time of arrival (Arena section 3.5), not by value alone."""
    promote_after_s: float = math.inf
    """A job that has waited so long counts as one queue higher, twice so long as two."""
    opportunistic: bool = False
    """With ``queue_order``: start jobs of lower queues past a blocked one, and suspend them for it."""
    reserve_after_s: float = math.inf
    """GPUs are reserved for the first job that has waited so long; others only backfill around it."""
    cost_of: str = "dollars"
    """What ``cost`` counts: ``dollars`` an hour or ``watts``."""
    rate_floor: float = 0.5
    """``cost`` runs no job below this share of its rate at the requested GPUs."""
    fairness_levels: int = 4
    """How many of the worst-off jobs a lexicographic objective settles before the next objective."""
    network_levels: int = NETWORK_LEVELS
    """Levels of network priority that jobs are compressed to, where the cluster's network is described."""
    network_floor: float = 0.0
    """Share of its rate alone that each job shall have on the network; 0: work done is all that counts."""
    network_measure_s: float = 0.0
    """A job on several nodes goes before all others that it meets on the network until agents have measured
    its traffic, at most so long from the start of its allocation; 0: not (Crux 5)."""
    caution: float = 0.0
    """An iteration is taken to last exp(caution x sd) times its estimate, sd being that of the logarithm:
    1 leaves one in six to be slower, where estimates are right about themselves. 0: estimates as they are."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        for name in ("restart_horizon_s", "round_s", "promote_after_s", "reserve_after_s"):
            value = getattr(self, name)
            endless = name in ("promote_after_s", "reserve_after_s")
            if not value > 0 or not (endless or math.isfinite(value)):
                raise InvalidInput(name, "must be a positive number of seconds")
        if not 0 <= self.max_restart_share < 1:
            raise InvalidInput("max_restart_share", "must lie in [0, 1)")
        if self.defragment_every_rounds < 0:
            raise InvalidInput("defragment_every_rounds", "must be 0 (never) or more")
        if not (math.isfinite(self.min_run_s) and self.min_run_s >= 0):
            raise InvalidInput("min_run_s", "must be 0 or a number of seconds")
        if self.max_changes < -1:
            raise InvalidInput("max_changes", "must be -1 (any number) or more")
        if self.deadlines not in ("", *DEADLINE_MODES):
            raise InvalidInput("deadlines", f"must be one of {', '.join(DEADLINE_MODES)}")
        if self.cost_of not in ("dollars", "watts"):
            raise InvalidInput("cost_of", "must be dollars or watts")
        if not 0 <= self.rate_floor <= 1:
            raise InvalidInput("rate_floor", "must lie in [0, 1]")
        if self.fairness_levels < 1:
            raise InvalidInput("fairness_levels", "must be at least 1")
        if not 0 <= self.caution <= MAX_CAUTION:
            raise InvalidInput("caution", f"must lie in [0, {MAX_CAUTION:g}]")
        if not 1 <= self.network_levels <= NETWORK_LEVELS:
            raise InvalidInput("network_levels", f"must lie in [1, {NETWORK_LEVELS}]")
        if not 0 <= self.network_floor < 1:
            raise InvalidInput("network_floor", "must lie in [0, 1)")
        if not (math.isfinite(self.network_measure_s) and self.network_measure_s >= 0):
            raise InvalidInput("network_measure_s", "must be 0 or a number of seconds")
        if self.opportunistic and not self.queue_order:
            raise InvalidInput("opportunistic", "has a meaning only with queue_order")
        _ = self.stages, self.weight_of_queue

    def require_bounded(self) -> None:
        """Refuse what multiplies a round's work. For callers: recorded rounds may have more.

        Raises:
            InvalidInput: a value is beyond its limit.
        """
        require_bounded(self.stages)
        if self.fairness_levels > MAX_FAIRNESS_LEVELS:
            raise InvalidInput("fairness_levels", f"must lie in [1, {MAX_FAIRNESS_LEVELS}]")
        weights = self.weight_of_queue
        if len(weights) > MAX_QUEUE_WEIGHTS:
            raise InvalidInput(
                "queue_weights", f"names {len(weights)} queues; name at most {MAX_QUEUE_WEIGHTS}"
            )
        if max(weights.values(), default=0.0) > MAX_QUEUE_WEIGHT:
            raise InvalidInput("queue_weights", f"a factor is above {MAX_QUEUE_WEIGHT:,.0f}")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the objective's stages, in order. Raises InvalidInput."""
        return parse(self.objective)

    @property
    def deadline_mode(self) -> DeadlineMode:
        """Return how deadlines are treated."""
        for mode in DEADLINE_MODES:
            if self.deadlines == mode:
                return mode
        named = any(term.objective == "deadline" for stage in self.stages for term in stage.terms)
        return "look-ahead" if named else KEEP

    @property
    def weight_of_queue(self) -> dict[int, float]:
        """Return queue -> factor. Raises InvalidInput."""
        found: dict[int, float] = {}
        for part in filter(None, (p.strip() for p in self.queue_weights.split(","))):
            queue, colon, factor = part.partition(":")
            try:
                key, value = int(queue), float(factor)
            except ValueError:
                key, value = 0, math.nan
            if not colon or key < 1 or not (math.isfinite(value) and value >= 0) or key in found:
                raise InvalidInput(
                    "queue_weights",
                    f"{part!r}: expected QUEUE:FACTOR, each queue once, e.g. 1:4,2:1",
                )
            found[key] = value
        return found
