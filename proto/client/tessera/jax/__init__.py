"""Training programs in JAX that can run any execution plan.

A model is a list of layers, which are pure functions with names. Everything about devices follows
from the plan that Tessera has chosen for this start:

    import optax
    from jax.sharding import PartitionSpec
    from tessera.jax import TENSOR, Layer, Model, train

    layers = (
        Layer(name="embedding", init=init_embedding, apply=embed),
        *(
            Layer(name=f"block_{i}", init=init_block, apply=block,
                  divisions={"up": PartitionSpec(None, TENSOR), "down": PartitionSpec(TENSOR)})
            for i in range(12)
        ),
        Layer(name="head", init=init_head, apply=head),
    )
    train(
        Model(layers=layers, loss=cross_entropy), optax.adamw(1e-3),
        load=load_samples, samples=1_000_000, iterations=10_000, batch=256,
    )

docs/training-jax.md explains all of it. The module needs jax, optax and orbax-checkpoint, and
of Tessera ``tessera.plans`` and ``tessera.progress`` alone. Importing it starts no devices.
"""

from __future__ import annotations

from tessera.jax.build import build_engine
from tessera.jax.checkpoints import load_checkpoint, save_checkpoint
from tessera.jax.engines import Engine, TrainState
from tessera.jax.errors import (
    CheckpointRefused,
    LossNotFinite,
    ModelRefused,
    PlanRefused,
    TrainingError,
)
from tessera.jax.layouts import constrain
from tessera.jax.models import EXPERT, TENSOR, Layer, Model
from tessera.jax.plans import read_plan
from tessera.jax.samples import SampleOrder
from tessera.jax.training import Data, Training, train
from tessera.plans import ExecutionPlan, PlanStage

__all__ = [
    "EXPERT",
    "TENSOR",
    "CheckpointRefused",
    "Data",
    "Engine",
    "ExecutionPlan",
    "Layer",
    "LossNotFinite",
    "Model",
    "ModelRefused",
    "PlanRefused",
    "PlanStage",
    "SampleOrder",
    "TrainState",
    "Training",
    "TrainingError",
    "build_engine",
    "constrain",
    "load_checkpoint",
    "read_plan",
    "save_checkpoint",
    "train",
]
