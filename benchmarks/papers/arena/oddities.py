"""What Arena's simulator does otherwise than an honest one, each as a switch that is off by default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

from tessera.formulation.errors import InvalidInput

ROUND_S: Final = 300.0
"""The artifact's round (its SCHEDULING_INTERVAL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddities:
    """Switches of the artifact's simulator. All off: an honest world of rounds.

    Each docstring says first what the artifact does (switch on), then what honest semantics are (off).
    """

    early_arrival: bool = False
    """A job that arrives within the 300 s after a round takes part in that round, and its time counts from
    there. Off: it takes part in the first round after its arrival, and its time counts from the arrival."""
    idle_rounds: bool = False
    """A round in which no job ended and none arrived decides nothing. Off: every round decides."""
    retries_after_ends: bool = False
    """Waiting jobs are tried again only in rounds in which a job ended. Off: in every round."""
    head_of_line: bool = False
    """A waiting job that is not started, be it that it can never run, keeps those from starting that wait
    behind it and requested the same type; new jobs pass. Off: the policy alone decides."""
    scattered_starts: bool = False
    """A job starts on the nodes of its type with most GPUs free, in order of arrival and only in the shape
    with fewest nodes; the first that finds none blocks its type. Off: placement packs and bends."""
    whole_rounds: bool = False
    """A job ends at a round: it holds its GPUs until then, and its time is a multiple of 300 s; what ends
    when the last round is over is not seen. Off: it ends when its last iteration does."""
    repriced_past: bool = False
    """All time that a job has run so far counts at its present speed, in whole iterations: an upgrade speeds
    up its past. Off: progress accrues at the speed then in force."""
    suspended_twice: bool = False
    """What a suspended job has done is taken off its iterations, and again off what it has to do when it
    goes on. Off: once."""
    overhead_on_curve: bool = False
    """A restart of at most 300 s lowers the throughput that is recorded for the round and delays no job. A
    longer one records nothing for as many rounds as it lasts, and costs the job one round less than that;
    a restart meanwhile starts the count anew. Off: a job trains only when its restart is over."""
    free_release: bool = False
    """Only who gains a GPU that it did not hold pays a restart. Off: every change of GPUs is paid."""
    rounded_rates: bool = False
    """Iteration times and samples/s have 3 decimals. Off: they are what they are."""
    ending_counts_whole: bool = False
    """A job counts in the recorded throughput for the whole of its last round. Off: until it ends."""
    inferred_sizes: bool = False
    """Where a size was not measured at a shape, the next larger size's throughput x 1.8 a step stands for it
    (pricing rule 3). Off: what was not measured does not run."""
    slow_is_infeasible: bool = False
    """What takes more than 300 s an iteration does not run. Off: it runs slowly."""


ARENA: Final = Oddities(**{f.name: True for f in fields(Oddities)})
"""Every oddity; ``of_policy`` leaves out those that the artifact has for other policies only."""

_RIGID: Final = ("gandiva-rigid", "gavel-rigid", "sia-rigid")
OF_LOOPS: Final = {
    "scattered_starts": ("fcfs", "gandiva", "gandiva-rigid"),
    # Sia's has it in the stored results by their looks: who finished had waited 8 s on average
    "head_of_line": ("gavel", "gavel-rigid", "elasticflow-ls", "sia-rigid"),
    # no other policy suspends in the artifact; one that does here must not gain work by it
    "suspended_twice": ("arena",),
    # first come first served has no need of it: who was blocked stays blocked until a job ends
    "retries_after_ends": ("gandiva", "gavel", "elasticflow-ls", "sia-arena", "arena", *_RIGID),
}
"""Oddities of some policies' own loops: the policies that have them."""


def of_policy(policy: str, oddities: Oddities = ARENA) -> Oddities:
    """Return ``oddities`` without those that the artifact's loop of ``policy`` does not have."""
    others = {name: False for name, mine in OF_LOOPS.items() if policy not in mine}
    return replace(oddities, **others)


def without(oddities: Oddities, names: Iterable[str]) -> Oddities:
    """Return ``oddities`` with those named switched off; ``all``: every one.

    Raises:
        InvalidInput: there is no such switch.
    """
    known = [f.name for f in fields(Oddities)]
    asked = list(names)
    if unknown := sorted(set(asked) - {*known, "all"}):
        raise InvalidInput(
            "oddities", f"no switch is named {unknown}; there are {', '.join(known)}"
        )
    return Oddities() if "all" in asked else replace(oddities, **dict.fromkeys(asked, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCost:
    """What a start or change costs: so much a GPU, capped (the artifact's constants, not measurements)."""

    per_gpu_s: float
    cap_s: float

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not (self.per_gpu_s >= 0 and self.cap_s >= 0):
            raise InvalidInput("launch", "seconds must not be negative")

    def seconds(self, gpus: int) -> float:
        """Return what a start on ``gpus`` GPUs costs."""
        return min(self.per_gpu_s * gpus, self.cap_s)


PRUNED: Final = LaunchCost(per_gpu_s=10.0, cap_s=40.0)
"""Of Arena's own policy in its artifact."""
UNPRUNED: Final = LaunchCost(per_gpu_s=150.0, cap_s=600.0)
"""Of every other policy in Arena's artifact."""
