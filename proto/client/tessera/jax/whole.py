"""Plans of one stage: one program on all devices, on any number of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.jax.engines import TrainState
from tessera.jax.errors import PlanRefused
from tessera.jax.layouts import DATA, stage_layouts
from tessera.jax.models import Model, Params, Values
from tessera.jax.optimizers import (
    add_squares,
    clip_factor,
    lay_parameters,
    lay_states,
    update_layer,
)
from tessera.jax.passes import Draws, make_parameters, measure_loss, trace_layers
from tessera.jax.plans import Plan
from tessera.jax.purity import check_functions


class WholeEngine:
    """An engine for plans of one stage.

    An iteration is one compiled program, and all shardings are stated, so JAX adds no step of its
    own. The devices may belong to several processes, of which each runs the same calls.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        devices: Sequence[jax.Device],
        *,
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        if len(plan.stages) != 1:
            raise PlanRefused(f"the plan has {len(plan.stages)} stages; use a PipelineEngine")
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._clip_norm = clip_norm
        (self._layout,) = stage_layouts(plan, devices, model.sequence_axis)
        self._pass = trace_layers(model.layers, self._layout, plan, seed)
        self._shapes = model.parameter_shapes()
        self._state = TrainState(
            {x.name: lay_parameters(x, self._shapes[x.name], self._layout) for x in model.layers},
            {
                x.name: lay_states(optimizer, x, self._shapes[x.name], self._layout)
                for x in model.layers
            },
        )
        self._is_random = any(layer.is_random for layer in model.layers)
        self._batch_place = self._place_batch()
        self._train = self._compile(self._train_batch, is_training=True)
        self._evaluate = self._compile(self._evaluate_batch, is_training=False)

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self._plan

    def initial_state(self, seed: int) -> TrainState:
        """Return the state before the first iteration, in its place. It is the same for every plan."""
        places = _shardings_of(self._state)
        start = jax.jit(
            self._make_state, in_shardings=self._layout.whole(), out_shardings=_on_device(places)
        )
        state = start(np.uint32(seed))
        is_moved = self._plan.offload != "none"
        return jax.device_put(state, places) if is_moved else state

    def state_shapes(self) -> TrainState:
        """Return the state as ``jax.ShapeDtypeStruct`` with shardings, onto which it is restored."""
        return self._state

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        """Train an iteration. Return the new state and the mean loss, a float32 scalar.

        ``inputs`` and ``targets`` are NumPy arrays of the global batch, in the order of samples. On
        several hosts, each host gives all of them. The old state must not be used again.
        """
        batch = self._send((inputs, targets))
        if self._is_random:
            return self._train(state, batch, np.uint32(iteration))
        return self._train(state, batch)

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        """Return the mean loss of a global batch without training, a float32 scalar."""
        loss: jax.Array = self._evaluate(state.parameters, self._send((inputs, targets)))
        return loss

    def _place_batch(self) -> NamedSharding:
        """Return the sharding of a batch, whose first axis are micro-batches if there are several."""
        if self._plan.accumulation == 1:
            return self._layout.samples()
        return NamedSharding(self._layout.mesh, PartitionSpec(None, DATA))

    def _compile(self, function: Callable[..., Any], *, is_training: bool) -> Callable[..., Any]:
        """Return the program of an iteration or an evaluation, compiled when a batch arrives."""
        state, whole = _shardings_of(self._state), self._layout.whole()
        if not is_training:
            places = (state.parameters, self._batch_place)
            return jax.jit(function, in_shardings=places, out_shardings=whole)
        iteration = (whole,) if self._is_random else ()
        return jax.jit(
            function,
            in_shardings=(state, self._batch_place, *iteration),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def _send(self, batch: Any) -> Any:
        """Return a global batch on the devices. Each device gets its own samples only."""
        leaves, structure = jax.tree.flatten(batch)
        sent = [self._split(leaf) for leaf in leaves]
        place = self._batch_place
        if place.is_fully_addressable:
            return jax.tree.unflatten(structure, jax.device_put(sent, place))
        arrays = [
            jax.make_array_from_callback(leaf.shape, place, leaf.__getitem__) for leaf in sent
        ]
        return jax.tree.unflatten(structure, arrays)

    def _split(self, leaf: Any) -> Any:
        """Return an array of the global batch, by micro-batches if there are several."""
        plan = self._plan
        if leaf.shape[0] != plan.global_batch:
            raise PlanRefused(
                f"the batch has {leaf.shape[0]} samples, but the plan's iterations have"
                f" {plan.global_batch}; give whole global batches"
            )
        if plan.accumulation == 1:
            return leaf
        return leaf.reshape(plan.accumulation, plan.micro_batch, *leaf.shape[1:])

    def _make_state(self, seed: jax.Array) -> TrainState:
        parameters = {
            layer.name: make_parameters(layer, seed, np.uint32(number))
            for number, layer in enumerate(self._model.layers)
        }
        states = {name: self._optimizer.init(own) for name, own in parameters.items()}
        return TrainState(parameters, states)

    def _train_batch(
        self, state: TrainState, batch: Any, iteration: jax.Array | None = None
    ) -> tuple[TrainState, jax.Array]:
        self._check(batch)
        if self._plan.offload != "none":
            state = jax.device_put(state, _on_device(_shardings_of(self._state)))
        loss, gradients = self._add_gradients(state.parameters, batch, iteration)
        new = self._update(state, gradients)
        if self._plan.offload != "none":
            new = jax.device_put(new, _shardings_of(self._state))
        return new, loss

    def _add_gradients(
        self, parameters: dict[str, Params], batch: Any, iteration: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Params]]:
        """Return the mean loss and its gradients over all micro-batches."""
        parts = self._plan.accumulation
        differentiate = jax.value_and_grad(self._measure)
        if parts == 1:
            loss, gradients = differentiate(parameters, batch, self._draws(iteration, 0))
            return loss, self._place_gradients(gradients)

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            micro_batch, first = part
            draws = self._draws(iteration, first)
            loss, gradients = differentiate(parameters, micro_batch, draws)
            added = jax.tree.map(jnp.add, sums, (loss, self._place_gradients(gradients)))
            return (added[0], self._place_gradients(added[1])), None

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        firsts = np.arange(parts, dtype=np.uint32) * np.uint32(self._plan.micro_batch)
        start = (jnp.zeros((), jnp.float32), self._place_gradients(zeros))
        (loss, gradients), _ = jax.lax.scan(add, start, (batch, firsts))
        return loss / parts, jax.tree.map(lambda leaf: leaf / parts, gradients)

    def _update(self, state: TrainState, gradients: dict[str, Params]) -> TrainState:
        """Return the state after the optimizer. Under ZeRO, each replica updates its part."""
        factor = None
        if self._clip_norm is not None:
            factor = clip_factor([add_squares(gradients)], self._clip_norm)
        parameters, states = {}, {}
        for layer in self._model.layers:
            own, change = state.parameters[layer.name], gradients[layer.name]
            if self._plan.zero:
                places = _on_device(self._layout.states(layer, own))
                own = jax.lax.with_sharding_constraint(own, places)
                change = jax.lax.with_sharding_constraint(change, places)
            parameters[layer.name], states[layer.name] = update_layer(
                self._optimizer, own, change, state.optimizer[layer.name], factor
            )
        return TrainState(parameters, states)

    def _evaluate_batch(self, parameters: dict[str, Params], batch: Any) -> jax.Array:
        self._check(batch)
        if self._plan.offload == "parameters":
            places = _shardings_of(self._state.parameters)
            parameters = jax.device_put(parameters, _on_device(places))
        if self._plan.accumulation == 1:
            return self._measure(parameters, batch, ())

        def add(total: jax.Array, micro_batch: Any) -> tuple[jax.Array, None]:
            return total + self._measure(parameters, micro_batch, ()), None

        total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), batch)
        mean: jax.Array = total / self._plan.accumulation
        return mean

    def _measure(self, parameters: dict[str, Params], batch: Any, draws: Draws) -> jax.Array:
        """Return the mean loss of a micro-batch."""
        inputs, targets = batch
        own = tuple(parameters[layer.name] for layer in self._model.layers)
        return measure_loss(self._model.loss, self._pass(own, inputs, draws), targets)

    def _draws(self, iteration: jax.Array | None, first: Any) -> Draws:
        if iteration is None:
            return ()
        numbers = np.arange(len(self._model.layers), dtype=np.uint32)
        return iteration, jnp.asarray(first, jnp.uint32), numbers

    def _place_gradients(self, gradients: dict[str, Params]) -> dict[str, Params]:
        places = {
            layer.name: self._layout.gradients(layer, gradients[layer.name])
            for layer in self._model.layers
        }
        return jax.lax.with_sharding_constraint(gradients, places)

    def _check(self, batch: Any) -> None:
        """Check the model's functions on a micro-batch. This runs while a program is traced."""
        skipped = int(self._plan.accumulation > 1)
        inputs, targets = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[skipped:], leaf.dtype), batch
        )
        check_functions(self._model, inputs, targets)


def _shardings_of(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _on_device(places: Any) -> Any:
    """Return shardings in the devices' own memory."""

    def move(place: NamedSharding) -> NamedSharding:
        return NamedSharding(place.mesh, place.spec)

    return jax.tree.map(move, places)
