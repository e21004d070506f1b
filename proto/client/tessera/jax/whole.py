"""Plans of one stage: one program on all devices, on any number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.jax.engines import OptimizerState, TrainState
from tessera.jax.errors import PlanRefused
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
from tessera.plans import ExecutionPlan


class WholeEngine:
    """An engine for plans of one stage.

    An iteration is one compiled program, and all shardings are stated, so JAX adds no step of its
    own. The devices may belong to several processes, of which each runs the same calls.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        plan: ExecutionPlan,
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
        self._clip_norm = clip_norm
        (self._layout,) = stage_layouts(plan, devices, model.sequence_axis)
        self._run = trace_layers(model.layers, self._layout, plan, seed, frees_results=True)
        self._shapes = self._lay_state(model.parameter_shapes())
        self._places = shardings_of(self._shapes)
        self._is_random = any(layer.is_random for layer in model.layers)
        self._batch_place = self._place_batch()
        whole = self._layout.whole()
        iteration = (whole,) if self._is_random else ()
        self._train = jax.jit(
            self._train_batch,
            in_shardings=(self._places, self._batch_place, *iteration),
            out_shardings=(self._places, whole),
            donate_argnums=0,
        )
        self._evaluate = jax.jit(
            self._evaluate_batch,
            in_shardings=(self._places.parameters, self._batch_place),
            out_shardings=whole,
        )

    @property
    def plan(self) -> ExecutionPlan:
        """Return the plan."""
        return self._plan

    def initial_state(self, seed: int) -> TrainState:
        """Return the state before the first iteration, in its place. It is the same for every plan."""
        state: TrainState = jax.jit(
            self._make_state, in_shardings=self._layout.whole(), out_shardings=self._places
        )(np.uint32(seed))
        return state

    def state_shapes(self) -> TrainState:
        """Return the state as ``jax.ShapeDtypeStruct`` with shardings, onto which it is restored."""
        return self._shapes

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        """Train an iteration. Return the new state and the mean loss, a float32 scalar.

        ``inputs`` and ``targets`` are NumPy arrays of the global batch, in the order of samples. On
        several hosts, each host gives all of them. The old state must not be used again.
        """
        batch = self._send((inputs, targets))
        numbers = (np.uint32(iteration),) if self._is_random else ()
        after, loss = self._train(state, batch, *numbers)
        return after, loss

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        """Return the mean loss of a global batch without training, a float32 scalar."""
        loss: jax.Array = self._evaluate(state.parameters, self._send((inputs, targets)))
        return loss

    def _lay_state(self, shapes: dict[str, Params]) -> TrainState:
        """Return the state as shapes with shardings."""
        parameters, states = {}, {}
        for layer in self._model.layers:
            own = shapes[layer.name]
            parameters[layer.name] = lay_parameters(layer, own, self._layout, self._plan)
            states[layer.name] = lay_optimizer(
                layer, own, self._layout, self._optimizer, self._plan
            )
        return TrainState(parameters, states)

    def _place_batch(self) -> NamedSharding:
        """Return the sharding of a batch, whose first axis are micro-batches if there are several."""
        if self._plan.accumulation == 1:
            return self._layout.samples()
        return NamedSharding(self._layout.mesh, PartitionSpec(None, DATA))

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
            layer.name: layer.init(initial_key(seed, number))
            for number, layer in enumerate(self._model.layers)
        }
        states = {name: self._optimizer.init(own) for name, own in parameters.items()}
        return TrainState(parameters, states)

    def _train_batch(
        self, state: TrainState, batch: Any, iteration: jax.Array | None = None
    ) -> tuple[TrainState, jax.Array]:
        state = fetch(state, self._shapes)
        names = [layer.name for layer in self._model.layers]
        parameters = tuple(state.parameters[name] for name in names)
        states = tuple(state.optimizer[name] for name in names)
        loss, gradients = self._add_gradients(parameters, batch, iteration)
        parameters, states = self._update(parameters, states, gradients)
        after = TrainState(
            dict(zip(names, parameters, strict=True)), dict(zip(names, states, strict=True))
        )
        return after, loss

    def _add_gradients(
        self, parameters: tuple[Params, ...], batch: Any, iteration: jax.Array | None
    ) -> tuple[jax.Array, tuple[Params, ...]]:
        """Return the mean loss and its gradients over all micro-batches."""
        parts = self._plan.accumulation

        def differentiate(micro_batch: Any, first: Any) -> tuple[jax.Array, tuple[Params, ...]]:
            draws = self._draws(iteration, first)
            loss, gradients = jax.value_and_grad(self._measure)(parameters, micro_batch, draws)
            return loss, self._place_gradients(gradients)

        if parts == 1:
            return differentiate(batch, np.uint32(0))

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiate(*part)), None

        zeros = self._place_gradients(jax.tree.map(jnp.zeros_like, parameters))
        firsts = np.arange(parts, dtype=np.uint32) * np.uint32(self._plan.micro_batch)
        sums, _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), (batch, firsts))
        loss, gradients = jax.tree.map(lambda leaf: leaf / parts, sums)
        return loss, gradients

    def _update(
        self,
        parameters: tuple[Params, ...],
        states: tuple[OptimizerState, ...],
        gradients: tuple[Params, ...],
    ) -> tuple[tuple[Params, ...], tuple[OptimizerState, ...]]:
        """Return the parameters and states after a step."""
        factor = None
        if self._clip_norm is not None:
            factor = clip_factor(add_squares(gradients), self._clip_norm)
        layers, layout = self._model.layers, self._layout
        return take_steps(self._optimizer, layers, layout, parameters, states, gradients, factor)

    def _evaluate_batch(self, parameters: dict[str, Params], batch: Any) -> jax.Array:
        parameters = fetch(parameters, self._shapes.parameters)
        own = tuple(parameters[layer.name] for layer in self._model.layers)
        if self._plan.accumulation == 1:
            return self._measure(own, batch, None)

        def add(total: jax.Array, micro_batch: Any) -> tuple[jax.Array, None]:
            return total + self._measure(own, micro_batch, None), None

        total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), batch)
        mean: jax.Array = total / self._plan.accumulation
        return mean

    def _measure(
        self, parameters: tuple[Params, ...], batch: Any, draws: Draws | None
    ) -> jax.Array:
        """Return the mean loss of a micro-batch."""
        inputs, targets = batch
        return mean_loss(self._model.loss, self._run(parameters, inputs, draws), targets)

    def _draws(self, iteration: jax.Array | None, first: Any) -> Draws | None:
        if iteration is None:
            return None
        numbers = jnp.arange(len(self._model.layers), dtype=jnp.uint32)
        return Draws(iteration, jnp.asarray(first, jnp.uint32), numbers)

    def _place_gradients(self, gradients: tuple[Params, ...]) -> tuple[Params, ...]:
        own = zip(self._model.layers, gradients, strict=True)
        places = tuple(self._layout.gradients(layer, leaves) for layer, leaves in own)
        placed: tuple[Params, ...] = jax.lax.with_sharding_constraint(gradients, places)
        return placed
