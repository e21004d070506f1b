"""The engine of plans with one stage: a single program, which XLA divides over all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.jax.engines import TrainState
from tessera.jax.layouts import DATA, stage_layouts
from tessera.jax.models import Model, Params, Values
from tessera.jax.optimizers import (
    add_squares,
    clip_factor,
    fetch,
    lay_optimizer,
    lay_parameters,
    shardings_of,
    take_steps,
)
from tessera.jax.passes import Draws, initial_key, mean_loss, trace_layers
from tessera.jax.plans import Plan


class WholeEngine:
    """An engine that runs an iteration as one program, on the devices of all hosts.

    Gradients of micro-batches are added up in float32. ZeRO follows from where gradients, states
    and parameters are: XLA then reduces and collects them accordingly.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        devices: Sequence[jax.Device],
        *,
        seed: int,
        clip_norm: float | None = None,
    ) -> None:
        """Lay the state on the devices. Nothing is compiled yet.

        Raises:
            PlanRefused: the plan cannot be laid on these devices.
            ModelRefused: the parameters of a layer cannot be made.
        """
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._seed, self._clip_norm = seed, clip_norm
        (self._layout,) = stage_layouts(plan, devices, model.sequence_axis)
        shapes = model.parameter_shapes()
        self._shapes = TrainState(
            parameters={
                layer.name: lay_parameters(layer, shapes[layer.name], self._layout, plan)
                for layer in model.layers
            },
            optimizer={
                layer.name: lay_optimizer(layer, shapes[layer.name], self._layout, optimizer, plan)
                for layer in model.layers
            },
        )
        self._places = shardings_of(self._shapes)
        self._gradients = tuple(
            self._layout.gradients(layer, shapes[layer.name]) for layer in model.layers
        )
        self._steps = tuple(
            self._layout.states(layer, shapes[layer.name]) for layer in model.layers
        )
        self._batches = NamedSharding(self._layout.mesh, PartitionSpec(None, DATA))
        self._numbers = np.arange(len(model.layers), dtype=np.uint32)
        self._run = trace_layers(model.layers, self._layout, plan, seed)
        whole = self._layout.whole()
        self._train = jax.jit(
            self._train_iteration,
            in_shardings=(self._places, self._batches, self._batches, whole),
            out_shardings=(self._places, whole),
            donate_argnums=0,
        )
        self._judge = jax.jit(
            self._judge_batch,
            in_shardings=(self._places.parameters, self._batches, self._batches),
            out_shardings=whole,
        )

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self._plan

    def initial_state(self, seed: int) -> TrainState:
        """Return the state before the first iteration, in its place. It is the same for every plan."""
        names = [layer.name for layer in self._model.layers]

        def start(seed: jax.Array) -> TrainState:
            parameters = {
                layer.name: layer.init(initial_key(seed, number))
                for number, layer in enumerate(self._model.layers)
            }
            states = {name: self._optimizer.init(parameters[name]) for name in names}
            return TrainState(parameters, states)

        state: TrainState = jax.jit(start, out_shardings=self._places)(np.uint32(seed))
        return state

    def state_shapes(self) -> TrainState:
        """Return the state as ``jax.ShapeDtypeStruct`` with shardings, onto which it is restored."""
        return self._shapes

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        """Train an iteration. Return the new state and the mean loss, a float32 scalar.

        The arrays are those of the global batch, of shape (samples, ...), the same on all hosts.
        """
        after, loss = self._train(
            state, self._send(inputs), self._send(targets), np.uint32(iteration)
        )
        return after, loss

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        """Return the mean loss of a global batch without training, a float32 scalar."""
        loss: jax.Array = self._judge(state.parameters, self._send(inputs), self._send(targets))
        return loss

    def _send(self, batch: Values) -> Values:
        """Return a batch on the devices, of shape (micro-batches, samples of one, ...)."""
        plan, places = self._plan, self._batches

        def send(array: Any) -> jax.Array:
            parts = np.reshape(array, (plan.accumulation, plan.micro_batch, *array.shape[1:]))
            if jax.process_count() == 1:
                placed: jax.Array = jax.device_put(parts, places)
                return placed
            sent: jax.Array = jax.make_array_from_callback(
                parts.shape, places, lambda at: parts[at]
            )
            return sent

        return jax.tree.map(send, batch)

    def _train_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """Return the state after an iteration, and the loss. It is traced by JAX."""
        names = [layer.name for layer in self._model.layers]
        placed = fetch(state, self._shapes)
        parameters = tuple(placed.parameters[name] for name in names)
        states = tuple(placed.optimizer[name] for name in names)
        loss, gradients = self._add_gradients(parameters, inputs, targets, iteration)
        factor = None
        if self._clip_norm is not None:
            factor = clip_factor(add_squares(gradients), self._clip_norm)
        if self._plan.zero:
            gradients = jax.lax.with_sharding_constraint(gradients, self._steps)
        parameters, states = take_steps(self._optimizer, parameters, states, gradients, factor)
        after = TrainState(
            dict(zip(names, parameters, strict=True)), dict(zip(names, states, strict=True))
        )
        return after, loss

    def _add_gradients(
        self, parameters: tuple[Params, ...], inputs: Values, targets: Values, iteration: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Return the mean loss and its gradients, over all micro-batches."""
        plan = self._plan

        def find_loss(own: tuple[Params, ...], x: Values, y: Values, first: jax.Array) -> jax.Array:
            draws = Draws(iteration, first, jnp.asarray(self._numbers))
            return mean_loss(self._model.loss, self._run(own, x, draws), y)

        def add_part(sums: Any, part: Any) -> tuple[Any, None]:
            loss, gradients = jax.value_and_grad(find_loss)(parameters, *part)
            gradients = jax.lax.with_sharding_constraint(gradients, self._gradients)
            return jax.tree.map(jnp.add, sums, (loss, gradients)), None

        firsts = jnp.arange(plan.accumulation, dtype=jnp.uint32) * np.uint32(plan.micro_batch)
        if plan.accumulation == 1:
            part = jax.tree.map(lambda leaf: leaf[0], (inputs, targets, firsts))
            loss, gradients = jax.value_and_grad(find_loss)(parameters, *part)
            return loss, jax.lax.with_sharding_constraint(gradients, self._gradients)
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        start = jnp.zeros((), jnp.float32), jax.lax.with_sharding_constraint(zeros, self._gradients)
        sums, _ = jax.lax.scan(add_part, start, (inputs, targets, firsts))
        loss, gradients = jax.tree.map(lambda leaf: leaf / plan.accumulation, sums)
        return loss, gradients

    def _judge_batch(
        self, parameters: dict[str, Params], inputs: Values, targets: Values
    ) -> jax.Array:
        """Return the mean loss of a batch. It is traced by JAX."""
        placed = fetch(parameters, self._shapes.parameters)
        own = tuple(placed[layer.name] for layer in self._model.layers)

        def judge_part(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            x, y = part
            return total + mean_loss(self._model.loss, self._run(own, x, None), y), None

        zero = jnp.zeros((), jnp.float32)
        total, _ = jax.lax.scan(judge_part, zero, (inputs, targets))
        mean: jax.Array = total / self._plan.accumulation
        return mean
