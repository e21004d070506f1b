"""Crux's variants as mechanisms, to stand beside the rivals."""

from __future__ import annotations

from formulation.network.contention import Contention
from formulation.network.plan import NetworkPlan
from solvers.network.replan import Options, Variant, replan


def pa(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return hashed paths and a level for each job."""
    return replan(contention, levels=levels, options=Options(variant=Variant.PA, seed=seed))


def ps_pa(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return chosen paths and a level for each job."""
    return replan(contention, levels=levels, options=Options(variant=Variant.PS_PA, seed=seed))


def full(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return chosen paths and compressed levels, small groups tried on the engine."""
    return replan(contention, levels=levels, options=Options(seed=seed))


def paper(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return chosen paths and compressed levels, without what is ours beyond the paper."""
    options = Options(swap_jobs=0, trials=0, margin=0.0, seed=seed)
    return replan(contention, levels=levels, options=options)
