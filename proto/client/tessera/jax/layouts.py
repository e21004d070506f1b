"""The devices of a stage, and the places of parameters, states and values on them.

A stage's devices form a mesh of ``dp x tp``, of which tensor parallelism has the inner part. Experts
are divided over ``ep`` devices: over a part of the replicas, or over all replicas and a part of the
devices that divide layers. So the mesh has four axes, and most of them have one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.jax.errors import PlanRefused
from tessera.jax.models import EXPERT, TENSOR, Layer, Params, Values, named_leaves
from tessera.plans import ExecutionPlan, PlanStage

AXES: Final = ("replica", "expert_replica", "expert_tensor", "whole_tensor")
DATA: Final = ("replica", "expert_replica")
"""The axes that divide the samples of a micro-batch."""

_DIVIDED: Final = {
    "data": DATA,
    TENSOR: ("expert_tensor", "whole_tensor"),
    EXPERT: ("expert_replica", "expert_tensor"),
}
"""The axes of the mesh over which the axes of a division go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """A stage on its devices. ``zero`` is the plan's ZeRO stage."""

    stage: PlanStage
    mesh: Mesh
    zero: int
    sequence_axis: int | None = None

    def divides_as(self, other: StageLayout) -> bool:
        """Return whether another stage divides everything in the same way, on its own devices."""
        mine, its = self.stage, other.stage
        return (mine.dp, mine.tp, mine.ep, mine.sp) == (its.dp, its.tp, its.ep, its.sp)

    def parameters(self, layer: Layer, shapes: Params) -> Params:
        """Return the sharding of each parameter of a layer.

        Raises:
            PlanRefused: an axis cannot be divided equally.
        """
        return self._tree(layer, shapes, is_spread=self.zero >= 3)

    def gradients(self, layer: Layer, shapes: Params) -> Params:
        """Return the sharding of each gradient of a layer, once it is added up."""
        return self._tree(layer, shapes, is_spread=self.zero >= 2)

    def states(self, layer: Layer, shapes: Params) -> Params:
        """Return the sharding of an optimizer state that has the shapes of the parameters."""
        return self._tree(layer, shapes, is_spread=self.zero >= 1)

    def whole(self) -> NamedSharding:
        """Return the sharding of what each device holds wholly."""
        return NamedSharding(self.mesh, PartitionSpec())

    def samples(self) -> NamedSharding:
        """Return the sharding of arrays whose first axis are the samples of a micro-batch."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def values(self, shapes: Values) -> Values:
        """Return the sharding of each array between layers, by samples and perhaps by sequence."""
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, self._value_spec(leaf)), shapes)

    def _value_spec(self, leaf: Any) -> PartitionSpec:
        axis, tensor = self.sequence_axis, _DIVIDED[TENSOR]
        divides = self.stage.sp and axis is not None and leaf.ndim > axis
        if not divides or axis is None or leaf.shape[axis] % self.stage.tp:
            return PartitionSpec(DATA)
        return PartitionSpec(DATA, *([None] * (axis - 1)), tensor)

    def _tree(self, layer: Layer, shapes: Params, *, is_spread: bool) -> Params:
        specs = [
            self._leaf_spec(layer, path, leaf.shape, is_spread)
            for path, leaf in named_leaves(shapes)
        ]
        shardings = [NamedSharding(self.mesh, spec) for spec in specs]
        return jax.tree.unflatten(jax.tree.structure(shapes), shardings)

    def _leaf_spec(
        self, layer: Layer, path: str, shape: Sequence[int], is_spread: bool
    ) -> PartitionSpec:
        stated = layer.divisions.get(path, PartitionSpec())
        names = [*stated, *([None] * (len(shape) - len(stated)))]
        axes = _divide_axes(names)
        for axis, over in enumerate(axes):
            if shape[axis] % self._ways(over):
                raise PlanRefused(
                    f"layer {layer.name!r}: {self._ways(over)} devices cannot divide axis {axis} of"
                    f" {path!r}, which has {shape[axis]} elements; use a plan with a smaller degree"
                )
        if is_spread:
            _spread(axes, shape, [n for n in DATA if not any(n in used for used in axes)], self)
        return PartitionSpec(*(over or None for over in axes))

    def _ways(self, axes: Sequence[str]) -> int:
        return int(np.prod([self.mesh.shape[name] for name in axes], dtype=np.int64))


def _divide_axes(names: Sequence[str | None]) -> list[tuple[str, ...]]:
    """Return the axes of the mesh for each axis of an array, which names a division or None.

    Experts take theirs first. What divides layers then has the rest, whatever the order of axes.
    """
    axes: list[tuple[str, ...]] = [()] * len(names)
    for kind in ("data", EXPERT, TENSOR):
        for place, name in enumerate(names):
            if name == kind:
                taken = {n for over in axes for n in over}
                axes[place] = tuple(n for n in _DIVIDED[kind] if n not in taken)
    return axes


def _spread(
    axes: list[tuple[str, ...]], shape: Sequence[int], over: list[str], layout: StageLayout
) -> None:
    """Divide the first axis that allows it over the replicas, too. Small parameters stay whole."""
    ways = layout._ways(over)
    for axis, size in enumerate(shape):
        if ways > 1 and size % (layout._ways(axes[axis]) * ways) == 0:
            axes[axis] = (*axes[axis], *over)
            return


def stage_layouts(
    plan: ExecutionPlan, devices: Sequence[jax.Device], sequence_axis: int | None
) -> tuple[StageLayout, ...]:
    """Return the layout of each stage. Stages have devices in their order.

    Raises:
        PlanRefused: experts cannot be divided over a stage's devices.
    """
    meshes, first = [], 0
    for stage in plan.stages[: plan.pipeline_degree]:
        own = np.array(devices[first : first + stage.gpus], dtype=object)
        meshes.append(Mesh(own.reshape(_mesh_shape(stage)), AXES))
        first += stage.gpus
    return tuple(
        StageLayout(
            stage=stage,
            mesh=meshes[index % plan.pipeline_degree],
            zero=plan.zero,
            sequence_axis=sequence_axis,
        )
        for index, stage in enumerate(plan.stages)
    )


def _mesh_shape(stage: PlanStage) -> tuple[int, int, int, int]:
    if stage.dp % stage.ep == 0:
        return stage.dp // stage.ep, stage.ep, 1, stage.tp
    if stage.ep % stage.dp == 0 and stage.tp % (stage.ep // stage.dp) == 0:
        return 1, stage.dp, stage.ep // stage.dp, stage.tp * stage.dp // stage.ep
    raise PlanRefused(
        f"experts on {stage.ep} devices (ep) cannot be laid on {stage.dp} replicas (dp) of"
        f" {stage.tp} devices (tp); use an ep that divides dp, or a multiple of dp"
    )


_LAYOUT: ContextVar[StageLayout | None] = ContextVar("layout", default=None)


@contextmanager
def tracing_on(layout: StageLayout) -> Iterator[None]:
    """Let ``constrain`` refer to this layout while a stage's functions are traced."""
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def constrain(values: jax.Array, *axes: str | None) -> jax.Array:
    """Return the values, divided over TENSOR or EXPERT along the axes that name them.

    Layers may call this, e.g. for the tokens of each expert. It changes where values are, and never
    what they are. Outside of a training program, and where an axis cannot be divided equally, it
    does nothing. Axes of samples are named ``"data"``. A function that calls this must not be under a
    ``jax.jit`` of its own, which would keep the places of another plan.
    """
    layout = _LAYOUT.get()
    if layout is None:
        return values
    names = [*axes, *([None] * (values.ndim - len(axes)))]
    over = [
        wanted if size % layout._ways(wanted) == 0 else ()
        for size, wanted in zip(values.shape, _divide_axes(names), strict=True)
    ]
    spec = PartitionSpec(*(wanted or None for wanted in over))
    placed: jax.Array = jax.lax.with_sharding_constraint(values, NamedSharding(layout.mesh, spec))
    return placed
