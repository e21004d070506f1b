"""The collectives of an estimate, compared with those that XLA compiled for the model's JAX step.

Both are bytes that each GPU of a group sends to the next in a ring: twice the payload for an
all-reduce, once for a reduce-scatter, an all-gather or an all-to-all. XLA may thus replace an
all-reduce by the two others without a difference. This module does not import JAX.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.estimator.compiling.compiled import Collective, CompiledStep, Uncompilable
from tessera.estimator.graph import Graph
from tessera.estimator.plans import Primitive, Training
from tessera.estimator.traffic import stage_traffic
from tessera.formulation.execution_plan import PlanStage

MAX_DIFFERENCE: Final = 0.2
"""Share of the estimated bytes by which compiled ones may differ without a report. Communication is
rarely more than a half of an iteration, so its time is then less wrong than the estimate's own mean
error (14.5 % with nothing measured)."""

MAX_REPLICAS: Final = 2
"""Largest number of replicas of a compiled step. Payloads do not depend on this number."""

SAMPLES_PER_REPLICA: Final = 2
"""Samples of a replica in a compiled step. Payloads inside a tensor group are proportional to them.
Two samples of the published MoE models fill a group of tokens that are routed together."""


class GroupKind(StrEnum):
    """The GPUs between which a collective runs."""

    TENSOR = "tensor"  # the parts of a layer
    DATA = "data"  # the replicas
    MIXED = "mixed"  # neither


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepDegrees:
    """The degrees for which a step is compiled. ``zero`` divides optimizer states and gradients."""

    dp: int
    tp: int
    zero: bool

    @property
    def samples(self) -> int:
        """Return the samples of the compiled step."""
        return SAMPLES_PER_REPLICA * self.dp

    def __str__(self) -> str:
        """Return the degrees in short, e.g. ``dp2 tp4, ZeRO``."""
        return f"dp{self.dp} tp{self.tp}" + (", ZeRO" if self.zero else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComparison:
    """The bytes that each GPU of a kind of group sends in a step of one micro-batch.

    ``primitives`` are the payload bytes of the compiled step. ``allowed_bytes`` is the largest
    difference without a report.
    """

    kind: GroupKind
    size: int
    estimated_bytes: float
    compiled_bytes: float
    allowed_bytes: float
    primitives: Mapping[str, float]

    @property
    def differs(self) -> bool:
        """Return whether the difference is to be reported."""
        return abs(self.compiled_bytes - self.estimated_bytes) > self.allowed_bytes

    def __str__(self) -> str:
        """Return both numbers and their difference."""
        text = (
            f"{self.kind} groups of {self.size}: {_bytes_text(self.estimated_bytes)} estimated,"
            f" {_bytes_text(self.compiled_bytes)} compiled"
        )
        if self.estimated_bytes:
            text += f" ({100 * (self.compiled_bytes / self.estimated_bytes - 1):+.1f} %)"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCheck:
    """The comparison of a step's collectives at some degrees.

    ``skipped`` says which part was not compared and why, or is "".
    """

    degrees: StepDegrees
    groups: tuple[GroupComparison, ...]
    versions: Mapping[str, str]
    skipped: str = ""

    @property
    def differing(self) -> tuple[GroupComparison, ...]:
        """Return the groups whose difference is to be reported."""
        return tuple(group for group in self.groups if group.differs)


def degrees_to_check(stages: Iterable[PlanStage], zero: int) -> list[StepDegrees]:
    """Return the degrees to compile for a plan, without duplicates. Single GPUs have none.

    The whole model is compiled at the degrees of each stage, without the pipeline.

    Raises:
        Uncompilable: the plan has what the compiled step cannot have.
    """
    degrees = set()
    for stage in stages:
        if zero >= 3:
            raise Uncompilable("steps with divided weights (ZeRO-3) are not compiled")
        if stage.cp > 1:
            raise Uncompilable("steps with divided sequences (cp) are not compiled")
        if stage.dp > 1 or stage.tp > 1:
            dp = min(stage.dp, MAX_REPLICAS)
            degrees.add(StepDegrees(dp=dp, tp=stage.tp, zero=zero > 0 and dp > 1))
    return sorted(degrees)


def compare_collectives(
    graph: Graph, degrees: StepDegrees, compiled: CompiledStep
) -> CollectiveCheck:
    """Return the comparison of the estimate for ``graph`` with a compiled step of ``degrees``.

    The compiled step divides experts over the tensor group and keeps all tokens on each GPU of it.
    No estimated plan does, so the tensor groups of a model with experts are not compared.
    """
    estimated = _estimated_bytes(graph, degrees)
    has_experts = bool((graph.experts > 1).any())
    skipped = ""
    if has_experts and degrees.tp > 1:
        skipped = "tensor groups of a model with experts, which the compiled step divides otherwise"
    sent: dict[GroupKind, float] = defaultdict(float)
    primitives: dict[GroupKind, dict[str, float]] = {kind: {} for kind in GroupKind}
    for collective in compiled.collectives:
        kind = _kind_of(collective, degrees.tp)
        payload = collective.payload_bytes * collective.times
        sent[kind] += ring_bytes(collective.primitive, payload, collective.size)
        of_kind = primitives[kind]
        of_kind[collective.primitive] = of_kind.get(collective.primitive, 0.0) + payload
    total = math.fsum(estimated.values())
    sizes = {GroupKind.TENSOR: degrees.tp, GroupKind.DATA: degrees.dp}
    groups = tuple(
        GroupComparison(
            kind=kind,
            size=sizes.get(kind, degrees.dp * degrees.tp),
            estimated_bytes=estimated.get(kind, 0.0),
            compiled_bytes=sent[kind],
            allowed_bytes=MAX_DIFFERENCE * (estimated.get(kind, 0.0) or total),
            primitives=primitives[kind],
        )
        for kind in GroupKind
        if (kind in estimated or sent[kind]) and not (skipped and kind is not GroupKind.DATA)
    )
    return CollectiveCheck(
        degrees=degrees, groups=groups, versions=compiled.versions, skipped=skipped
    )


def ring_bytes(primitive: Primitive, payload_bytes: float, size: int) -> float:
    """Return the bytes that each of ``size`` GPUs sends to the next for a collective."""
    if primitive is Primitive.SEND:
        return payload_bytes
    rounds = 2 if primitive is Primitive.ALL_REDUCE else 1
    return rounds * payload_bytes * (size - 1) / size


def _estimated_bytes(graph: Graph, degrees: StepDegrees) -> dict[GroupKind, float]:
    """Return the estimated ring bytes of a step of one micro-batch, by kind of group."""
    has_experts = bool((graph.experts > 1).any())
    stage = PlanStage(
        start=0,
        end=len(graph),
        dp=degrees.dp,
        tp=degrees.tp,
        ep=degrees.tp if has_experts else 1,
    )
    training = Training(global_batch=degrees.samples, micro_batches=1)
    zero = 2 if degrees.zero else 0
    traffic = stage_traffic(graph, training, zero, stage, last=True)
    estimated = {}
    if degrees.tp > 1:
        estimated[GroupKind.TENSOR] = traffic.tensor[0]
    if degrees.dp > 1:
        estimated[GroupKind.DATA] = traffic.data[0] + traffic.expert_data[0]
    return estimated


def _kind_of(collective: Collective, tp: int) -> GroupKind:
    """Return the kind of a collective's groups. Devices are numbered replica by replica."""
    groups = [set(group) for group in collective.groups if len(set(group)) > 1]
    if all(len({device // tp for device in group}) == 1 for group in groups):
        return GroupKind.TENSOR
    if all(len({device % tp for device in group}) == 1 for group in groups):
        return GroupKind.DATA
    return GroupKind.MIXED


def _bytes_text(amount: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= unit:
            return f"{amount / unit:.4g} {name}"
    return f"{amount:.4g} B"
