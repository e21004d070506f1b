"""The policy of a round: an objective, promises and limits. Each default has its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.grammar import Stage, parse_objective, require_bounded

DeadlineMode = Literal["ignore", "keep", "myopic", "look-ahead", "planned"]
DEADLINE_MODES: Final[tuple[DeadlineMode, ...]] = (
    "ignore",
    "keep",
    "myopic",
    "look-ahead",
    "planned",
)
KEEP_MODE: Final = "keep"
"""The mode that keeps earlier promises of deadlines, as look-ahead does, and adds none."""
PLANNED_MODE: Final = "planned"
"""The mode that plans again in each round, as look-ahead does, and promises nothing."""
LOOK_AHEAD_MODES: Final = (KEEP_MODE, "look-ahead", PLANNED_MODE)
MODES_WITHOUT_PROMISES: Final = ("ignore", KEEP_MODE)
"""Modes that ignore a deadline which is not promised yet."""

NETWORK_LEVELS: Final = 8
"""Priority levels that NICs and switches have (IEEE 802.1Q; Crux section 4.3)."""

MAX_PRIORITY_WEIGHTS: Final = 64
MAX_PRIORITY_WEIGHT: Final = 1e6
"""The largest weight of a priority that a caller may ask for, which is also that of a job.

``MAX_PRIORITY_WEIGHTS`` is the number of priorities that a caller may give a weight.
"""

MAX_FAIRNESS_LEVELS: Final = 64
"""Places that a caller may have settled one by one.

Each takes up to 20 solves and adds a row to all later problems. Beyond the worst 64 jobs, the sums
of the next stage order the others well enough.
"""

MAX_CAUTION: Final = 10.0
"""The largest caution, in standard deviations. No realistic use needs more."""

GPU_SHARE: Final = "gpus"
DRF: Final = "drf"
FAIR_SHARES: Final = (GPU_SHARE, DRF)
"""The measures of fair shares: GPUs of all types, or the dominant resource."""

DEFAULT_FAIR_HALF_LIFE_S: Final = 86_400.0
"""The half-life of use. After a week, less than a hundredth of it is left."""

DEFAULT_REPLAN_SPACING: Final = 20.0
"""Restart times between two replans, so that at most 5 % of a job's time goes into their restarts."""

DEFAULT_CHANGE_SPACING: Final = 4.0
"""Restart times between two changes of a job, so that at most a fifth of its time goes into them."""

MAX_SPACING: Final = 1e6
"""The largest number of restart times between two changes. No job runs for that long."""

DEFAULT_OBJECTIVE: Final = "balanced:0.25"
"""The objective of a round if nobody names one, in the service, in simulations and in benchmarks.

It was chosen on synthetic jobs (`docs/decisions`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The choices that shape a round's statement. They are flat, so that a round can record them."""

    objective: str = DEFAULT_OBJECTIVE
    """The objective to optimize. ``tessera.formulation.round.grammar`` says how objectives combine."""
    raw_throughput: bool = False
    """Sum samples/s without normalization (Arena Eq. 5 to the letter). This favors small models."""
    priority_weights: str = ""
    """Factor on the weight of the jobs of each priority, e.g. ``1:4,2:1``. Default of a priority: 1."""
    fair_share: str = ""
    """Lower the weights of tenants that used more than their share of the cluster.

    ``gpus`` counts GPUs of all types alike. ``drf`` counts the resource of which the tenant used the
    largest part: GPUs of a type, CPU cores, or host memory. A tenant's weight is then its share, and
    no factor on the weights of its jobs. Empty means that the past does not count.
    """
    fair_half_life_s: float = DEFAULT_FAIR_HALF_LIFE_S
    """With ``fair_share``, the age at which use counts half as much as present use."""
    restart_horizon_s: float = 3600.0
    """Restart seconds are spread over this time, or the job's remaining time if that is less."""
    max_restart_share: float = 0.9
    """Largest share of a Cell's value that a restart may cost, so that short jobs still start."""
    defragment_every_rounds: int = 12
    """Look for moves that reduce fragmentation every N rounds (hourly at 300 s). 0 disables it."""
    round_s: float = 300.0
    """Seconds to the next round.

    A waiting job is assumed to wait this long. It is also the first slot of schedules.
    """

    deadlines: str = ""
    """One of ``DEADLINE_MODES``. Default: look-ahead if the objective names deadline, else keep."""
    keep_requests: bool = True
    """Never suspend or shrink a job for another's gain while it holds no more than it asked for.

    Jobs that their users call preemptible are excluded.
    """
    promise_starts: bool = True
    """Plan a start for each waiting job, and let no job of the same or a lower priority delay it.

    Without this, the objective alone chooses who starts, and jobs may wait for as long as others come.
    """
    change_spacing: float = DEFAULT_CHANGE_SPACING
    """Restart times that a job runs before a round may suspend, move or resize it.

    With k, at most 1 / (k + 1) of the time that a job holds GPUs goes into restarts that rounds chose.
    """
    default_run_s: float = 86_400.0
    """Seconds that a job of unknown rate is taken to run, where rounds promise starts to others.

    Once it has run for longer, it may be suspended for them.
    """
    replan_spacing: float = DEFAULT_REPLAN_SPACING
    """Restart times that a job runs before its plan may change on as many GPUs of its type.

    The change must also make up for its restart in that time, even if the new plan is slower than
    estimated by one standard deviation. With 20, a job therefore spends at most 5 % of its time in
    replans, and differences of less than 5 % cause none. With 0, only the objective decides.
    """
    max_changes: int = -1
    """Running jobs that a round may move, resize or suspend. -1 means any number.

    If promises force more changes, that number is allowed.
    """
    cost_of: str = "dollars"
    """The quantity that ``cost`` counts: ``dollars`` per hour or ``watts``."""
    rate_floor: float = 0.5
    """Share of its rate at the requested GPUs below which ``cost`` runs no job."""
    fairness_levels: int = 4
    """Number of worst-off jobs that a lexicographic objective settles before the next objective."""
    network_levels: int = NETWORK_LEVELS
    """Priority levels that jobs are compressed to, if the cluster's network is described."""
    network_floor: float = 0.0
    """Share of its rate without contention that each job shall keep on the network.

    If it is 0, only the total work done counts.
    """
    network_measure_s: float = 0.0
    """Longest priority of a job to be measured, from the start of its allocation (Crux 5).

    Until agents have measured its traffic, a job on several nodes goes before all others that it
    meets on the network. 0 disables this.
    """
    caution: float = 0.0
    """Standard deviations (of the logarithm) by which iteration times are taken to be longer.

    An iteration is taken to last exp(caution x sd) times its estimate. With 1, one in six is slower
    still, if estimates state their uncertainty correctly. With 0, estimates are used unchanged.
    """

    def __post_init__(self) -> None:
        """Refuse meaningless values."""
        for name in ("restart_horizon_s", "round_s", "default_run_s", "fair_half_life_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(name, "must be a positive number of seconds")
        if not 0 <= self.max_restart_share < 1:
            raise InvalidInput("max_restart_share", "must lie in [0, 1)")
        if self.defragment_every_rounds < 0:
            raise InvalidInput("defragment_every_rounds", "must be 0 (never) or more")
        for name in ("change_spacing", "replan_spacing"):
            if not 0 <= getattr(self, name) <= MAX_SPACING:
                raise InvalidInput(
                    name, f"must be 0 (no limit) or a number of restart times up to {MAX_SPACING:g}"
                )
        if self.max_changes < -1:
            raise InvalidInput("max_changes", "must be -1 (any number) or more")
        if self.deadlines not in ("", *DEADLINE_MODES):
            raise InvalidInput("deadlines", f"must be one of {', '.join(DEADLINE_MODES)}")
        if self.fair_share not in ("", *FAIR_SHARES):
            raise InvalidInput("fair_share", f"must be one of {', '.join(FAIR_SHARES)}, or empty")
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
        _ = self.stages, self.weight_of_priority

    def require_bounded(self) -> None:
        """Refuse values that multiply a round's work.

        This is a check for callers. Recorded rounds may have more.

        Raises:
            InvalidInput: a value is beyond its limit.
        """
        require_bounded(self.stages)
        if self.fairness_levels > MAX_FAIRNESS_LEVELS:
            raise InvalidInput("fairness_levels", f"must lie in [1, {MAX_FAIRNESS_LEVELS}]")
        weights = self.weight_of_priority
        if len(weights) > MAX_PRIORITY_WEIGHTS:
            raise InvalidInput(
                "priority_weights",
                f"names {len(weights)} priorities; name at most {MAX_PRIORITY_WEIGHTS}",
            )
        if max(weights.values(), default=0.0) > MAX_PRIORITY_WEIGHT:
            raise InvalidInput(
                "priority_weights", f"has a factor above {MAX_PRIORITY_WEIGHT:,.0f}; lower it"
            )

    @property
    def use_half_life_s(self) -> float:
        """Return the half-life of the use that a round's snapshot must have, or 0 if it needs none."""
        return self.fair_half_life_s if self.fair_share else 0.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the objective's stages, in order. Raises InvalidInput."""
        return parse_objective(self.objective)

    @property
    def deadline_mode(self) -> DeadlineMode:
        """Return the mode in which deadlines are treated."""
        for mode in DEADLINE_MODES:
            if self.deadlines == mode:
                return mode
        named = any(term.objective == "deadline" for stage in self.stages for term in stage.terms)
        return "look-ahead" if named else KEEP_MODE

    @property
    def weight_of_priority(self) -> dict[int, float]:
        """Return priority -> factor. Raises InvalidInput."""
        factors: dict[int, float] = {}
        for part in filter(None, (p.strip() for p in self.priority_weights.split(","))):
            priority, colon, factor = part.partition(":")
            try:
                key, value = int(priority), float(factor)
            except ValueError:
                key, value = 0, math.nan
            if not colon or key < 1 or not (math.isfinite(value) and value >= 0) or key in factors:
                raise InvalidInput(
                    "priority_weights",
                    f"{part!r} must be PRIORITY:FACTOR, with each priority once, e.g. 1:4,2:1",
                )
            factors[key] = value
        return factors
