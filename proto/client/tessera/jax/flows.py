"""How values flow through a pipeline: shapes between stages, and where they are on both sides."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.jax.layouts import StageLayout
from tessera.jax.models import Values


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
