"""Execution plans, as a program reads them: how layers, samples and tensors are divided.

The scheduler writes plans as JSON that leaves out defaults. This module reads them without any
other part of Tessera, because a program's environment has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tessera import progress
from tessera.jax.errors import PlanRefused

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved")
OFFLOADS: Final = ("none", "optimizer", "parameters")
RECOMPUTATIONS: Final = ("none", "selective", "full")
PRECISIONS: Final = ("f32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The layers ``start`` to ``end`` (exclusive) on ``dp * tp`` devices.

    ``dp`` replicas divide the samples of a micro-batch, and ``tp`` devices divide each layer.
    Experts are divided over ``ep`` of the devices. If ``sp``, the devices of ``tp`` also divide
    activations between layers by sequence.
    """

    start: int
    end: int
    dp: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool = False

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An execution plan. Its fields have the meanings of the scheduler's plans.

    With ``chunks`` of layers on each stage's devices (an interleaved schedule), stage ``i`` runs on
    the devices of stage ``i % degree``.
    """

    stages: tuple[Stage, ...]
    micro_batch: int  # samples, in all replicas together
    accumulation: int = 1  # micro-batches of an iteration
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    offload: str = "none"
    cpus_per_gpu: int = 0  # cores that update offloaded states; 0 if the plan states no number
    recomputation: str = "none"
    precision: str = "bf16"

    def __post_init__(self) -> None:
        """Check the plan by itself. Raises PlanRefused."""
        if not self.stages:
            raise PlanRefused("the plan has no stages; give it at least one")
        _require("schedule", self.schedule, SCHEDULES)
        _require("offload", self.offload, OFFLOADS)
        _require("recomputation", self.recomputation, RECOMPUTATIONS)
        _require("precision", self.precision, PRECISIONS)
        _require("zero", self.zero, (0, 1, 2, 3))
        if len(self.stages) % self.chunks:
            raise PlanRefused(f"{self.chunks} chunks do not divide the {len(self.stages)} stages")
        if self.chunks > 1 and (self.schedule != "interleaved" or self.accumulation % self.degree):
            raise PlanRefused(
                "several chunks need the schedule 'interleaved' and an accumulation that is a multiple"
                " of the pipeline degree"
            )
        begin = 0
        for index, stage in enumerate(self.stages):
            if stage.start != begin or stage.end <= stage.start:
                raise PlanRefused(f"stage {index} must begin at layer {begin} and have layers")
            begin = stage.end
            if self.micro_batch % stage.dp:
                raise PlanRefused(
                    f"{stage.dp} replicas of stage {index} do not divide the micro-batch of"
                    f" {self.micro_batch} samples"
                )
            lane = self.stages[index % self.degree]
            if (stage.dp, stage.tp, stage.ep) != (lane.dp, lane.tp, lane.ep):
                raise PlanRefused(f"stage {index} must divide as stage {index % self.degree} does")

    @property
    def degree(self) -> int:
        """Return the pipeline degree: the number of stages that have devices of their own."""
        return len(self.stages) // self.chunks

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return sum(stage.devices for stage in self.stages[: self.degree])

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return self.stages[-1].end

    @property
    def global_batch(self) -> int:
        """Return the samples of an iteration."""
        return self.micro_batch * self.accumulation


def read_plan(plain: Mapping[str, Any]) -> Plan:
    """Return the plan of JSON's plain values, as ``progress.plan()`` returns them.

    Raises:
        PlanRefused: this release cannot run such a plan.
    """
    values = {name: value for name, value in plain.items() if name not in _IGNORED}
    try:
        stages = tuple(_read_stage(stage) for stage in values.pop("stages"))
        return Plan(stages=stages, **values)
    except (KeyError, TypeError) as error:
        raise PlanRefused(f"the plan cannot be read: {error}; update tessera-client") from error


def current_plan(layers: int, devices: int, global_batch: int, default: Plan | None = None) -> Plan:
    """Return the plan of this start, or the default, or data parallelism on all devices.

    Raises:
        PlanRefused: the plan cannot be run.
    """
    plain = progress.plan()
    if plain is not None:
        return read_plan(plain)
    if default is not None:
        return default
    dp = next(n for n in range(min(devices, global_batch), 0, -1) if global_batch % n == 0)
    return Plan(stages=(Stage(start=0, end=layers, dp=dp),), micro_batch=global_batch)


_IGNORED: Final = ("shape", "space", "model")
"""Fields of plans that only the scheduler needs."""


def _read_stage(plain: Mapping[str, Any]) -> Stage:
    values = dict(plain)
    if values.pop("cp", 1) != 1:
        raise PlanRefused("the plan divides sequences (cp), which tessera.jax cannot; use sp")
    return Stage(**values)


def _require(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise PlanRefused(
            f"the plan's {name} is {value!r}; tessera.jax knows {', '.join(map(str, known))}"
        )
