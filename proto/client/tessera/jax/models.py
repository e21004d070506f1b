"""Models as lists of layers: pure functions with names, and what may be divided.

A layer is stated by two functions: one makes its parameters, and one applies them. All else follows
from the plan, so a model says nothing about devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jax
from jax.sharding import PartitionSpec

from tessera.jax.errors import ModelRefused, PlanRefused
from tessera.jax.plans import require_supported
from tessera.plans import ExecutionPlan

Params: TypeAlias = Any
"""The parameters of a layer: a pytree of arrays. Its keys are strings."""

Values: TypeAlias = Any
"""What flows between layers: a pytree of arrays whose first axis are the samples."""

TENSOR: Final = "tensor"
"""The axis of a division over the devices that divide each layer (tp)."""

EXPERT: Final = "expert"
"""The axis of a division over the devices that divide experts (ep)."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A layer of a model.

    ``init(key)`` returns the parameters, in float32. ``apply(params, values)`` returns the values
    for the next layer. Both must be pure. If ``is_random``, ``apply(params, values, keys)`` gets a
    PRNG key for each sample, which depends on the seed, the iteration, the layer and the place of
    the sample in the global batch. Its results then do not depend on the plan. In an evaluation,
    ``keys`` is None: a dropout, for instance, then drops nothing.

    ``divisions`` says which axes of which parameters tensor and expert parallelism divide, e.g.
    ``{"up/kernel": PartitionSpec(None, TENSOR)}``. A name is the path of a parameter, with ``/``
    between keys. What is not named stays whole. Layers with the same functions and divisions count
    as alike: their stages share compiled programs.
    """

    name: str
    init: Callable[[jax.Array], Params]
    apply: Callable[..., Values]
    divisions: Mapping[str, PartitionSpec] = field(default_factory=dict)
    may_begin_stage: bool = True
    """Whether a pipeline may be cut before this layer."""
    is_random: bool = False

    def __post_init__(self) -> None:
        """Check the name. Raises ModelRefused."""
        if not _NAME.fullmatch(self.name):
            raise ModelRefused(
                f"{self.name!r} is not a name of a layer; use letters, digits, '_', '-' and '.'"
            )

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what two layers that are alike have in common."""
        divisions = tuple(sorted((path, tuple(spec)) for path, spec in self.divisions.items()))
        return self.init, self.apply, divisions, self.is_random


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Layers, of which the first gets the inputs of a batch, and the loss of what the last returns.

    ``loss(values, targets)`` returns the mean loss over the samples that it is given, as a scalar.

    ``mixed_samples`` is above 1 if layers or the loss mix samples, e.g. by statistics of a batch or
    by experts with a capacity. They must then mix each group of this many consecutive samples by
    itself. Micro-batches are whole groups, so results do not depend on the plan.

    ``sequence_axis`` is the axis of the values between layers that sequence parallelism divides, or
    None if the values have no sequence.
    """

    layers: tuple[Layer, ...]
    loss: Callable[[Values, Values], jax.Array]
    mixed_samples: int = 1
    sequence_axis: int | None = None

    def __post_init__(self) -> None:
        """Check the model without tracing it. Raises ModelRefused."""
        if not self.layers:
            raise ModelRefused("a model needs at least one layer")
        names = [layer.name for layer in self.layers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ModelRefused(f"two layers have the name {name!r}; give each its own")
        if self.mixed_samples < 1:
            raise ModelRefused("mixed_samples must be at least 1")

    def parameter_shapes(self) -> dict[str, Params]:
        """Return the parameters of each layer as ``jax.ShapeDtypeStruct``.

        Raises:
            ModelRefused: an ``init`` fails, a division names no parameter, or names a wrong axis.
        """
        shapes = {}
        for layer in self.layers:
            shapes[layer.name] = jax.eval_shape(layer.init, jax.random.key(0))
            _check_divisions(layer, dict(named_leaves(shapes[layer.name])))
        return shapes

    def check_plan(self, plan: ExecutionPlan, devices: int, global_batch: int) -> None:
        """Check that the plan fits this model, the devices here, and the job's global batch.

        Raises:
            PlanRefused: it does not; the message says what to change.
        """
        require_supported(plan)
        if plan.layers != len(self.layers):
            raise PlanRefused(
                f"the plan has {plan.layers} layers, but the model has {len(self.layers)}; the job's"
                " workload must name this model"
            )
        if plan.gpus > devices:
            raise PlanRefused(
                f"the plan needs {plan.gpus} devices, but there are {devices}; on CPUs, set"
                f" XLA_FLAGS=--xla_force_host_platform_device_count={plan.gpus}"
            )
        if plan.global_batch != global_batch:
            raise PlanRefused(
                f"the plan has {plan.global_batch} samples in an iteration, but the global batch is"
                f" {global_batch}; a plan never changes the global batch"
            )
        if plan.micro_batch % self.mixed_samples:
            raise PlanRefused(
                f"layers mix groups of {self.mixed_samples} samples, which do not divide the"
                f" micro-batch of {plan.micro_batch}; use a plan with fewer micro-batches"
            )
        for index, stage in enumerate(plan.stages):
            if index and not self.layers[stage.start].may_begin_stage:
                raise PlanRefused(
                    f"stage {index} begins at the layer {self.layers[stage.start].name!r}, where the"
                    " model may not be cut (may_begin_stage); use another plan"
                )
            if stage.sp and self.sequence_axis is None:
                raise PlanRefused(
                    f"stage {index} divides sequences (sp), but the model has no sequence_axis"
                )


def named_leaves(tree: Params) -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf, with ``/`` between keys, and the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _check_divisions(layer: Layer, leaves: Mapping[str, Any]) -> None:
    for path, spec in layer.divisions.items():
        if path not in leaves:
            raise ModelRefused(
                f"layer {layer.name!r} divides {path!r}, but its parameters are {', '.join(leaves)}"
            )
        if len(spec) > leaves[path].ndim:
            raise ModelRefused(
                f"layer {layer.name!r} divides {len(spec)} axes of {path!r}, which has"
                f" {leaves[path].ndim}"
            )
        stated = [axis for axis in spec if axis is not None]
        if len(stated) != len(set(stated)):
            raise ModelRefused(f"layer {layer.name!r} divides two axes of {path!r} over the same")
        for axis in spec:
            if axis not in (None, TENSOR, EXPERT):
                raise ModelRefused(
                    f"layer {layer.name!r} divides {path!r} over {axis!r}; use TENSOR or EXPERT"
                )
