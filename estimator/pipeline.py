"""Iteration times of pipelines: stages, the transfers between them, gradients and weight updates.

With B micro-batches, the first passes through all stages and the other B - 1 follow at the pace of
the slowest:

    sum of busy + (B - 1) * max of busy + transfers + gradients + max of update

(Alpa, section 5.2; Crius, section 5.1; Arena, section 3.4). Every term is a sum or a maximum over
stages, so a search may fix the maxima and add up the rest. The formula gives the same time for GPipe
and 1F1B. If all stages have the same ratio of backward to forward time, it is exact for GPipe and
never too short for 1F1B. With v chunks of layers on each stage, filling and draining take 1 / v of
the time: see :func:`iteration_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tessera.estimator.plans import StageCosts
from tessera.formulation.base.tables import Floats, Ints


class Transfers(StrEnum):
    """The time at which activations travel between stages."""

    ADDED = "added"
    """Micro-batches wait for transfers. The slowest one counts B - 1 times (the Arena artifact)."""
    HIDDEN = "hidden"
    """Compute hides transfers, but the first micro-batch waits for them (Crius, section 5.1)."""
    OVERLAPPED = "overlapped"
    """Compute hides transfers while it lasts. The slowest stage or transfer sets the pace."""
    IN_LINE = "in-line"
    """A stage computes, sends and receives in turn. The stage with the largest sum sets the pace
    (the instruction lists of Alpa's runtime)."""
    FREE = "free"
    """Transfers do not count at all, as in Alpa's search (OSDI 2022, section 5.2)."""


class Sync(StrEnum):
    """The time at which replicas exchange gradients."""

    # One stage after another, so that the times add up (the Arena artifact).
    IN_TURN = "in-turn"
    # All stages at the same time, when the pipeline is empty, so that the longest time counts.
    TOGETHER = "together"
    # During the stage's own last backward pass, which hides the exchange while it lasts.
    BEHIND = "behind-backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The overlap of communication with compute."""

    transfers: Transfers = Transfers.OVERLAPPED
    sync: Sync = Sync.TOGETHER


DEFAULT_OVERLAP = Overlap()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipelines:
    """P plans of up to S stages. All arrays have shape (P, S).

    A plan with fewer stages has zeros after its last. All values are seconds of one micro-batch,
    except ``sync_s`` and ``update_s``.
    """

    busy_s: Floats  # both passes with their collectives
    send_s: Floats  # to the next stage and back; 0 for the last stage
    receive_s: Floats  # from the previous stage and back; 0 for the first stage
    backward_s: Floats  # the part of busy_s that may hide the gradient exchange
    sync_s: Floats
    update_s: Floats


def pipelined_s(slot_s: Floats, micro_batches: int | Ints) -> Floats:
    """Return the seconds, shape (P,), in which all micro-batches pass slots of shape (P, S)."""
    total_s: Floats = slot_s.sum(axis=1) + (micro_batches - 1) * slot_s.max(axis=1)
    return total_s


def iteration_s(
    plans: Pipelines,
    micro_batches: int | Ints,
    overlap: Overlap = DEFAULT_OVERLAP,
    chunks: int = 1,
) -> Floats:
    """Return the seconds of an iteration of each plan, shape (P,).

    With an interleaved schedule, each stage has ``chunks`` chunks of layers, and its values are
    their sums. Filling and draining the pipeline then take ``1 / chunks`` of the time (Narayanan et
    al., SC 2021, section 2.2).
    """
    steady_s = sum(slots.max(axis=1) for slots in paces_s(plans, overlap))
    first_s = plans.busy_s.sum(axis=1) + first_send_s(plans.send_s, overlap).sum(axis=1)
    synced_s = exposed_sync_s(plans.sync_s, plans.backward_s, overlap)
    after_s = synced_s.sum(axis=1) if overlap.sync is Sync.IN_TURN else synced_s.max(axis=1)
    with np.errstate(invalid="ignore"):  # what cannot run takes inf, or nan, seconds
        pipeline_s: Floats = first_s / chunks + (micro_batches - 1 / chunks) * steady_s
    pipeline_s += after_s + plans.update_s.max(axis=1)
    return pipeline_s


def paces_s(costs: Pipelines | StageCosts, overlap: Overlap = DEFAULT_OVERLAP) -> list[Floats]:
    """Return the terms whose maxima over stages add up to the time between micro-batches.

    Each array has the shape of the columns of ``costs``.
    """
    match overlap.transfers:
        case Transfers.ADDED:
            return [costs.busy_s, costs.send_s]
        case Transfers.HIDDEN | Transfers.FREE:
            return [costs.busy_s]
        case Transfers.OVERLAPPED:
            return [np.maximum(costs.busy_s, costs.send_s)]
        case Transfers.IN_LINE:
            return [costs.busy_s + costs.send_s + costs.receive_s]


def first_send_s(send_s: Floats, overlap: Overlap = DEFAULT_OVERLAP) -> Floats:
    """Return the seconds that the first micro-batch waits for each transfer."""
    return np.zeros_like(send_s) if overlap.transfers is Transfers.FREE else send_s


def exposed_sync_s(
    sync_s: Floats, backward_s: Floats, overlap: Overlap = DEFAULT_OVERLAP
) -> Floats:
    """Return the part of each stage's gradient exchange that nothing hides."""
    if overlap.sync is Sync.BEHIND:
        return np.maximum(sync_s - backward_s, 0.0)
    return sync_s
