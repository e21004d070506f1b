"""How values flow through a pipeline: where they are between stages, and passes that send them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.jax.compiled import Program
from tessera.jax.layouts import StageLayout
from tessera.jax.models import Values
from tessera.jax.passes import Draws
from tessera.jax.stageprograms import StagePrograms, StageTrace


def place_values(sender: StageLayout, receiver: StageLayout, shapes: Values) -> tuple[Any, Any]:
    """Return the shardings of values where they leave a stage, and where they reach another.

    Both have the same pieces, so that each device of the receiver gets its piece from a device of
    the sender, and no piece goes through the host. Stages that divide alike send what they have.
    Others send as many pieces as both numbers of replicas allow, and divide them further on arrival.
    """
    if sender.divides_as(receiver):
        return sender.values(shapes), receiver.values(shapes)
    pieces = math.gcd(sender.stage.dp, receiver.stage.dp)
    leaving, arriving = _place_pieces(sender, pieces), _place_pieces(receiver, pieces)
    return jax.tree.map(lambda _: leaving, shapes), jax.tree.map(lambda _: arriving, shapes)


def _place_pieces(layout: StageLayout, pieces: int) -> NamedSharding:
    devices = layout.mesh.devices.reshape(pieces, -1)
    return NamedSharding(Mesh(devices, ("pieces", "copies")), PartitionSpec("pieces"))


def micro_shapes(batch: Values, samples: int) -> Values:
    """Return the shapes of a micro-batch of a global batch."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (samples, *np.shape(leaf)[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """All stages for one shape of micro-batches."""

    traces: tuple[StageTrace, ...]
    programs: tuple[StagePrograms, ...]
    evaluations: list[Program]
    """The programs of ``evaluate``, compiled when they are first needed."""
    values: tuple[Any, ...]
    """Where the values of each stage go."""
    gradients: tuple[Any, ...]
    """Where the gradients of each stage's results go. The last stage has none."""
    targets: Any
    """Where targets go."""
    samples: int
    """The samples of a micro-batch."""

    def take(self, batch: Values, micro_batch: int, places: Any) -> Values:
        """Return a micro-batch of the global batch, on its way to its places."""
        begin, end = micro_batch * self.samples, (micro_batch + 1) * self.samples
        return jax.device_put(jax.tree.map(lambda leaf: leaf[begin:end], batch), places)


@dataclass(slots=True, kw_only=True)
class Iteration:
    """The passes of an iteration, and what is between them, by stages and micro-batches."""

    flow: Flow
    parameters: list[Any]
    sums: list[Any]
    values: dict[tuple[int, int], Any] = field(default_factory=dict)
    residuals: dict[tuple[int, int], Any] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Any] = field(default_factory=dict)

    def start_forward(
        self, stage: int, micro_batch: int, draws: Draws | None, inputs: Values
    ) -> None:
        """Start a forward pass, and send its results on. The last stage's waits for its backward."""
        flow, programs, place = self.flow, self.flow.programs[stage], (stage, micro_batch)
        if not stage:
            self.values[place] = flow.take(inputs, micro_batch, flow.values[0])
        if programs.forward is None:
            return
        keep = self.values.__getitem__ if programs.keeps_values else self.values.pop
        results, self.residuals[place] = programs.forward(
            self.parameters[stage], keep(place), draws
        )
        self.values[stage + 1, micro_batch] = jax.device_put(results, flow.values[stage + 1])

    def start_backward(
        self, stage: int, micro_batch: int, draws: Draws | None, targets: Values
    ) -> None:
        """Start a backward pass, and send gradients back. Nothing of the micro-batch is kept."""
        flow, programs, place = self.flow, self.flow.programs[stage], (stage, micro_batch)
        own, values = self.parameters[stage], self.values.pop(place, ())
        given: tuple[Any, ...]
        if programs.forward is None:
            given = (own, values, draws, flow.take(targets, micro_batch, flow.targets))
        else:
            given = (self.residuals.pop(place), own, values, self.gradients.pop(place))
        self.sums[stage], of_values = programs.backward(self.sums[stage], *given)
        if stage:
            places = flow.gradients[stage - 1]
            self.gradients[stage - 1, micro_batch] = jax.device_put(of_values, places)
