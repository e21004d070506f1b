"""The worth of one more node of each GPU type, from the next round and from paired futures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tessera.formulation.explanations.changes import Change, ChangeKind
from tessera.formulation.problem import RowKind
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.what_if.hypotheses import Hypothesis
from tessera.formulation.what_if.records import HoursDifference, JobEffect, NodeWorth
from tessera.simulator.what_if.rounds import DecidedRound, compare_rounds


def nodes_to_add(snapshot: Snapshot) -> dict[str, Hypothesis]:
    """Return, by GPU type, the addition of a node like the largest of the type.

    Types without nodes are left out, since nobody has said what a node of theirs is.
    """
    added = {}
    for k, kind in enumerate(snapshot.gpu_types):
        gpus = int(snapshot.nodes.gpus[snapshot.nodes.gpu_type == k].max(initial=0))
        if gpus:
            change = Change(
                kind=ChangeKind.ADD_GPUS, subject=kind.name, amount=gpus, size=float(gpus)
            )
            added[kind.name] = Hypothesis(change=change, field=f"one more node of {kind.name}")
    return added


def value_node(
    before: DecidedRound,
    after: DecidedRound,
    addition: Hypothesis,
    hours: HoursDifference | None = None,
) -> NodeWorth:
    """Return the worth of a node, from the rounds ``before`` and ``after`` its addition."""
    difference = compare_rounds(before, after)
    old, new, gpus = difference.before, difference.after, int(addition.change.amount)
    price = before.outcome.prices.get(f"{RowKind.GPUS}/{addition.change.subject}", math.nan)
    return NodeWorth(
        gpu_type=addition.change.subject,
        gpus=gpus,
        price=price * gpus,
        objective_change=new.objective - old.objective,
        effective_gpus_change=new.effective_gpus - old.effective_gpus,
        samples_per_s_change=new.samples_per_s - old.samples_per_s,
        starts=sum(job.effect is JobEffect.STARTS for job in difference.jobs),
        unit=old.unit,
        hours=hours,
    )


def rank_nodes(worths: Sequence[NodeWorth]) -> list[NodeWorth]:
    """Return the worths, the node with the most work over the next hours first, else of the round."""

    def rank(worth: NodeWorth) -> tuple[float, float]:
        hours = -worth.hours.work.change if worth.hours is not None else np.inf
        return hours, -worth.effective_gpus_change

    return sorted(worths, key=rank)
