"""What runs a plan: the interface of engines, and the state that they train."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

from tessera.jax.models import Params, Values
from tessera.plans import ExecutionPlan

OptimizerState: TypeAlias = Any


class TrainState(NamedTuple):
    """What training changes, by names of layers, so that any plan reads any other's.

    The optimizer is applied layer by layer, so each layer has a state of its own.
    """

    parameters: dict[str, Params]
    optimizer: dict[str, OptimizerState]


class Engine(Protocol):
    """A model, an optimizer and a plan on devices."""

    @property
    def plan(self) -> ExecutionPlan:
        """Return the plan."""
        ...

    def initial_state(self, seed: int) -> TrainState:
        """Return the state before the first iteration, in its place. It is the same for every plan."""
        ...

    def state_shapes(self) -> TrainState:
        """Return the state as ``jax.ShapeDtypeStruct`` with shardings, onto which it is restored."""
        ...

    def run_iteration(
        self, state: TrainState, inputs: Values, targets: Values, iteration: int
    ) -> tuple[TrainState, jax.Array]:
        """Train an iteration. Return the new state and the mean loss, a float32 scalar.

        ``inputs`` and ``targets`` are NumPy arrays of the global batch, in the order of samples. On
        several hosts, each host gives all of them. The old state must not be used again.
        """
        ...

    def evaluate(self, state: TrainState, inputs: Values, targets: Values) -> jax.Array:
        """Return the mean loss of a global batch without training, a float32 scalar."""
        ...
