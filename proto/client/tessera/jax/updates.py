"""The programs of a pipeline's stage that make its state, and that update it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from tessera.jax.compiled import Program, ProgramLibrary
from tessera.jax.engines import TrainState
from tessera.jax.layouts import StageLayout
from tessera.jax.models import Layer, Params
from tessera.jax.optimizers import (
    HOST_MEMORY,
    add_squares,
    clip_factor,
    fetch,
    lay_optimizer,
    lay_parameters,
    place_shapes,
    shardings_of,
    take_steps,
)
from tessera.jax.passes import initial_key
from tessera.plans import ExecutionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """The state of a stage as shapes with shardings, by its layers' places."""

    layers: tuple[Layer, ...]
    layout: StageLayout
    parameters: tuple[Params, ...]
    optimizer: tuple[Any, ...]
    sums: tuple[Params, ...]
    """The summed gradients, in float32."""
    casts: bool
    """Whether the stage computes in bfloat16."""

    @property
    def key(self) -> Hashable:
        """Return what stages have in common whose states are made and updated alike."""
        layout = self.layout
        return (
            tuple(layer.kind for layer in self.layers),
            (layout.stage.dp, layout.stage.tp, layout.stage.ep, layout.stage.sp, layout.zero),
        )

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Return the devices in the order of the mesh."""
        return tuple(self.layout.mesh.devices.flat)

    def computing(self) -> tuple[Params, ...]:
        """Return the shapes of the parameters as the stage computes with them."""
        shapes: tuple[Params, ...] = move_to_devices(self.parameters)
        if not self.casts:
            return shapes
        cast: tuple[Params, ...] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding),
            shapes,
        )
        return cast


class PipelineUpdate:
    """The programs of all stages before and after the passes of an iteration."""

    def __init__(
        self,
        states: Sequence[StageState],
        optimizer: optax.GradientTransformation,
        clip_norm: float | None,
        library: ProgramLibrary,
    ) -> None:
        self._states = tuple(states)
        is_clipped = clip_norm is not None
        self._updates = [
            _compile_update(state, optimizer, library, is_clipped=is_clipped) for state in states
        ]
        self._casts = [_compile_cast(state, library) for state in states if state.casts]
        self._squares = [_compile_squares(state, library) for state in states if is_clipped]
        if clip_norm is not None:
            layout = states[0].layout
            self._factor = _compile_factor(len(states), clip_norm, layout, library)

    def prepare(self, parameters: list[tuple[Params, ...]]) -> list[tuple[Params, ...]]:
        """Return the parameters of each stage with which an iteration computes."""
        if not self._casts:
            return parameters
        return [cast(own) for cast, own in zip(self._casts, parameters, strict=True)]

    def run(
        self, state: TrainState, parameters: Sequence[tuple[Params, ...]], sums: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Return the new parameters and optimizer states of each stage, in their places."""
        factors = self._find_factors(sums)
        results = []
        for index, shapes in enumerate(self._states):
            kept = tuple(state.optimizer[layer.name] for layer in shapes.layers)
            own, kept = self._updates[index](
                parameters[index], fetch(kept, shapes.optimizer), sums[index], *factors[index]
            )
            results.append((send_back(own, shapes.parameters), send_back(kept, shapes.optimizer)))
        return results

    def _find_factors(self, sums: Sequence[Any]) -> list[tuple[jax.Array, ...]]:
        """Return what clips the gradients of each stage: nothing, or the same factor for all."""
        if not self._squares:
            return [()] * len(self._states)
        first = self._states[0].layout.whole()
        squares = [square(own) for square, own in zip(self._squares, sums, strict=True)]
        factor = self._factor(tuple(jax.device_put(squares, first)))
        return [(jax.device_put(factor, state.layout.whole()),) for state in self._states]


def lay_state(
    layers: tuple[Layer, ...],
    layout: StageLayout,
    shapes: dict[str, Params],
    optimizer: optax.GradientTransformation,
    plan: ExecutionPlan,
) -> StageState:
    """Return the state of a stage's layers, laid on its devices.

    Raises:
        PlanRefused: parameters cannot be divided equally.
    """
    own = [(layer, shapes[layer.name]) for layer in layers]
    return StageState(
        layers=layers,
        layout=layout,
        parameters=tuple(lay_parameters(layer, tree, layout, plan) for layer, tree in own),
        optimizer=tuple(lay_optimizer(layer, tree, layout, optimizer, plan) for layer, tree in own),
        sums=tuple(place_shapes(tree, layout.gradients(layer, tree)) for layer, tree in own),
        casts=plan.precision == "bf16",
    )


def move_to_devices(shapes: Any) -> Any:
    """Return shapes with shardings in the devices' own memory."""

    def move(place: NamedSharding) -> NamedSharding:
        return place.with_memory_kind("device") if _is_on_host(place) else place

    return place_shapes(shapes, jax.tree.map(move, shardings_of(shapes)))


def send_back(arrays: Any, shapes: Any) -> Any:
    """Return arrays where their shapes say, i.e. in the host's memory where they are offloaded."""
    places = shardings_of(shapes)
    is_offloaded = any(_is_on_host(place) for place in jax.tree.leaves(places))
    return jax.device_put(arrays, places) if is_offloaded else arrays


def _compile_update(
    state: StageState,
    optimizer: optax.GradientTransformation,
    library: ProgramLibrary,
    *,
    is_clipped: bool,
) -> Program:
    """Return ``update(parameters, optimizer states, sums, *factor) -> (parameters, states)``.

    All are in the memory of the devices.
    """
    layout = state.layout

    def update(parameters: Any, states: Any, sums: Any, *factor: jax.Array) -> tuple[Any, Any]:
        return take_steps(optimizer, state.layers, layout, parameters, states, sums, *factor)

    arguments = move_to_devices((state.parameters, state.optimizer, state.sums))
    return library.compile(
        ("update", id(optimizer), state.key, is_clipped),
        update,
        (*arguments, _scalar(layout)) if is_clipped else arguments,
        state.devices,
        outputs=shardings_of(arguments[:2]),
        donated=(0, 1),
    )[0]


def _compile_cast(state: StageState, library: ProgramLibrary) -> Program:
    """Return ``cast(parameters)``, which are in bfloat16 for the computations of an iteration.

    Without it, each micro-batch in flight would keep a copy of the parameters in this type.
    """

    def cast(parameters: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), parameters)

    shapes = move_to_devices(state.parameters)
    outputs = shardings_of(shapes)
    return library.compile("cast", cast, (shapes,), state.devices, outputs=outputs)[0]


def _compile_squares(state: StageState, library: ProgramLibrary) -> Program:
    """Return ``squares(sums)``, the sum of the squares of a stage's gradients."""
    arguments, outputs = (state.sums,), state.layout.whole()
    return library.compile("squares", add_squares, arguments, state.devices, outputs=outputs)[0]


def _compile_factor(
    stages: int, clip_norm: float, layout: StageLayout, library: ProgramLibrary
) -> Program:
    """Return ``factor(squares of each stage)``, by which all gradients are multiplied."""

    def find_factor(squares: tuple[jax.Array, ...]) -> jax.Array:
        return clip_factor(sum(squares, jnp.zeros((), jnp.float32)), clip_norm)

    return library.compile(
        ("factor", clip_norm),
        find_factor,
        ((_scalar(layout),) * stages,),
        tuple(layout.mesh.devices.flat),
        outputs=layout.whole(),
    )[0]


def compile_start(
    state: StageState, place: int, optimizer: optax.GradientTransformation, library: ProgramLibrary
) -> Program:
    """Return ``start(seed, number of the layer) -> (parameters, optimizer state)`` of a layer.

    ``place`` is its place in the stage. Layers that are alike share the program. The results are in
    the memory of the devices.
    """
    layer = state.layers[place]

    def start(seed: jax.Array, number: jax.Array) -> tuple[Any, Any]:
        parameters = layer.init(initial_key(seed, number))
        return parameters, optimizer.init(parameters)

    number = jax.ShapeDtypeStruct((), jnp.uint32, sharding=state.layout.whole())
    outputs = shardings_of(move_to_devices((state.parameters[place], state.optimizer[place])))
    key = ("start", id(optimizer), layer.kind)
    return library.compile(key, start, (number, number), state.devices, outputs=outputs)[0]


def _is_on_host(place: NamedSharding) -> bool:
    return place.memory_kind == HOST_MEMORY


def _scalar(layout: StageLayout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.whole())
