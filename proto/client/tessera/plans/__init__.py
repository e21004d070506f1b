"""Execution plans: the way in which a Cell runs, as data from the estimate to the training program.

A plan divides a model's layers into pipeline stages, each with its own parallelism, and says how an
iteration passes through them. It has one canonical JSON, one digest and one short text.

The scheduler, its agents and ``tessera.jax`` share this module. It needs the standard library
alone, because the environment of a program has nothing else of Tessera.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import Any, Final, TypeVar

MAX_STAGES: Final = 1024
"""Largest number of stages of a plan, counting each chunk of an interleaved one."""

MAX_COUNT: Final = 2**31 - 1
"""Largest whole number in a plan."""

MAX_NAME: Final = 200
"""Characters of a model's name in a plan."""


class InvalidPlan(ValueError):
    """A field of a plan is wrong. The message names the allowed values."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Schedule(StrEnum):
    """The order of forward and backward passes in a pipeline."""

    GPIPE = "gpipe"  # all forward passes, then all backward passes
    ONE_F_ONE_B = "1f1b"  # needs less memory in the same time
    INTERLEAVED = "interleaved"  # 1F1B, with several chunks of layers on each stage's GPUs


class ZeroStage(IntEnum):
    """The states that data-parallel replicas divide among themselves (ZeRO, SC 2020, section 5)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2  # and the optimizer's states
    PARAMETERS = 3  # and all of the above, as in fully sharded data parallelism


class Offload(StrEnum):
    """The states that are kept in the host's memory (ZeRO-Offload, ATC 2021)."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"  # and the optimizer's states


class Recomputation(StrEnum):
    """The activations that the backward pass computes again (Korthikanti et al., MLSys 2023)."""

    NONE = "none"
    SELECTIVE = "selective"  # the activations of attention
    FULL = "full"  # everything except the inputs of layers


class Precision(StrEnum):
    """The data type of the matrix products."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """A stage of a plan: the layers ``start`` to ``end`` (exclusive) on ``dp * tp * cp`` GPUs."""

    start: int
    end: int
    dp: int = 1  # replicas, which divide the samples of a micro-batch
    tp: int = 1  # GPUs that divide each layer
    ep: int = 1  # GPUs over which experts are divided. Divides the stage's GPUs
    cp: int = 1  # GPUs that divide each sequence
    # Whether tensor-parallel parts divide activations by sequence (Korthikanti et al. 2022).
    sp: bool = False

    def __post_init__(self) -> None:
        """Check that the stage has layers, and that its degrees are possible."""
        for name in ("dp", "tp", "ep", "cp"):
            _require_count(name, getattr(self, name))
        _require_count("start", self.start, min_value=0)
        _require_count("end", self.end)
        if self.end <= self.start:
            raise InvalidPlan(
                "end", f"must be above start ({self.start}), because a stage has layers"
            )
        if not isinstance(self.sp, bool):
            raise InvalidPlan("sp", "must be true or false")
        if self.sp and self.tp == 1:
            raise InvalidPlan("sp", "needs a tensor-parallel degree (tp) of at least 2")
        if self.gpus % self.ep:
            raise InvalidPlan(
                "ep", f"must divide the stage's {self.gpus} GPUs (dp x tp x cp), but is {self.ep}"
            )

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.dp * self.tp * self.cp

    @property
    def parallelism(self) -> tuple[int, int, int, int, bool]:
        """Return everything but the layers."""
        return self.dp, self.tp, self.ep, self.cp, self.sp

    def __str__(self) -> str:
        """Return the stage's parallelism in short, e.g. ``dp4 tp2``."""
        parts = [f"{name}{getattr(self, name)}" for name in ("dp", "tp", "cp", "ep")]
        degrees = [part for part in parts if not part.endswith("p1")] or ["dp1"]
        return " ".join([*degrees, *(["sp"] if self.sp else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSwitches:
    """The part of a plan that places states and activations, and does not divide the model."""

    zero: ZeroStage = ZeroStage.NONE
    offload: Offload = Offload.NONE
    cpus_per_gpu: int = 0
    """CPU cores for each GPU that update offloaded states. If it is 0, the plan states no number."""
    recomputation: Recomputation = Recomputation.NONE

    def cpus_on(self, gpus: int) -> int:
        """Return the CPU cores that update the states of some GPUs. 0 if no number is stated."""
        return self.cpus_per_gpu * gpus

    def switch_values(self) -> dict[str, Any]:
        """Return the switches by name."""
        return {f.name: getattr(self, f.name) for f in fields(PlanSwitches)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan(PlanSwitches):
    """The way in which a Cell runs.

    The stages are in the order of the model's layers. With an interleaved schedule there are
    ``chunks`` times as many of them as the pipeline degree, and stage ``i`` runs on the GPUs of
    stage ``i % pipeline_degree``.

    Samples are never lost or repeated: ``micro_batch * accumulation`` is the global batch, and each
    replica of a stage computes an equal part of a micro-batch.
    """

    stages: tuple[PlanStage, ...]
    micro_batch: int
    """Samples of a micro-batch, in all replicas of a stage together."""
    accumulation: int = 1
    """Number of micro-batches whose gradients are added up in an iteration."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    chunks: int = 1
    """Chunks of layers on each stage's GPUs. Only an interleaved schedule has more than one."""
    precision: Precision = Precision.BF16
    shape: tuple[int, ...] = ()
    """GPUs on each node for which the plan was made, falling. If it is empty, any nodes will do."""
    model: str = ""
    """``model/params`` of the workload for which the plan was made, or "" if it was not recorded."""

    def __post_init__(self) -> None:
        """Check that the plan can be launched. Values of enumerations may be given in their JSON."""
        for name, kind in _ENUMS.items():
            if type(value := getattr(self, name)) is not kind:
                object.__setattr__(self, name, _member(name, kind, value))
        _require_count("micro_batch", self.micro_batch)
        _require_count("accumulation", self.accumulation)
        _require_count("chunks", self.chunks)
        if not isinstance(self.model, str):
            raise InvalidPlan("model", "must be a text")
        if len(self.model) > MAX_NAME:
            raise InvalidPlan("model", f"may have at most {MAX_NAME} characters")
        self._check_stages()
        self._check_schedule()
        self._check_shape()
        _require_count("cpus_per_gpu", self.cpus_per_gpu, min_value=0)
        if self.cpus_per_gpu and self.offload is Offload.NONE:
            raise InvalidPlan(
                "cpus_per_gpu",
                "is for states that the host updates; leave it out, or state an offload",
            )
        if self.offload is Offload.PARAMETERS and self.zero is not ZeroStage.PARAMETERS:
            raise InvalidPlan("offload", "of parameters needs ZeRO stage 3 (zero: 3)")

    def _check_stages(self) -> None:
        if not self.stages:
            raise InvalidPlan("stages", "must not be empty: a plan has at least one stage")
        if len(self.stages) > MAX_STAGES:
            raise InvalidPlan(
                "stages", f"has {len(self.stages)} stages; at most {MAX_STAGES} are possible"
            )
        next_layer = 0
        for index, stage in enumerate(self.stages):
            if stage.start != next_layer:
                fault = "misses" if stage.start > next_layer else "repeats"
                layer = min(stage.start, next_layer)
                raise InvalidPlan(
                    f"stages[{index}].start",
                    f"{fault} layer {layer}: it is {stage.start}, but must be {next_layer},"
                    " so that each layer is in exactly one stage",
                )
            next_layer = stage.end
            if self.micro_batch % stage.dp:
                raise InvalidPlan(
                    "micro_batch",
                    f"of {self.micro_batch} samples cannot be divided equally among the {stage.dp} replicas"
                    f" of stage {index}; make it a multiple of {stage.dp}",
                )

    def _check_schedule(self) -> None:
        if self.schedule is not Schedule.INTERLEAVED:
            if self.chunks > 1:
                raise InvalidPlan(
                    "chunks", f"must be 1 unless the schedule is interleaved, but is {self.chunks}"
                )
            return
        if self.chunks < 2 or len(self.stages) % self.chunks:
            raise InvalidPlan(
                "chunks",
                f"must be at least 2 and divide the {len(self.stages)} stages of an interleaved schedule,"
                f" but is {self.chunks}",
            )
        degree = self.pipeline_degree
        for index, stage in enumerate(self.stages[degree:], degree):
            if stage.parallelism != self.stages[index % degree].parallelism:
                raise InvalidPlan(
                    f"stages[{index}]",
                    f"must have the parallelism of stages[{index % degree}], because it runs on its GPUs",
                )
        if self.accumulation % degree:
            raise InvalidPlan(
                "accumulation",
                f"must be a multiple of the pipeline degree {degree} for an interleaved schedule, but is"
                f" {self.accumulation}",
            )

    def _check_shape(self) -> None:
        for place, gpus in enumerate(self.shape):
            _require_count(f"shape[{place}]", gpus)
        if list(self.shape) != sorted(self.shape, reverse=True):
            raise InvalidPlan("shape", "must name the node with the most GPUs first")
        if self.shape and sum(self.shape) != self.gpus:
            raise InvalidPlan(
                "shape",
                f"has {sum(self.shape)} GPUs, but the stages have {self.gpus}; make them equal",
            )

    @property
    def pipeline_degree(self) -> int:
        """Return the number of stages between which GPUs are divided."""
        return len(self.stages) // self.chunks

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(stage.gpus for stage in self.stages[: self.pipeline_degree])

    @property
    def cpus(self) -> int:
        """Return the number of CPU cores that update offloaded states. 0 if it is not stated."""
        return self.cpus_on(self.gpus)

    @property
    def layers(self) -> int:
        """Return the number of the model's layers."""
        return self.stages[-1].end

    @property
    def global_batch(self) -> int:
        """Return the samples of an iteration."""
        return self.micro_batch * self.accumulation

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal digits. It names the plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the canonical JSON: sorted keys, no spaces, and no field that has its default.

        Later releases may add fields with defaults. The JSON and the digest of a plan without them
        stay the same.
        """
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":"))

    def __str__(self) -> str:
        """Return the plan in short, e.g. ``2 x (dp4 tp2), 1F1B, ZeRO-1, micro-batch 4``.

        A micro-batch is shown by its samples in each replica, as users of Megatron-LM state it, or
        by all its samples if the stages have different numbers of replicas. ``x 8`` after it is the
        accumulation.
        """
        stages = _stages_text(self.stages[: self.pipeline_degree])
        parts = [stages, self._schedule_text(), *self.switches(), self._batch_text()]
        return ", ".join(part for part in parts if part)

    def switches(self) -> list[str]:
        """Return ZeRO, offload, recomputation and precision in words, where they are not the usual."""
        return [
            text
            for text in (
                f"ZeRO-{self.zero.value}" if self.zero else "",
                f"{self.offload} offload{self._cores_text()}"
                if self.offload is not Offload.NONE
                else "",
                f"{self.recomputation} recomputation"
                if self.recomputation is not Recomputation.NONE
                else "",
                self.precision if self.precision is not Precision.BF16 else "",
            )
            if text
        ]

    def _schedule_text(self) -> str:
        names = {
            Schedule.GPIPE: "GPipe",
            Schedule.ONE_F_ONE_B: "1F1B",
            Schedule.INTERLEAVED: f"interleaved 1F1B with {self.chunks} chunks",
        }
        return names[self.schedule] if self.pipeline_degree > 1 else ""

    def _cores_text(self) -> str:
        if not self.cpus_per_gpu:
            return ""
        return f" on {self.cpus_per_gpu} CPU core{'s' * (self.cpus_per_gpu > 1)} per GPU"

    def _batch_text(self) -> str:
        replicas = {stage.dp for stage in self.stages}
        even = len(replicas) == 1
        samples = self.micro_batch // replicas.pop() if even else self.micro_batch
        scope = "" if even else " in all"
        return f"micro-batch {samples}{scope}" + (
            f" x {self.accumulation}" if self.accumulation > 1 else ""
        )


def plan_from_plain(field: str, plain: object) -> ExecutionPlan:
    """Return the plan of JSON's plain values.

    Raises:
        InvalidPlan: it has an unknown field, or could not be launched. The error names the field
            below ``field``.
    """
    values = _object(field, plain, ExecutionPlan)
    if "stages" in values:
        stages = enumerate(_list(f"{field}.stages", values["stages"]))
        values["stages"] = tuple(_stage_of(f"{field}.stages[{i}]", stage) for i, stage in stages)
    if "shape" in values:
        values["shape"] = tuple(_list(f"{field}.shape", values["shape"]))
    return _build(field, ExecutionPlan, values)


def _stage_of(field: str, plain: object) -> PlanStage:
    return _build(field, PlanStage, _object(field, plain, PlanStage))


def _stages_text(stages: Iterable[PlanStage]) -> str:
    """Return stages in short, with equal neighbours joined."""
    runs = [(text, len(list(run))) for text, run in groupby(map(str, stages))]
    if len(runs) == 1 and runs[0][1] == 1:
        return runs[0][0]
    return " + ".join(
        (f"{count} x " if count > 1 else "") + (f"({text})" if " " in text else text)
        for text, count in runs
    )


_ENUMS: Final[Mapping[str, type[StrEnum] | type[ZeroStage]]] = {
    "schedule": Schedule,
    "zero": ZeroStage,
    "offload": Offload,
    "recomputation": Recomputation,
    "precision": Precision,
}


def _plain(value: PlanStage | ExecutionPlan) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as JSON's plain values."""
    plain = {
        f.name: getattr(value, f.name)
        for f in fields(value)
        if f.default is MISSING or getattr(value, f.name) != f.default
    }
    if isinstance(value, ExecutionPlan):
        plain["stages"] = [_plain(stage) for stage in value.stages]
    return plain


_Part = TypeVar("_Part", PlanStage, ExecutionPlan)


def _build(field: str, kind: type[_Part], values: dict[str, Any]) -> _Part:
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]
    if missing:
        raise InvalidPlan(f"{field}.{missing[0]}", "is missing; state it")
    try:
        return kind(**values)
    except InvalidPlan as wrong:
        raise InvalidPlan(f"{field}.{wrong.field}", wrong.problem) from wrong


def _object(
    field: str, plain: object, kind: type[PlanStage] | type[ExecutionPlan]
) -> dict[str, Any]:
    names = [f.name for f in fields(kind)]
    if not isinstance(plain, dict):
        raise InvalidPlan(field, f"must be an object with the fields {', '.join(names)}")
    for name in plain:
        if name not in names:
            raise InvalidPlan(
                f"{field}.{str(name)[:80]}",
                f"is not a field of a plan; the fields are {', '.join(names)}",
            )
    return dict(plain)


def _list(field: str, plain: object) -> list[Any]:
    if not isinstance(plain, list):
        raise InvalidPlan(field, "must be a list")
    return plain


def _member(name: str, kind: type[StrEnum] | type[ZeroStage], plain: object) -> StrEnum | ZeroStage:
    for member in kind:
        if type(plain) is not bool and plain == member.value:
            return member
    raise InvalidPlan(name, f"must be one of {', '.join(str(m.value) for m in kind)}")


def _require_count(name: str, value: object, min_value: int = 1) -> None:
    if type(value) is not int or not min_value <= value <= MAX_COUNT:
        raise InvalidPlan(name, f"must be a whole number from {min_value} to {MAX_COUNT}")
