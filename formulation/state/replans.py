"""Replans: a job goes on by another execution plan on the GPUs that it has.

This module has the price of a replan, what it earns, and the sentence that says both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.resources import HOST_RESOURCES, HostNeeds, amounts_of
from tessera.formulation.base.tables import Floats
from tessera.formulation.job.reasons import LOST_SAMPLES_KEY, RESTART_GPU_S_KEY, Reason, ReasonCode
from tessera.formulation.state.snapshot import Snapshot

_DIGEST_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan(HostNeeds):
    """The price and the gain of another execution plan for a job on the GPUs that it has.

    Its host resources are what the new plan needs in all, less what the former one needs.
    """

    plan: str  # a name or a digest; "" is the best that the Cell's author found
    pipeline_degree: int  # 0 if it was not recorded
    former_plan: str
    gpus: int
    restart_s: float  # from the request to stop to the end of the first iteration
    unsaved_s: float  # training since the last checkpoint, which is repeated
    former_rate: float  # samples/s; 0 if the job can no longer run by its former plan
    rate: float  # samples/s

    @property
    def lost_samples(self) -> float:
        """Return the samples that are trained again."""
        return self.unsaved_s * self.former_rate

    @property
    def cost_gpu_s(self) -> float:
        """Return the GPU-seconds that the restart and the repeated training take."""
        return self.gpus * (self.restart_s + self.unsaved_s)

    @property
    def pays_back_s(self) -> float:
        """Return the seconds after which the job is as far as by its former plan, or inf."""
        lost_s = np.array([self.restart_s + self.unsaved_s])
        rates = np.array([self.former_rate]), np.array([self.rate])
        return float(pay_back_s(lost_s, *rates)[0])

    def explain(self) -> Reason:
        """Return the reason for the replan, with its price and what it earns."""
        gain = self.rate - self.former_rate
        known = (("plan", self.plan), ("former plan", self.former_plan))
        return Reason(
            code=ReasonCode.REPLANNED,
            message=self._sentence(),
            next_step="",
            evidence=(
                *((name, plan) for name, plan in known if plan),
                ("restart s", f"{self.restart_s:.6g}"),
                (RESTART_GPU_S_KEY, f"{self.cost_gpu_s:.6g}"),
                (LOST_SAMPLES_KEY, f"{self.lost_samples:.6g}"),
                ("gained samples/s", f"{gain:.6g}"),
                ("pays back s", f"{self.pays_back_s:.6g}"),
                *(
                    (resource.label, resource.show(amount, "+"))
                    for resource, amount in zip(HOST_RESOURCES, amounts_of(self), strict=True)
                    if amount
                ),
            ),
        )

    def _sentence(self) -> str:
        name, of_gpus = self._plan_in_words(), f"on the same {_count(self.gpus, 'GPU')}"
        price = f"the restart of {_span_in_words(self.restart_s)}"
        if self.lost_samples >= 1:
            price += f" and the {self.lost_samples:,.0f} samples since its last checkpoint"
        if not self.former_rate > 0:
            return (
                f"the job can no longer run by its former plan, and goes on by {name} {of_gpus};"
                f" its price is {price}"
            )
        speed = f"{name} is {self.rate / self.former_rate:.3g} x as fast {of_gpus}"
        if np.isfinite(self.pays_back_s):
            pays = "pay" if self.lost_samples >= 1 else "pays"
            return f"{speed}; {price} {pays} back in {_span_in_words(self.pays_back_s)}"
        freed = [
            resource.in_words(-amount)
            for resource, amount in zip(HOST_RESOURCES, amounts_of(self), strict=True)
            if amount < 0
        ]
        earns = f"it gives back {' and '.join(freed)}" if freed else "it makes room for other jobs"
        return f"{speed}, but {earns}; its price is {price}"

    def _plan_in_words(self) -> str:
        """Return e.g. ``the plan zero2`` for a name, or the first digits of a digest."""
        if not self.plan:
            degree = f" of pipeline degree {self.pipeline_degree}" if self.pipeline_degree else ""
            return f"the best plan{degree}"
        is_digest = len(self.plan) == 64 and set(self.plan) <= set("0123456789abcdef")
        return f"the plan {self.plan[:_DIGEST_DIGITS] if is_digest else self.plan}"


def pay_back_s(lost_s: Floats, former_rate: Floats, rate: Floats) -> Floats:
    """Return the seconds after which each replanned job is as far as by its former plan.

    All arrays are float64[any]: the seconds that the restart loses, and samples/s. The result t
    solves r' (t - R) = r t for the rates r and r'. It is inf where the new plan is not faster.
    """
    gain = rate - former_rate
    faster = gain > 0
    back_s: Floats = np.where(faster, rate * lost_s / np.where(faster, gain, 1.0), np.inf)
    return back_s


def unsaved_s(snapshot: Snapshot) -> Floats:
    """Return the seconds of training that a restart of each job would repeat, float64[jobs].

    It is 0 for a job that waits: what it had trained since its checkpoint is lost already.
    """
    since_s, trains = snapshot.jobs.unsaved_since_s, snapshot.jobs.current_gpus > 0
    repeated_s = np.maximum(0.0, snapshot.now_s - since_s)
    return np.where((since_s > 0) & trains, repeated_s, 0.0)


def charge_unsaved_training(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which a restart takes longer by the training that it repeats."""
    jobs = snapshot.jobs
    if not (jobs.unsaved_since_s > 0).any():
        return snapshot
    return replace(snapshot, jobs=replace(jobs, restart_s=jobs.restart_s + unsaved_s(snapshot)))


def start_duration_s(snapshot: Snapshot) -> Floats:
    """Return the seconds that each job's last start takes, float64[jobs], if it repeats nothing.

    ``snapshot`` is one of ``charge_unsaved_training``, in which the next restart takes longer.
    """
    return snapshot.jobs.restart_s - unsaved_s(snapshot)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _span_in_words(seconds: float) -> str:
    """Return a duration in the largest unit of which there are two."""
    for unit_s, noun in ((86_400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {noun}s"
    return f"{seconds:.3g} s"
