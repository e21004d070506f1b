"""The techniques of execution plans, of which a job may name those that its script can use."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan, Offload, Recomputation, ZeroStage
from tessera.formulation.job.runtimes import RUNTIMES


class Technique(StrEnum):
    """A way to divide the work of training, or to trade one resource for another."""

    DATA_PARALLELISM = "dp"
    TENSOR_PARALLELISM = "tp"
    PIPELINE_PARALLELISM = "pp"
    CONTEXT_PARALLELISM = "cp"
    EXPERT_PARALLELISM = "ep"
    ZERO_1 = "zero1"
    ZERO_2 = "zero2"
    ZERO_3 = "zero3"
    OFFLOAD = "offload"
    CHECKPOINTING = "checkpointing"  # activations are computed again in the backward pass
    ACCUMULATION = "accumulation"


_OF_ZERO: Final = {
    ZeroStage.OPTIMIZER: Technique.ZERO_1,
    ZeroStage.GRADIENTS: Technique.ZERO_2,
    ZeroStage.PARAMETERS: Technique.ZERO_3,
}


def techniques_of(plan: ExecutionPlan) -> frozenset[Technique]:
    """Return the techniques that a plan uses.

    A pipeline's micro-batches are part of its pipeline parallelism, and not an accumulation.
    """
    stages = plan.stages
    used = {
        Technique.DATA_PARALLELISM: any(stage.dp > 1 for stage in stages),
        Technique.TENSOR_PARALLELISM: any(stage.tp > 1 for stage in stages),
        Technique.PIPELINE_PARALLELISM: plan.pipeline_degree > 1,
        Technique.CONTEXT_PARALLELISM: any(stage.cp > 1 for stage in stages),
        Technique.EXPERT_PARALLELISM: any(stage.ep > 1 for stage in stages),
        Technique.OFFLOAD: plan.offload is not Offload.NONE,
        Technique.CHECKPOINTING: plan.recomputation is not Recomputation.NONE,
        Technique.ACCUMULATION: plan.accumulation > 1 and plan.pipeline_degree == 1,
    }
    zero = {_OF_ZERO[plan.zero]} if plan.zero in _OF_ZERO else set()
    return frozenset({technique for technique, is_used in used.items() if is_used} | zero)


def refuse_techniques(plan: ExecutionPlan, techniques: Collection[Technique]) -> str:
    """Return why a job that can use only ``techniques`` cannot run ``plan``, or "" if it can.

    The text is the end of a sentence that begins with the plan. No techniques stand for all.
    """
    others = techniques_of(plan) - set(techniques) if techniques else set()
    if not others:
        return ""
    used = ", ".join(technique for technique in Technique if technique in others)
    return f"uses {used}, and the job's techniques are {', '.join(techniques)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The limits of the execution plans of some jobs: their runtime, and techniques that they name.

    If ``techniques`` is empty, the runtime alone decides.
    """

    runtime: str
    techniques: tuple[Technique, ...] = ()

    def refuse(self, plan: ExecutionPlan) -> str:
        """Return why the jobs cannot run a plan, or "" if they can: the end of a sentence."""
        refuse_plan = RUNTIMES[self.runtime].refuse_plan
        return refuse_plan(plan) or refuse_techniques(plan, self.techniques)

    def allow(self, plan: ExecutionPlan) -> bool:
        """Return whether the jobs can run a plan."""
        return not self.refuse(plan)

    @property
    def allow_every_plan(self) -> bool:
        """Return whether no plan is excluded."""
        return not self.techniques and RUNTIMES[self.runtime].runs_any_plan

    def __str__(self) -> str:
        """Return the limits in short, e.g. ``deepspeed with dp, zero2``."""
        named = f" with {', '.join(self.techniques)}" if self.techniques else ""
        return f"{self.runtime}{named}"


def read_techniques(field: str, words: Iterable[str]) -> tuple[Technique, ...]:
    """Return the techniques that ``words`` name, each once, in the order of ``Technique``.

    Raises:
        InvalidInput: a word names none. It names ``field``.
    """
    named = set()
    for word in words:
        try:
            named.add(Technique(word.strip().lower()))
        except ValueError:
            known = ", ".join(Technique)
            raise InvalidInput(field, f"has {word!r}, but techniques are {known}") from None
    return tuple(technique for technique in Technique if technique in named)
