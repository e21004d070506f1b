"""The programs of a pipeline's stage that make its state and that train it with summed gradients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tessera.jax.compiled import Program, ProgramLibrary
from tessera.jax.layouts import StageLayout
from tessera.jax.localpasses import make_parameters
from tessera.jax.models import Layer, Params
from tessera.jax.stageprograms import shardings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """The state of a stage as shapes with shardings, by its layers' places."""

    layers: tuple[Layer, ...]
    layout: StageLayout
    parameters: tuple[Params, ...]
    optimizer: tuple[Any, ...]
    sums: tuple[Params, ...]
    """The summed gradients, in float32."""

    @property
    def key(self) -> Hashable:
        """Return what stages have in common whose states are made alike."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Return the devices in the order of the mesh."""
        return tuple(self.layout.mesh.devices.flat)


def lay_state(
    layers: tuple[Layer, ...],
    layout: StageLayout,
    shapes: dict[str, Params],
    optimizer: optax.GradientTransformation,
) -> StageState:
    """Return the state of a stage's layers, laid on its devices.

    Raises:
        PlanRefused: parameters cannot be divided equally.
    """
    own = [(layer, shapes[layer.name]) for layer in layers]
    return StageState(
        layers=layers,
        layout=layout,
        parameters=tuple(_place(tree, layout.parameters(layer, tree)) for layer, tree in own),
        optimizer=tuple(_lay_optimizer(layer, tree, layout, optimizer) for layer, tree in own),
        sums=tuple(
            _place(tree, layout.gradients(layer, tree), jnp.dtype("float32")) for layer, tree in own
        ),
    )


def compile_update(
    state: StageState,
    optimizer: optax.GradientTransformation,
    library: ProgramLibrary,
    *,
    is_clipped: bool,
) -> Program:
    """Return ``update(parameters, optimizer states, sums, *factor) -> (parameters, states)``."""

    def update(parameters: Any, states: Any, sums: Any, *factor: jax.Array) -> tuple[Any, Any]:
        results = []
        for own, kept, gradients in zip(parameters, states, sums, strict=True):
            if is_clipped:
                gradients = jax.tree.map(lambda x: x * factor[0], gradients)
            changes, after = optimizer.update(gradients, kept, own)
            results.append((optax.apply_updates(own, changes), after))
        return tuple(own for own, _ in results), tuple(after for _, after in results)

    arguments = (state.parameters, state.optimizer, state.sums)
    return library.compile(
        ("update", id(optimizer), len(state.layers), is_clipped),
        update,
        (*arguments, _scalar(state.layout)) if is_clipped else arguments,
        state.devices,
        outputs=shardings_of(arguments[:2]),
        donated=(0, 1),
    )[0]


def compile_squares(state: StageState, library: ProgramLibrary) -> Program:
    """Return ``squares(sums)``, the sum of the squares of a stage's gradients."""

    def add_squares(sums: Any) -> jax.Array:
        return sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(sums)), jnp.zeros(()))

    arguments, outputs = (state.sums,), state.layout.whole()
    return library.compile("squares", add_squares, arguments, state.devices, outputs=outputs)[0]


def compile_factor(
    stages: int, clip_norm: float, layout: StageLayout, library: ProgramLibrary
) -> Program:
    """Return ``factor(squares of each stage)``, by which gradients are clipped.

    Their norm over all layers is then at most ``clip_norm``.
    """

    def find_factor(squares: tuple[jax.Array, ...]) -> jax.Array:
        norm = jnp.sqrt(sum(squares, jnp.zeros(())))
        return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)

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

    ``place`` is its place in the stage. Layers that are alike share the program.
    """
    layer = state.layers[place]

    def start(seed: jax.Array, number: jax.Array) -> tuple[Any, Any]:
        parameters = make_parameters(layer, seed, number)
        return parameters, optimizer.init(parameters)

    number = jax.ShapeDtypeStruct((), jnp.uint32, sharding=state.layout.whole())
    outputs = shardings_of((state.parameters[place], state.optimizer[place]))
    key = ("start", id(optimizer), layer.kind)
    return library.compile(key, start, (number, number), state.devices, outputs=outputs)[0]


def _lay_optimizer(
    layer: Layer, shapes: Params, layout: StageLayout, optimizer: optax.GradientTransformation
) -> Any:
    states = jax.eval_shape(optimizer.init, shapes)
    places = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, place: place,
        states,
        layout.states(layer, shapes),
        transform_non_params=lambda _: layout.whole(),
    )
    return _place(states, places)


def _place(shapes: Any, places: Any, dtype: Any = None) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place),
        shapes,
        places,
    )


def _scalar(layout: StageLayout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.whole())
