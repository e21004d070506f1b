"""Crux's variants as mechanisms, for comparison with the baselines."""

from __future__ import annotations

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.solvers.network.replan import PlanningOptions, Variant, replan


def _published(variant: Variant, seed: int) -> PlanningOptions:
    """Return options without our additions to the paper."""
    return PlanningOptions(variant=variant, swap_jobs=0, trials=0, margin=0.0, seed=seed)


def pa(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return hashed paths and a separate priority level for each job, as published."""
    return replan(contention, levels=levels, options=_published(Variant.PA, seed)).plan


def ps_pa(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return chosen paths and a separate priority level for each job, as published."""
    return replan(contention, levels=levels, options=_published(Variant.PS_PA, seed)).plan


def full(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return chosen paths and compressed priority levels, with small groups tried on the engine."""
    return replan(contention, levels=levels, options=PlanningOptions(seed=seed)).plan


def paper(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return chosen paths and compressed priority levels, as published."""
    return replan(contention, levels=levels, options=_published(Variant.FULL, seed)).plan
