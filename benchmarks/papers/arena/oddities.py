"""Oddities of Arena's simulator, each as a switch that is off by default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

from tessera.formulation.errors import InvalidInput

ROUND_S: Final = 300.0
"""The artifact's round (its SCHEDULING_INTERVAL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddities:
    """Switches for oddities of the artifact's simulator. With all off, the simulator is honest.

    Each docstring first describes the artifact (switch on), then honest semantics (off).
    """

    early_arrival: bool = False
    """A job that arrives within 300 s after a round takes part in that round.

    Its time counts from that round. Off: It takes part in the first round after its arrival, and
    its time counts from the arrival.
    """
    idle_rounds: bool = False
    """A round before which no job ended or arrived decides nothing. Off: Every round decides."""
    retries_after_ends: bool = False
    """Waiting jobs are only retried in a round after a job ended. Off: They are, in every round."""
    head_of_line: bool = False
    """A waiting job that is not started blocks the jobs behind it that requested the same type.

    It blocks them even if it can never run. New jobs pass it. Off: The policy alone decides.
    """
    scattered_starts: bool = False
    """A job starts on its type's nodes with the most free GPUs, in the shape with fewest nodes.

    Jobs start in order of arrival, and the first that does not fit blocks its type. Off: Placement
    packs jobs and may use other shapes.
    """
    whole_rounds: bool = False
    """A job ends at a round.

    It holds its GPUs until then, and its time is a multiple of 300 s. Ends after the last round are
    not recorded. Off: A job ends with its last iteration.
    """
    repriced_past: bool = False
    """A job's whole run time so far counts at its present speed, in whole iterations.

    An upgrade therefore speeds up its past. Off: Progress accrues at the speed of the time.
    """
    suspended_twice: bool = False
    """The work of a suspended job is subtracted twice: from its iterations, and when it resumes.

    Off: It is subtracted once.
    """
    overhead_on_curve: bool = False
    """A restart of at most 300 s lowers the round's recorded throughput but does not delay the job.

    During a longer restart, no throughput is recorded for the rounds that it lasts, and it costs
    the job one round less than that. Another restart meanwhile begins the count again. Off: A job
    trains only when its restart is over.
    """
    free_release: bool = False
    """Only a job that gains a GPU pays for a restart. Off: Every change of GPUs is charged."""
    rounded_rates: bool = False
    """Iteration times and samples/s are rounded to 3 decimals. Off: They are not rounded."""
    ending_counts_whole: bool = False
    """A job counts in the recorded throughput for all of its last round. Off: Until it ends."""
    inferred_sizes: bool = False
    """The throughput of a size that was not measured at a shape is inferred (pricing rule 3).

    It is the throughput of the next larger size x 1.8 per step. Off: A size that was not measured
    does not run.
    """
    slow_is_infeasible: bool = False
    """A Cell of more than 300 s per iteration does not run. Off: It runs slowly."""


ALL_ODDITIES: Final = Oddities(**{f.name: True for f in fields(Oddities)})
"""All oddities. ``of_policy`` leaves out those that the artifact has only for other policies."""

_RIGID: Final = ("gandiva-rigid", "gavel-rigid", "sia-rigid")
LOOP_POLICIES: Final = {
    "scattered_starts": ("fcfs", "gandiva", "gandiva-rigid"),
    # Sia's loop seems to have it by its stored results: finished jobs had waited 8 s on average.
    "head_of_line": ("gavel", "gavel-rigid", "elasticflow-ls", "sia-rigid"),
    # No other policy suspends in the artifact. One that does here must not gain work by it.
    "suspended_twice": ("arena",),
    # First come, first served does not need it: a blocked job stays blocked until a job ends.
    "retries_after_ends": ("gandiva", "gavel", "elasticflow-ls", "sia-arena", "arena", *_RIGID),
}
"""The policies that have an oddity, for those that only some policies' loops have."""


def of_policy(policy: str, oddities: Oddities = ALL_ODDITIES) -> Oddities:
    """Return ``oddities`` without those that the artifact's loop for ``policy`` does not have."""
    others = {name: False for name, mine in LOOP_POLICIES.items() if policy not in mine}
    return replace(oddities, **others)


def switch_off(oddities: Oddities, names: Iterable[str]) -> Oddities:
    """Return ``oddities`` with those in ``names`` switched off, or every one for ``all``.

    Raises:
        InvalidInput: there is no such switch.
    """
    known = [f.name for f in fields(Oddities)]
    asked = list(names)
    if unknown := sorted(set(asked) - {*known, "all"}):
        raise InvalidInput("oddities", f"unknown oddity {unknown}; choose from {', '.join(known)}")
    return Oddities() if "all" in asked else replace(oddities, **dict.fromkeys(asked, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCost:
    """The cost of a start or change: seconds per GPU up to a cap.

    The values are the artifact's constants, not measurements.
    """

    per_gpu_s: float
    cap_s: float

    def __post_init__(self) -> None:
        """Refuse negative values."""
        if not (self.per_gpu_s >= 0 and self.cap_s >= 0):
            raise InvalidInput("launch", "seconds must not be negative")

    def seconds(self, gpus: int) -> float:
        """Return the seconds that a start on ``gpus`` GPUs costs."""
        return min(self.per_gpu_s * gpus, self.cap_s)


PRUNED_LAUNCH_COST: Final = LaunchCost(per_gpu_s=10.0, cap_s=40.0)
"""The launch cost of Arena's own policy in its artifact."""
UNPRUNED_LAUNCH_COST: Final = LaunchCost(per_gpu_s=150.0, cap_s=600.0)
"""The launch cost of every other policy in Arena's artifact."""
