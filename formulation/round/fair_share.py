"""Fair shares: tenants that used more than their share of the cluster count for less in a round.

The factor of a tenant follows from its decayed use and its place among the tenants (Eq. 9c to 9f).
Its dominant share is that of DRF (Ghodsi et al., NSDI 2011), its comparison with its siblings that
of H-DRF (Bhattacharya et al., SoCC 2013), and the form of the factor that of Slurm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import NOT_STATED, amounts_of
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.policy import DRF, Policy
from tessera.formulation.state.decayed_use import HOST_CODES
from tessera.formulation.state.hierarchy import lines_of_snapshot
from tessera.formulation.state.snapshot import Snapshot

HALVINGS_PER_SHARE: Final = 4.0
"""Times that a factor is halved for use as large as the share. At its share, a tenant has factor 1.

With 1, as in Slurm, objectives that prefer short jobs would outweigh the factor too easily.
"""

MAX_HALVINGS: Final = 10.0
"""Times that a factor is halved at most, so that each job keeps 1/1024 of its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShare:
    """The part of the cluster that a tenant used, and the part that is its share."""

    used: float  # dominant share of the tenant's own jobs, decayed, as a part of the cluster
    target: float  # 0 if its weight, or that of a tenant above it, is 0
    halvings: float  # below 0 if the tenant used less than its share

    @property
    def factor(self) -> float:
        """Return the factor on the weights of the tenant's jobs (Eq. 9f)."""
        if self.target == 0:
            return 0.0
        return float(2.0 ** -min(self.halvings, MAX_HALVINGS))


def fair_share_factors(snapshot: Snapshot, policy: Policy) -> Floats:
    """Return the factor on the weight of each job, float64[jobs]. Profiling tasks have 1.

    Raises:
        InvalidInput: the snapshot has no use that decayed by the policy's half-life.
    """
    shares = fair_shares(snapshot, policy)
    factors = np.array([s.factor if s else 1.0 for s in map(shares.get, snapshot.jobs.tenant)])
    return np.where(snapshot.profiling(), 1.0, factors) if len(factors) else np.zeros(0)


def fair_shares(snapshot: Snapshot, policy: Policy) -> dict[str, FairShare]:
    """Return the fair share of each tenant whose own jobs a round may run.

    Raises:
        InvalidInput: the snapshot has no use that decayed by the policy's half-life.
    """
    if snapshot.use_half_life_s != policy.fair_half_life_s:
        known = f"a half-life of {snapshot.use_half_life_s:g} s"
        raise InvalidInput(
            "fair_share",
            f"needs the tenants' use with a half-life of {policy.fair_half_life_s:g} s, but the state"
            f" has {known if snapshot.use_half_life_s else 'no use'}; choose a state that was read for"
            " this policy",
        )
    shares: dict[str, FairShare] = {}
    _divide(_tree(snapshot, policy), 1.0, None, shares)
    return shares


@dataclass(slots=True, kw_only=True)
class _Node:
    """A tenant with those below it, or a tenant's own jobs if others are below it."""

    name: str
    weight: float
    use: Floats  # of all below it, as parts of the cluster's capacity, float64[resources]
    demands: bool  # whether a round may run a job of it
    waits: bool  # whether such a job waits
    below: list[_Node] = field(default_factory=list)

    @property
    def dominant_share(self) -> float:
        """Return the largest part of a resource that it used (Eq. 9c)."""
        return float(self.use.max(initial=0.0))


def _divide(
    siblings: Sequence[_Node], part: float, halvings: float | None, shares: dict[str, FairShare]
) -> None:
    """Divide ``part`` of the cluster among siblings, and fill ``shares`` for all below them.

    ``halvings`` are those of their parent, or None if they have no parent.
    """
    total = sum(node.weight for node in siblings if node.demands)
    targets = [
        part * node.weight / total if node.demands and node.weight > 0 else 0.0 for node in siblings
    ]
    ratios = [
        node.dominant_share / target if target > 0 else 0.0
        for node, target in zip(siblings, targets, strict=True)
    ]
    competing = [
        ratio
        for node, ratio, target in zip(siblings, ratios, targets, strict=True)
        if node.waits and target > 0
    ]
    least = min(competing, default=np.inf)
    for node, target, ratio in zip(siblings, targets, ratios, strict=True):
        if halvings is None:
            own = HALVINGS_PER_SHARE * (ratio - 1.0)
        else:
            own = halvings + HALVINGS_PER_SHARE * max(0.0, ratio - least)
        if node.below:
            _divide(node.below, target, own, shares)
        elif node.demands:
            shares[node.name] = FairShare(used=node.dominant_share, target=target, halvings=own)


def _tree(snapshot: Snapshot, policy: Policy) -> list[_Node]:
    """Return the tenants without a parent, with all below them."""
    jobs, settings = snapshot.jobs, snapshot.tenants
    may_run = jobs.may_run() & ~snapshot.profiling() & (jobs.weight > 0)
    demanding = _tenants_of(snapshot, may_run)
    waiting = _tenants_of(snapshot, may_run & ~jobs.among(ACTIVE))
    uses = _own_uses(snapshot, policy)
    nothing = np.zeros(len(_capacity(snapshot, policy)))
    weights = dict(zip(settings.name, settings.weight.tolist(), strict=True))

    def own_node(name: str, weight: float) -> _Node:
        return _Node(
            name=name,
            weight=weight,
            use=uses.get(name, nothing),
            demands=name in demanding,
            waits=name in waiting,
        )

    unknown = sorted((demanding | set(uses)) - set(weights))
    tops = [own_node(name, 1.0) for name in unknown]
    nodes = {name: own_node(name, weight) for name, weight in weights.items()}
    lines = lines_of_snapshot(snapshot)
    for name in sorted(lines, key=lambda name: -len(lines[name])):  # the lowest levels first
        node = nodes[name]
        if node.below:
            node.below.append(own_node(name, 1.0))
            node.use = np.sum([child.use for child in node.below], axis=0)
            node.demands = any(child.demands and child.weight > 0 for child in node.below)
            node.waits = any(child.waits and child.weight > 0 for child in node.below)
        siblings = nodes[lines[name][1]].below if len(lines[name]) > 1 else tops
        siblings.append(node)
    return tops


def _tenants_of(snapshot: Snapshot, jobs: Bools) -> set[str]:
    return {snapshot.jobs.tenant[job] for job in np.flatnonzero(jobs).tolist()}


def _capacity(snapshot: Snapshot, policy: Policy) -> Floats:
    """Return the cluster's capacity of each resource that counts, float64[resources].

    Under ``drf`` these are the GPUs of each type, and the resources of hosts, which are 0 unless
    every node states its own. The latter come last, at ``HOST_CODES``. Otherwise there is one
    resource, the GPUs of all types.
    """
    nodes = snapshot.nodes
    gpus = np.bincount(nodes.gpu_type, weights=nodes.gpus, minlength=len(snapshot.gpu_types))
    if policy.fair_share != DRF:
        return np.array([float(gpus.sum())])
    others = [
        float(amounts.sum(dtype=np.float64)) if (amounts != NOT_STATED).all() else 0.0
        for amounts in reversed(amounts_of(nodes))
    ]
    return np.append(gpus, others)


def _own_uses(snapshot: Snapshot, policy: Policy) -> dict[str, Floats]:
    """Return the part of each resource that the own jobs of tenants used, float64[resources]."""
    capacity, uses = _capacity(snapshot, policy), snapshot.decayed_use
    own: dict[str, Floats] = {}
    rows = zip(uses.tenant, uses.resource.tolist(), uses.amount.tolist(), strict=True)
    for tenant, resource, amount in rows:
        if policy.fair_share == DRF:
            at = resource  # below 0 for the resources of hosts, which are the last ones
        elif resource in HOST_CODES:
            continue
        else:
            at = 0
        part = own.setdefault(tenant, np.zeros(len(capacity)))
        part[at] += amount / capacity[at] if capacity[at] > 0 else 0.0
    return own
